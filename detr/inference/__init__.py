"""Using a trained model: prediction, exports, analysis reports, a look at where attention samples."""

from detr.inference.saved_model import Predictor

__all__ = ["Predictor"]
