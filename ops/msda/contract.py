"""What the operator accepts, and its error messages.

Shapes: N batch, S = sum(H_l * W_l), M heads, D channels a head, Lq queries, L levels, P points.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ops.arguments import require_tensor, type_name
from ops.msda.config import KernelConfig

SpatialShapes = Sequence[tuple[int, int]] | Tensor


def host_spatial_shapes(spatial_shapes: SpatialShapes) -> tuple[tuple[int, int], ...]:
    """`spatial_shapes` as a tuple of (H, W) ints, checked.

    Raises:
        TypeError: Neither pairs nor a tensor.
        ValueError: A CUDA tensor, no levels, or an entry that is not a pair of positive ints.
    """
    if isinstance(spatial_shapes, Tensor):
        if spatial_shapes.device.type != "cpu":
            raise ValueError(
                f"spatial_shapes must live on the host; got a tensor on {spatial_shapes.device}. Pass a tuple "
                "of (H, W) ints made once a batch (reading a device tensor here would stall every layer)"
            )
        if spatial_shapes.is_floating_point() or spatial_shapes.ndim != 2 or spatial_shapes.shape[1] != 2:
            raise ValueError(
                f"spatial_shapes must be L pairs (H, W) of ints; got a {spatial_shapes.dtype} tensor of "
                f"shape {tuple(spatial_shapes.shape)}"
            )
        spatial_shapes = spatial_shapes.tolist()
    try:
        shapes = tuple(map(tuple, spatial_shapes))
    except TypeError as error:
        raise TypeError(
            f"spatial_shapes must be L pairs (H, W) of ints; got {spatial_shapes!r}. Pass one pair a level, as in "
            "((100, 150), (50, 75)), or an integer tensor (L, 2) on the CPU"
        ) from error
    if torch.compiler.is_compiling():
        # sizes may be symbols here, which have no hash
        return _checked_shapes(shapes)
    return _checked_shapes_once(shapes)


def _checked_shapes(shapes: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, int], ...]:
    if not shapes:
        raise ValueError("spatial_shapes must hold at least one (H, W) pair; got none")
    for level, pair in enumerate(shapes):
        if len(pair) != 2 or any(isinstance(side, float) or side < 1 for side in pair):
            raise ValueError(f"spatial_shapes[{level}] must be a pair (H, W) of positive ints; got {pair!r}")
    return shapes  # type: ignore[return-value]


_checked_shapes_once = lru_cache(maxsize=1024)(_checked_shapes)


def check_value(value: Tensor, shapes: tuple[tuple[int, int], ...]) -> None:
    """Raise a TypeError unless `value` is a tensor, a ValueError unless (N, S, M, D), floating, S = sum(H * W)."""
    require_tensor("value", value)
    if value.ndim != 4:
        raise ValueError(f"value must be (N, S, M, D); got shape {tuple(value.shape)}")
    _check_floating("value", value)
    S = sum(H * W for H, W in shapes)
    if value.shape[1] != S:
        raise ValueError(
            f"value must hold S = sum(H * W) = {S} cells in dimension 1 for spatial_shapes={shapes}; "
            f"got {value.shape[1]} in shape {tuple(value.shape)}. Is the order (H, W), and are all levels there?"
        )


def check_tensor(name: str, tensor: Tensor, value: Tensor, legend: str, ndim: int) -> None:
    """Raise a TypeError unless it is a tensor, a ValueError unless it has this rank, a floating dtype and the device
    of `value`."""
    require_tensor(name, tensor)
    if tensor.ndim != ndim:
        raise ValueError(f"{name} must be {legend}; got shape {tuple(tensor.shape)}")
    _check_floating(name, tensor)
    if tensor.device != value.device:
        raise ValueError(f"{name} must be on {value.device} like value; got {tensor.device}. Move it there first")


def _check_floating(name: str, tensor: Tensor) -> None:
    if not tensor.is_floating_point():
        raise ValueError(f"{name} must have a floating dtype; got {tensor.dtype}. Convert it explicitly")


def check_shape(name: str, tensor: Tensor, expected: tuple[int, ...], legend: str) -> None:
    """Raise a ValueError unless `tensor` has the expected shape."""
    if tuple(tensor.shape) != expected:
        raise ValueError(
            f"{name} must be {legend} = {expected}, fitting value and spatial_shapes; got shape {tuple(tensor.shape)}"
        )


def check_valid_sizes(valid_sizes: Tensor, value: Tensor, expected: tuple[int, ...]) -> None:
    """Raise a TypeError unless it is a tensor, a ValueError unless it holds integers of this shape beside `value`."""
    require_tensor("valid_sizes", valid_sizes)
    if valid_sizes.is_floating_point() or valid_sizes.dtype == torch.bool:
        raise ValueError(f"valid_sizes must hold integers (h, w); got {valid_sizes.dtype}")
    check_shape("valid_sizes", valid_sizes, expected, "(N, L, 2)")
    if valid_sizes.device != value.device:
        raise ValueError(f"valid_sizes must be on {value.device} like value; got {valid_sizes.device}")


def check_kernel(kernel: KernelConfig | None) -> KernelConfig:
    """`kernel`, or the default for None.

    Raises:
        TypeError: It is something else, such as the name of a backend.
    """
    if kernel is not None and not isinstance(kernel, KernelConfig):
        raise TypeError(f"kernel must be an ops.KernelConfig; got {type_name(kernel)}. Pass KernelConfig(backend=NAME)")
    return kernel or KernelConfig()
