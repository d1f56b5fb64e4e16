"""What a run measures and shows: metrics and their record, the console, the report, the page about a hang."""
