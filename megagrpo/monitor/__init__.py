"""Metrics, recorded samples, console, report and watchdog of a run."""
