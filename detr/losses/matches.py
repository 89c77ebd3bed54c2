"""Matched pairs, from solutions on the host or on the device.

Shapes: K layers, N images, Lq queries, T the most boxes of any image, R matched pairs of a layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ops import assign


@dataclass(frozen=True)
class Matches:
    """Matched pairs; each image gives min(Lq, its boxes) of them in every layer.

    Attributes:
        image: (R,) int64, ascending.
        query: (K, R) int64; in no promised order within an image.
        target: (K, R) int64, row of the image's boxes.
    """

    image: Tensor
    query: Tensor
    target: Tensor


def matches_from_host(table: NDArray[np.int64], device: torch.device) -> Matches:
    """The rows of `table` (1 + 2*K, R), the image, the query and the target of each layer, on `device`."""
    rows = _to_device(table, device)
    num_layers = (len(table) - 1) // 2
    return Matches(rows[0], rows[1 : 1 + num_layers], rows[1 + num_layers :])


def assign_on_device(cost: Tensor, counts: Sequence[int]) -> Matches:
    """The cheapest pairs, on the device of `cost`, which nothing waits for.

    Args:
        cost: (K, N, Lq, T), finite.
        counts: Boxes of each image.
    """
    num_queries = cost.shape[2]
    num_pairs = np.minimum(counts, num_queries)
    # images with more boxes than queries are solved by query: `assign` tells each one's target
    is_by_query = np.asarray(counts) > num_queries
    image = np.repeat(np.arange(len(counts)), num_pairs)
    slot = np.concatenate([np.arange(n) for n in num_pairs])
    table = np.concatenate([counts, image, slot, is_by_query[image]]).astype(np.int64)
    sizes = [len(counts), *[len(image)] * 3]
    num_targets, images, slots, by_query = _to_device(table, cost.device).split(sizes)
    found = assign(cost, num_targets)[:, images, slots]  # (K, R)
    # for all batches alike, so that the loss is compiled for one layout in memory
    return Matches(images, slots.where(by_query > 0, found), found.where(by_query > 0, slots))


def _to_device(table: NDArray[np.int64], device: torch.device) -> Tensor:
    """In one copy that nothing waits for."""
    tensor = torch.from_numpy(table)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
