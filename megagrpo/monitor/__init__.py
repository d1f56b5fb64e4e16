"""What a run measures and shows: metrics, timeline and samples on record, the console, the report, a hang."""
