"""What `megagrpo prepare` makes for laptops: a random model of a real family, and small verifiable problems."""
