"""Memory, bytes and a bound of the seconds of an experiment, from the model's config.json only:
`megagrpo plan`."""
