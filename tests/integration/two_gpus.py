"""What only GPUs can show; run by scripts/test_two_gpus.sh under torchrun, or plainly for one GPU.

Memory over 1,000 steps of random sizes, no host wait in a watched step, a checkpoint beside the steps, a resume with
the same bits, and the throughput of one rank and of all. Prints one line a finding; exits with 1 if one is not as it
should be.
"""

import argparse
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from detr.distributed import DistributedContext, all_reduce_mean, barrier, cleanup, init_distributed, is_main
from detr.engine.checkpoint import Checkpoint, checkpoint_payload
from detr.engine.checkpoint_writer import CheckpointWriter, host_copy
from detr.engine.optim import build_adamw
from detr.engine.precision import Precision
from detr.engine.random_state import random_state, restore_random_state, seed_everything
from detr.engine.restore import restore
from detr.engine.run_folder import RunFolder
from detr.engine.schedule import StepDecay
from detr.engine.state import TrainState, build_train_state
from detr.engine.step import train_step
from detr.engine.step_monitor import StepMonitor
from detr.losses import HungarianMatcher, SetCriterion
from detr.losses.matcher import Solver
from detr.models import Backbone, deformable_detr
from detr.structures import Batch, ClassTable, ImageBatch, Target
from ops import KernelConfig

NUM_CLASSES = 5
TABLE = ClassTable(tuple("abcde"), (1, 2, 3, 4, 5))


def make_state(
    context: DistributedContext, *, cuda_graphs: bool = False, dropout: float = 0.1, solver: Solver = "auto"
) -> TrainState:
    seed_everything(0, rank=0)
    model = deformable_detr(
        Backbone("resnet18", freeze_norm=True),
        num_classes=NUM_CLASSES,
        num_queries=100,
        d_model=128,
        num_encoder_layers=2,
        num_decoder_layers=2,
        dropout=dropout,
        with_box_refine=True,
        kernel=KernelConfig(backend="cuda", deterministic=True),
    )
    state = build_train_state(
        model,
        SetCriterion(num_classes=NUM_CLASSES, matcher=HungarianMatcher(solver=solver)),
        build_adamw,
        StepDecay(epochs=1, milestones=()),
        Precision("bf16"),
        context,
        total_batch=4 * context.world_size,
        steps_per_epoch=10_000,
        ema_decay=0.999,
        cuda_graphs=cuda_graphs,
    )
    seed_everything(1, context.rank)
    return state


def batches(rank: int, *, low: int, high: int, num_kinds: int = 1000) -> Iterator[Batch]:
    """Batches of four images whose sizes are drawn from [low, high], on the CPU; pinned."""
    draw = random.Random(rank)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(num_kinds):
        images, targets = [], []
        for index in range(4):
            h, w = (draw.randint(low, high) for _ in range(2))
            count = draw.randint(0, 20)
            images.append(torch.randint(0, 256, (3, h, w), dtype=torch.uint8, generator=generator))
            labels = torch.randint(0, NUM_CLASSES, (count,), generator=generator)
            boxes = torch.rand(count, 4, generator=generator) * 0.4 + 0.2
            targets.append(Target(labels, boxes, image_id=index, orig_size=(h, w)))
        yield Batch(ImageBatch.from_images(images, pad_to=32), tuple(targets)).pin_memory()


class Findings:
    """Lines on rank 0, and whether all were as they should be."""

    def __init__(self) -> None:
        self.all_right = True

    def say(self, text: str, is_right: bool = True) -> None:
        self.all_right &= is_right
        if is_main():
            print(f"{'ok  ' if is_right else 'BAD '} {text}", flush=True)


def memory(context: DistributedContext, findings: Findings, num_steps: int) -> None:
    """Memory in use after 1,000 steps of random sizes, against that after the first hundred."""
    state = make_state(context)
    in_use, reserved = [], []
    for number, batch in enumerate(batches(context.rank, low=160, high=448, num_kinds=num_steps)):
        train_step(state, [batch])
        if number % 100 == 99:
            in_use.append(torch.cuda.memory_allocated() / 2**20)
            reserved.append(torch.cuda.memory_reserved() / 2**20)
    grown_mib = in_use[-1] - in_use[0]
    findings.say(
        f"memory over {num_steps} steps of random sizes: {in_use[0]:.1f} -> {in_use[-1]:.1f} MiB in use, "
        f"{reserved[0]:.0f} -> {reserved[-1]:.0f} MiB reserved",
        abs(grown_mib) < 8,
    )


def waits(context: DistributedContext, findings: Findings, folder: Path, *, solver: Solver, waits_a_step: int) -> None:
    """A watched step, and the start of a save, make the host wait nowhere but in a matcher that solves there."""
    state = make_state(context, solver=solver)
    monitor = StepMonitor(state, folder, rank=context.rank, policy="stop", max_in_row=10)
    window = list(batches(context.rank, low=256, high=256, num_kinds=4))
    for batch in window:
        train_step(state, [batch])
    num_copies = 0
    copy_to_cpu = torch.Tensor.cpu

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal num_copies
        num_copies += 1
        torch.cuda.set_sync_debug_mode("default")
        try:
            return copy_to_cpu(tensor)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    torch.Tensor.cpu = counted  # type: ignore[method-assign]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number, batch in enumerate(window):
            monitor.before_step()
            result = train_step(state, [batch])
            result.num_stop_requests.read()
            monitor.after_step(number, [batch], result)
        _, ready = host_copy(checkpoint_payload(snapshot(state, context)))
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.Tensor.cpu = copy_to_cpu  # type: ignore[method-assign]
    assert ready is not None
    ready.synchronize()
    findings.say(
        f"matched on the {solver}, waits of {len(window)} watched steps and a save: {num_copies}",
        num_copies == waits_a_step * len(window),
    )


