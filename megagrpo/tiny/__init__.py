"""Makes what `megagrpo prepare` offers for laptops: a random or a small pretrained model, and verifiable problems."""
