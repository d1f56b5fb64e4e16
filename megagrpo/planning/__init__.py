"""What an experiment needs on its cluster, from the model's config.json only: `megagrpo plan`."""
