"""One process or one node under torchrun: start-up, ranks, and the few collectives the project needs.

Every function works without a process group, as the only rank of a world of one. All ranks call the
collectives in the same order, never depending on data.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

# what torchrun sets for each process
_LAUNCH_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# until all ranks have started: shorter than a collective may take, for a wrong address is waited for in silence
_LONGEST_MEETING = timedelta(minutes=10)


@dataclass(frozen=True)
class DistributedContext:
    """Where this process stands.

    Attributes:
        rank: Index of this process in the run.
        local_rank: Index of this process on its machine; the CUDA device it owns.
        world_size: Number of processes in the run.
        device: What this process computes on, with its index for CUDA.
        store: Small values that ranks leave for each other outside collectives; None in a world of one.
    """

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    store: dist.Store | None = None


def init_distributed(device: str = "auto", *, timeout: timedelta = timedelta(minutes=30)) -> DistributedContext:
    """Resolve the device and, under torchrun, join the process group (NCCL for CUDA, gloo for the CPU, else what
    the device's extension of PyTorch brings).

    A world of one (no torchrun, or `--nproc_per_node=1`) makes no process group.

    Args:
        device: "auto" (CUDA where there is one, else CPU), "cpu", "cuda", "cuda:N" (one process only), or
            any other device type of PyTorch.
        timeout: How long a collective waits for the slowest rank. The others wait while rank 0 evaluates.

    Raises:
        ValueError: The launch environment is incomplete or not numeric, CUDA was named and there is none, there are
            more processes than GPUs, or the ranks do not meet within 10 minutes.
    """
    rank, local_rank, world_size = _read_launch_environment(os.environ)
    resolved = _resolve_device(device, local_rank, world_size)
    if resolved.type == "cuda":
        torch.cuda.set_device(resolved)
    elif resolved.index is not None and world_size > 1:
        torch.get_device_module(resolved).set_device(resolved)
    store = None
    if world_size > 1:
        shared = _meet(rank, world_size, timeout)
        # torchrun keeps its store when it starts the ranks again: without a prefix of their own they would look for
        # each other at the addresses of those that died, and hang
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt {attempt} of {world_size} ranks", shared)
        dist.init_process_group(
            dist.get_default_backend_for_device(resolved.type),
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=resolved if resolved.type == "cuda" else None,
        )
    return DistributedContext(rank, local_rank, world_size, resolved, store)


def cleanup() -> None:
    """Leave the process group; nothing to do for a world of one."""
    if _has_group():
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if _has_group() else 0


def world_size() -> int:
    return dist.get_world_size() if _has_group() else 1


def is_main() -> bool:
    """Whether this process is the one that prints and writes files."""
    return rank() == 0


def barrier() -> None:
    """Wait until every rank is here."""
    if not _has_group():
        return
    if dist.get_backend() == "nccl":
        dist.barrier(device_ids=[torch.cuda.current_device()])
    else:
        dist.barrier()


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """Sum of `tensor` over all ranks, without its gradient; the input is left as it is.

    Does not wait for the device under NCCL.

    Args:
        tensor: Any shape and dtype, the same on every rank, on the device of the rank.
    """
    if not _has_group():
        return tensor.detach()
    total = tensor.detach().clone()
    dist.all_reduce(total)
    return total


def all_reduce_mean(tensor: Tensor) -> Tensor:
    """Mean of a floating `tensor` over all ranks; see `all_reduce_sum`."""
    return all_reduce_sum(tensor) / world_size()


def average_tensors(tensors: Sequence[Tensor]) -> None:
    """Overwrite `tensors` with their means over all ranks, in place and in one collective.

    Does not wait for the device under NCCL. Takes as much memory again as the tensors together.

    Args:
        tensors: Floating, of one dtype and device; as many of the same shapes and strides on every rank, which is not
            checked here. Gradients have the strides of their parameters, and `share_weights` checks those.
    """
    if not _has_group() or not tensors:
        return
    # in the order of their memory, both copies are a handful of kernels; by shape, a kernel for each tensor that is
    # not row-major
    lines = [_in_memory_order(tensor) for tensor in tensors]
    # each with room up to a multiple of 16 elements, for wide loads; what lies there is summed and never read
    sizes = [size for line in lines for size in (line.numel(), -line.numel() % 16)]
    flat = lines[0].new_empty(sum(sizes))
    # in one call: views made one by one take the host 1.3 ms for the 349 gradients of R50, these 0.3
    parts = [
        part if line.dim() == 1 else part.view(line.shape)
        for part, line in zip(flat.split(sizes)[::2], lines, strict=True)
    ]
    torch._foreach_copy_(parts, lines)
    # before the sum, which could overflow
    flat /= dist.get_world_size()
    dist.all_reduce(flat)
    torch._foreach_copy_(lines, parts)


def _in_memory_order(tensor: Tensor) -> Tensor:
    """A view (n,) of a tensor without gaps, row-major, channels last or any other order; else the tensor itself."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    strides = tensor.stride()
    in_order = tensor.permute(sorted(range(tensor.dim()), key=lambda axis: -strides[axis]))
    return in_order.view(-1) if in_order.is_contiguous() else tensor


def broadcast_tensors(tensors: Iterable[Tensor]) -> None:
    """Overwrite `tensors` with those of rank 0, in place; as many of the same shapes on every rank."""
    if not _has_group():
        return
    for tensor in tensors:
        dist.broadcast(tensor.detach(), src=0)


def broadcast_object(value: T, *, source: int = 0) -> T:
    """The `value` of rank `source` on every rank; what the others pass is ignored.

    The value is pickled, so this is for small plain objects outside the step.
    """
    if not _has_group():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=source)
    return box[0]


