"""Command line tools: Hydra mains that compose, build and call. The work is done in `detr`."""
