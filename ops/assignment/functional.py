"""`assign`: many assignment problems in one call, on the device that holds their costs.

Shapes: K problems an image, N images, Lq queries, T the most targets of any image, S = min(Lq, T).
"""

import importlib.util

import torch
from torch import Tensor

from ops.arguments import require_device, require_tensor

_HAS_TRITON = importlib.util.find_spec("triton") is not None


def assign_runs_on(device: torch.device) -> bool:
    """Whether `assign` takes costs on this device.

    Raises:
        TypeError: `device` is no torch.device.
    """
    require_device("device", device)
    return device.type == "cpu" or (device.type == "cuda" and _HAS_TRITON)


def assign(cost: Tensor, num_targets: Tensor) -> Tensor:
    """Give each target a query of its own, at the least total cost (or each query a target, where those are more).

    Shortest augmenting paths (Crouse, "On implementing 2D rectangular assignment algorithms", 2016), in float64: the
    algorithm of `scipy.optimize.linear_sum_assignment`, which is what runs for costs on the CPU. On CUDA a Triton
    kernel, one program a problem; nothing waits for the device. Assignments of equal cost may differ between the two.

    Args:
        cost: (K, N, Lq, T) float32 or float64, finite; any strides.
        num_targets: (N,) int64 in [0, T], on the device of `cost`: an image's targets are its first so many.

    Returns:
        (K, N, S) int64. Of an image with n targets the first min(Lq, n) entries count: while n <= Lq, entry t is the
        query of target t; else entry q is the target of query q. The rest is -1.

    Raises:
        TypeError: An argument is no tensor.
        ValueError: Shapes, dtypes or devices are not those above, or the device is not one of the two.
    """
    require_tensor("cost", cost)
    require_tensor("num_targets", num_targets)
    if cost.ndim != 4 or cost.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"assign needs costs (K, N, Lq, T) in float32 or float64; got {tuple(cost.shape)} in {cost.dtype}"
        )
    if num_targets.shape != cost.shape[1:2] or num_targets.dtype != torch.int64 or num_targets.device != cost.device:
        raise ValueError(
            f"assign needs num_targets ({cost.shape[1]},) in int64 on {cost.device}; got {tuple(num_targets.shape)} in "
            f"{num_targets.dtype} on {num_targets.device}"
        )
    assigned = num_targets.new_full((*cost.shape[:2], min(cost.shape[2:])), -1)
    if assigned.numel() == 0:
        return assigned
    if cost.device.type == "cpu":
        _assign_with_scipy(cost, num_targets, assigned)
    elif assign_runs_on(cost.device):
        from ops.assignment.kernel import launch_assign

        launch_assign(cost, num_targets, assigned)
    else:
        raise ValueError(
            f"assign runs on the CPU and, with Triton installed, on CUDA; the costs are on {cost.device}. Bring them "
            "to the CPU"
        )
    return assigned


def _assign_with_scipy(cost: Tensor, num_targets: Tensor, assigned: Tensor) -> None:
    from scipy.optimize import linear_sum_assignment

    for problems, solutions in zip(cost.detach().numpy(), assigned, strict=True):
        for problem, count, solution in zip(problems, num_targets.tolist(), solutions, strict=True):
            queries, targets = (torch.from_numpy(index) for index in linear_sum_assignment(problem[:, :count]))
            if count <= len(problem):
                solution[targets] = queries
            else:
                solution[queries] = targets
