"""The trainers' view of the engines, and the code that runs inside them."""