def snapshot(state: TrainState, context: DistributedContext) -> Checkpoint:
    return Checkpoint(
        epoch=0,
        global_step=0,
        model=state.detector.state_dict(),
        optimizer=state.optimizer.state_dict(),
        schedule=state.schedule.state_dict(),
        scaler=state.scaler.state_dict(),
        ema=None if state.ema is None else state.ema.state_dict(),
        random_states=[random_state(context.device)],
        class_table=TABLE,
        preprocessing={},
        config={},
        metrics={},
        best={},
    )


def resume(context: DistributedContext, findings: Findings) -> None:
    """Six steps against three, a checkpoint and three by a state built anew: the same bits on every rank."""
    window = list(batches(context.rank, low=256, high=256, num_kinds=6))
    whole = make_state(context)
    middle: Any = None
    for number, batch in enumerate(window):
        if number == 3:
            middle, ready = host_copy(checkpoint_payload(snapshot(whole, context)))
            assert ready is not None
            ready.synchronize()
        train_step(whole, [batch])
    middle.pop("format_version")
    middle["class_table"] = TABLE
    checkpoint = Checkpoint(**middle)
    again = make_state(context)
    restore(again, checkpoint, source="memory")
    restore_random_state(checkpoint.random_states[0], context.device)
    for batch in window[3:]:
        train_step(again, [batch])
    worst = max(
        (one - other).detach().abs().max().item()
        for one, other in zip(whole.detector.parameters(), again.detector.parameters(), strict=True)
    )
    findings.say(f"three and three steps against six: weights differ by at most {worst:.3g}", worst == 0)


def captured(context: DistributedContext, findings: Findings) -> None:
    """Captured passes with gradients averaged after them, against plain passes; sizes differ between the ranks."""
    window = list(batches(context.rank, low=224, high=256, num_kinds=6))
    # masks that a captured pass draws are others
    plain, graphed = (make_state(context, cuda_graphs=cuda_graphs, dropout=0.0) for cuda_graphs in (False, True))
    losses = [[float(train_step(state, [batch]).loss) for batch in window] for state in (plain, graphed)]
    worst = max(abs(mine - reference) / reference for reference, mine in zip(*losses, strict=True))
    findings.say(f"six captured steps against plain ones: losses differ by at most {worst:.2%}", worst < 0.01)
    total = torch.stack([p.detach().double().abs().sum() for p in graphed.detector.parameters()])
    same = torch.equal(all_reduce_mean(total), total)
    findings.say("captured steps leave the ranks with the same weights", same)


def saving(context: DistributedContext, findings: Findings, folder: Path) -> None:
    """Steps with a save under way against steps without one."""
    state = make_state(context)
    window = list(batches(context.rank, low=416, high=416, num_kinds=4))
    writer = CheckpointWriter(RunFolder(folder, None), keep_last=1)

    def milliseconds(num_steps: int) -> float:
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        for number in range(num_steps):
            train_step(state, [window[number % 4]])
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - start_s) / num_steps

    milliseconds(20)
    quiet_ms = milliseconds(20)
    if is_main():
        # pins the memory that later saves use again
        writer.save(snapshot(state, context), is_best=False)
        writer.wait()
    barrier()
    start_s = time.perf_counter()
    if is_main():
        writer.save(snapshot(state, context), is_best=False)
    call_ms = 1e3 * (time.perf_counter() - start_s)
    busy_ms = milliseconds(20)
    writer.wait()
    megabytes = (folder / "last.pt").stat().st_size / 1e6 if is_main() else 0.0
    findings.say(
        f"saving {megabytes:.0f} MB: the call takes {call_ms:.1f} ms; a step takes {quiet_ms:.2f} ms, with the save "
        f"under way {busy_ms:.2f} ms"
    )


def throughput(context: DistributedContext, findings: Findings, *, cuda_graphs: bool) -> None:
    """Images a second of all ranks together."""
    state = make_state(context, cuda_graphs=cuda_graphs)
    window = list(batches(context.rank, low=640, high=640, num_kinds=4))
    for number in range(30):
        if number == 10:
            torch.cuda.synchronize()
            barrier()
            start_s = time.perf_counter()
        train_step(state, [window[number % 4]])
    torch.cuda.synchronize()
    seconds = float(all_reduce_mean(torch.tensor(time.perf_counter() - start_s, device=context.device)))
    kind = "captured" if cuda_graphs else "plain"
    speed = 4 * 20 * context.world_size / seconds
    findings.say(f"{speed:.1f} images/s on {context.world_size} GPUs at 640 x 640 px, {kind} passes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="an empty folder for checkpoints, the same for all ranks")
    parser.add_argument("--steps", type=int, default=1000, help="of the memory test")
    arguments = parser.parse_args()
    context = init_distributed("cuda")
    findings = Findings()
    for cuda_graphs in (False, True):
        throughput(context, findings, cuda_graphs=cuda_graphs)
    captured(context, findings)
    waits(context, findings, arguments.folder, solver="host", waits_a_step=1)
    waits(context, findings, arguments.folder, solver="device", waits_a_step=0)
    resume(context, findings)
    saving(context, findings, arguments.folder)
    memory(context, findings, arguments.steps)
    cleanup()
    raise SystemExit(0 if findings.all_right else 1)


if __name__ == "__main__":
    main()