def gather_objects(value: T) -> list[T]:
    """The `value` of every rank in rank order on rank 0, and nothing elsewhere.

    Values are pickled and may differ in size; all ranks call it, whatever they hold.
    """
    if not _has_group():
        return [value]
    # the entries only give the list its length and type; every one is overwritten
    values = [value] * dist.get_world_size() if is_main() else None
    dist.gather_object(value, values, dst=0)
    return values or []


def require_same(facts: Mapping[str, object], *, advice: str) -> None:
    """Refuse to go on, on every rank, unless all ranks hold the same `facts`: for what no collective would notice.

    Args:
        facts: Small plain values by what they are of.
        advice: What to do about a difference, the end of the message.

    Raises:
        ValueError: A rank differs from rank 0; names up to five facts, with what both say.
    """
    every = gather_objects(dict(facts))
    found = next(filter(None, (_disagreement(rank, every) for rank in range(len(every)))), None)
    found = broadcast_object(found)
    if found is not None:
        raise ValueError(f"{found}; {advice}")


def _disagreement(rank: int, every: Sequence[dict[str, object]]) -> str | None:
    """What a rank holds otherwise than rank 0, or None."""
    absent = "(absent)"
    first, other = every[0], every[rank]
    names = [name for name in first | other if first.get(name, absent) != other.get(name, absent)]
    if not names:
        return None
    shown = ", ".join(f"{name} is {other.get(name, absent)} instead of {first.get(name, absent)}" for name in names[:5])
    return f"rank {rank} differs from rank 0: {shown}" + (f", and {len(names) - 5} more" if len(names) > 5 else "")


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _meet(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The store that all ranks share, whose answers are waited for as long as `timeout`.

    Raises:
        ValueError: This rank cannot reach it, or make it, or the others do not come.
    """
    try:
        shared: dist.Store = next(dist.rendezvous("env://", rank, world_size, timeout=min(timeout, _LONGEST_MEETING)))[
            0
        ]
    except dist.DistError as error:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise ValueError(
            f"rank {rank} of {world_size} did not meet the others at {place} (MASTER_ADDR and MASTER_PORT): {error}. "
            "Give the address of rank 0's machine, as the others reach it, and a port that is free there, and start "
            "all ranks"
        ) from error
    shared.set_timeout(timeout)
    return shared


def _read_launch_environment(environment: Mapping[str, str]) -> tuple[int, int, int]:
    """(rank, local rank, world size) from what torchrun sets; (0, 0, 1) without torchrun."""
    found = {name: environment[name] for name in _LAUNCH_VARIABLES if name in environment}
    # clusters set MASTER_ADDR for every job, so it alone does not mean torchrun
    if not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} & found.keys():
        return 0, 0, 1
    missing = [name for name in _LAUNCH_VARIABLES if name not in found]
    advice = "Start with `torchrun --nproc_per_node=N ...`, or unset these variables for one process"
    if missing:
        raise ValueError(
            f"the environment looks like torchrun's but lacks {', '.join(missing)}; found {found}. {advice}"
        )
    numbers = {}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not found[name].isdecimal():
            raise ValueError(f"{name} must be an integer >= 0; found {found}. {advice}")
        numbers[name] = int(found[name])
    if not max(numbers["RANK"], numbers["LOCAL_RANK"]) < numbers["WORLD_SIZE"]:
        raise ValueError(f"RANK and LOCAL_RANK must be below WORLD_SIZE; found {found}. {advice}")
    return numbers["RANK"], numbers["LOCAL_RANK"], numbers["WORLD_SIZE"]


def _resolve_device(device: str, local_rank: int, world_size: int) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        requested = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device} is not a device: {error}. Use auto, cpu, cuda or cuda:N") from error
    if requested.type != "cuda":
        is_one_of_many = world_size > 1 and requested.type != "cpu" and requested.index is None
        return torch.device(requested.type, local_rank) if is_one_of_many else requested
    if not torch.cuda.is_available():
        raise ValueError(
            f"device={device} needs a CUDA GPU; this PyTorch ({torch.__version__}) finds none. "
            "Use device=cpu, or install a CUDA build of PyTorch and check `nvidia-smi`"
        )
    if world_size > 1 and requested.index is not None:
        raise ValueError(
            f"device={device} names one GPU for {world_size} processes; use device=cuda, and each process "
            "takes the GPU of its LOCAL_RANK"
        )
    index = requested.index if requested.index is not None else local_rank
    if index >= torch.cuda.device_count():
        raise ValueError(
            f"this process needs GPU {index} (LOCAL_RANK {local_rank} of {world_size} processes), but "
            f"{torch.cuda.device_count()} are visible. Lower --nproc_per_node or widen CUDA_VISIBLE_DEVICES"
        )
    return torch.device("cuda", index)
