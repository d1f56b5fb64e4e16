"""Shows runs in a browser: `megagrpo view` makes one HTML file that needs no network, and a trace for Perfetto."""
