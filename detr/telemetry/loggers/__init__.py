"""Loggers: metrics.jsonl, the console, Weights & Biases, TensorBoard."""

from detr.telemetry.loggers.base import CompositeLogger, Logger
from detr.telemetry.loggers.console import ConsoleLogger
from detr.telemetry.loggers.jsonl import JsonlLogger, read_metrics
from detr.telemetry.loggers.tensorboard import TensorboardLogger
from detr.telemetry.loggers.wandb import WandbLogger

__all__ = [
    "CompositeLogger",
    "ConsoleLogger",
    "JsonlLogger",
    "Logger",
    "TensorboardLogger",
    "WandbLogger",
    "read_metrics",
]
