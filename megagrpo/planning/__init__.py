"""Says what an experiment will need and do on its cluster, from the model's config.json alone: `megagrpo plan`."""
