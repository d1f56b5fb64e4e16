"""Commands besides training that torchrun starts as ranks: warm-up, export, replay."""
