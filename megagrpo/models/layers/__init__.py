"""The modules that several kinds of layers share."""
