"""From groups to forward passes: samples balanced over ranks, a Batch, its micro-batches."""
