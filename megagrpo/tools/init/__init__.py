"""`megagrpo init`: an experiment for a model and a data file, as a commented YAML file."""
