"""Classification and box heads."""

import copy
import math
from typing import cast

import torch
from torch import Tensor, nn

from detr.dtypes import linear_in_float32

# a query starts with this probability of being any class (RetinaNet's prior)
PRIOR_PROBABILITY = 0.01


class BoxHead(nn.Module):
    """Three linear layers with ReLU between them: (..., C) -> (..., 4) box logits, zero at the start.

    The last layer stays out of autocast and returns float32 at least: its four numbers are coordinates.
    """

    def __init__(self, d_model: int) -> None:
        super().__init__()
        last = nn.Linear(d_model, 4)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.layers = nn.ModuleList([nn.Linear(d_model, d_model), nn.Linear(d_model, d_model), last])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        return linear_in_float32(self.last_layer, x)

    @property
    def last_layer(self) -> nn.Linear:
        return cast(nn.Linear, self.layers[-1])


class DetectionHeads(nn.Module):
    """The heads of every decoder layer, and of the proposals in a two-stage model.

    Without refinement all layers share one pair of heads; with it each has its own, equal at the start; a
    two-stage model has one pair more, the last, for the proposals (recipe, section 6.6 and 6.7).

    Args:
        d_model: Channels C.
        num_classes: Rows of the classifier.
        num_layers: Decoder layers K.
        with_box_refine: Heads for each layer.
        two_stage: One pair more for the proposals.
    """

    def __init__(
        self, d_model: int, num_classes: int, num_layers: int, *, with_box_refine: bool, two_stage: bool
    ) -> None:
        super().__init__()
        if num_classes < 1:
            raise ValueError(f"num_classes must be at least 1; got {num_classes}")
        self.num_layers = num_layers
        class_head = nn.Linear(d_model, num_classes)
        nn.init.constant_(class_head.bias, -math.log((1 - PRIOR_PROBABILITY) / PRIOR_PROBABILITY))
        box_head = BoxHead(d_model)
        num_pairs = num_layers + int(two_stage) if with_box_refine else 1
        self.class_embed = nn.ModuleList(copy.deepcopy(class_head) for _ in range(num_pairs))
        self.bbox_embed = nn.ModuleList(copy.deepcopy(box_head) for _ in range(num_pairs))
        if not two_stage:
            # boxes start small around their reference point; proposals bring their own size
            with torch.no_grad():
                cast(BoxHead, self.bbox_embed[0]).last_layer.bias[2:] = -2.0

    def box_heads(self) -> list[nn.Module]:
        """The box head of each decoder layer, K modules."""
        return [self.bbox_embed[self._pair(layer)] for layer in range(self.num_layers)]

    def classify(self, states: Tensor) -> Tensor:
        """Class logits (K, N, Lq, num_classes) of decoder states (K, N, Lq, C)."""
        if len(self.class_embed) == 1:
            return self.class_embed[0](states)
        return torch.stack([self.class_embed[layer](states[layer]) for layer in range(self.num_layers)])

    def _pair(self, layer: int) -> int:
        return 0 if len(self.bbox_embed) == 1 else layer
