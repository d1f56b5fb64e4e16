"""Says what an experiment will do on its cluster, from the model's config.json alone: `megagrpo plan-weights`."""
