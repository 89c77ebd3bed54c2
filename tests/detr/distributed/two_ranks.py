"""Run by test_distributed under torchrun: each rank writes what the collectives gave it."""

import json
import sys
from pathlib import Path

import torch

from detr import distributed


def in_every_layout(rank: int) -> list[torch.Tensor]:
    """What the ranks average: gradients keep the layout of their parameters. Sizes are no multiples of anything."""
    torch.manual_seed(rank)
    return [
        torch.randn(2, 3),
        torch.randn(5, 7).t(),
        torch.randn(3, 5, 2, 3).contiguous(memory_format=torch.channels_last),
        torch.randn(4, 1, 3, 3).contiguous(memory_format=torch.channels_last),
        torch.randn(3, 5, 1, 1).contiguous(memory_format=torch.channels_last),
        torch.randn(4, 3, 2).permute(2, 0, 1),
        # with gaps
        torch.randn(4, 6)[:, ::2],
        torch.randn(3, 0),
        torch.randn(()),
        torch.randn(17),
    ]


def refusal(facts: dict[str, object]) -> str:
    try:
        distributed.require_same(facts, advice="start them alike")
    except ValueError as error:
        return str(error)
    return ""


def main(output_dir: Path) -> None:
    context = distributed.init_distributed("cpu")
    rank = context.rank
    # scaled by the rank, so that a collective that does nothing shows
    tensor = torch.tensor([1.0, 10.0]) * (rank + 1)
    report = {
        "context": [context.rank, context.local_rank, context.world_size, str(context.device)],
        "ranks": [distributed.rank(), distributed.world_size(), distributed.is_main()],
        "sum": distributed.all_reduce_sum(tensor).tolist(),
        "mean": distributed.all_reduce_mean(tensor).tolist(),
        "input": tensor.tolist(),
        "broadcast": distributed.broadcast_object({"from": rank}),
        "broadcast from 1": distributed.broadcast_object(rank, source=1),
        "gathered": distributed.gather_objects("x" * 1000 * rank),
    }
    averaged = in_every_layout(rank)
    report["given"] = [tensor.tolist() for tensor in averaged]
    report["given strides"] = [list(tensor.stride()) for tensor in averaged]
    distributed.average_tensors(averaged)
    report["averaged"] = [tensor.tolist() for tensor in averaged]
    report["averaged strides"] = [list(tensor.stride()) for tensor in averaged]
    distributed.average_tensors([])
    parameter = torch.nn.Parameter(torch.full((2,), float(rank)))
    distributed.broadcast_tensors([parameter])
    report["broadcast parameter"] = parameter.tolist()
    distributed.require_same({"seed": 1, "data": "photos"}, advice="never said")
    report["refused"] = refusal({"seed": 1 + rank, "data": "photos"} | ({"more": 2} if rank else {}))
    report["refused many"] = refusal({f"key {number}": rank for number in range(7)})
    distributed.barrier()
    (output_dir / f"{rank}.json").write_text(json.dumps(report))
    distributed.cleanup()
    assert distributed.world_size() == 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
