"""ReLU and dropout in one pass over memory, for the wide middle of a feed-forward layer."""

from ops.relu_dropout.functional import relu_dropout

__all__ = ["relu_dropout"]
