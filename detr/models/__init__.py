"""The detector: backbone -> neck -> encoder -> queries -> decoder -> heads."""

from detr.models.backbone import Backbone
from detr.models.build import deformable_detr
from detr.models.deformable_detr import DeformableDETR

__all__ = ["Backbone", "DeformableDETR", "deformable_detr"]
