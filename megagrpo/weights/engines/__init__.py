"""The engines as the exchange sees them, and the code that runs inside them."""
