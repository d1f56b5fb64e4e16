"""Prompts in, batches out: prompt files, chat template, cursor, padding, and the micro-batch plan."""
