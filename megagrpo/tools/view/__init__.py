"""`megagrpo view`: the samples of runs as one HTML file that needs no network."""
