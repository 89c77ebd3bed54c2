"""Loggers: metrics.jsonl, the console, Weights & Biases, TensorBoard."""

from detr.telemetry.loggers.base import Cell, CompositeLogger, Logger, MediaLogger
from detr.telemetry.loggers.console import ConsoleLogger
from detr.telemetry.loggers.jsonl import JsonlLogger, past_evaluation_s, read_metrics, repair_last_line
from detr.telemetry.loggers.tensorboard import TensorboardLogger
from detr.telemetry.loggers.time_left import Evaluations
from detr.telemetry.loggers.wandb import WandbLogger

__all__ = [
    "Cell",
    "CompositeLogger",
    "ConsoleLogger",
    "Evaluations",
    "JsonlLogger",
    "Logger",
    "MediaLogger",
    "TensorboardLogger",
    "WandbLogger",
    "past_evaluation_s",
    "read_metrics",
    "repair_last_line",
]
