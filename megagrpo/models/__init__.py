"""The models: what they are made of, how files hold them, and the modules that trainers build."""
