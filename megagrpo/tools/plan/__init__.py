"""Memory and a bound of the seconds of an experiment, and layouts that fit, from the model's
config.json only: `megagrpo plan`."""
