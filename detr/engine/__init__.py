"""The training engine: one step, its schedule and precision, the epoch loop, checkpoints, evaluation."""
