"""Metrics, timeline, recorded samples, console, report and watchdog of a run."""
