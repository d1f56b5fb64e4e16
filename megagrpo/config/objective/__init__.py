"""Parts of the `algorithm` section."""
