"""The loop: what a step does, the run that it works on, and evaluations between steps."""
