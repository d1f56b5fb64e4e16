"""What `megagrpo check` tries as a run will: tokenizer, rows, chat template and graders."""
