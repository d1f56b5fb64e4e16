"""Programs that torchrun starts besides training: warm-up, export, replay."""
