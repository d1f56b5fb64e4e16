"""Makes what `megagrpo prepare` offers for laptops: a random model of a real family, and small verifiable problems."""
