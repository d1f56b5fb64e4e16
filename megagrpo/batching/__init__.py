"""From groups to what one forward pass sees: samples balanced over ranks, a Batch, its micro-batches."""
