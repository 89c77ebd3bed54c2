"""Deformable DETR: model, losses, data, evaluation and the training engine."""
