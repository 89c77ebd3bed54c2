"""Everything that is measured of one row, in one process or in all ranks of it."""

import time
from dataclasses import replace

from detr.benchmark.steps.data import StepBatches
from detr.benchmark.steps.kernels import host_syncs, profile_kernels
from detr.benchmark.steps.row import StepRow
from detr.benchmark.steps.throughput import measure_steps, record_losses
from detr.distributed import world_size
from detr.engine.random_state import seed_everything
from detr.engine.state import TrainState

NUM_PROFILED_STEPS = 3


def batches_needed(*, num_warmup: int, num_steps: int) -> int:
    """Batches that `measure_speed` takes of a supply."""
    return num_warmup + 2 * num_steps + 1 + NUM_PROFILED_STEPS


def measure_speed(row: StepRow, state: TrainState, supply: StepBatches, *, num_warmup: int, num_steps: int) -> StepRow:
    """`row` with times, memory, kernels and host waits of this rank; images/s of all ranks.

    Args:
        row: What is measured: batch size and data source are read.
        state: What is trained; its weights change.
        supply: Its batches.
        num_warmup: Steps before the clock starts.
        num_steps: Timed steps.
    """
    times = measure_steps(state, supply, num_warmup=num_warmup, num_steps=num_steps)
    started_s = time.perf_counter()
    waits = host_syncs(state, next(supply.batches))
    kernels = profile_kernels(state, supply.batches, num_steps=NUM_PROFILED_STEPS)
    timed = row.with_times(times.whole, world_size=world_size())
    return replace(
        timed,
        phases_ms=times.phases_ms,
        kernel_ms=kernels.kernel_ms,
        num_kernels=kernels.num_kernels,
        msda_forward_ms=kernels.msda_forward_ms,
        msda_backward_ms=kernels.msda_backward_ms,
        msda_share=kernels.msda_share,
        host_syncs=None if waits is None else sum(waits.values()),
        host_sync_places=waits or {},
        num_graphs=times.num_graphs,
        loss=times.loss,
        top_kernels_ms=kernels.top_ms,
        spent_s=timed.spent_s | {"steps": times.steps_s, "profile": time.perf_counter() - started_s},
    )


def measure_losses(row: StepRow, state: TrainState, supply: StepBatches, *, num_steps: int, seed: int) -> StepRow:
    """`row` with the loss of every step.

    Args:
        row: What is run.
        state: What is trained; its weights change.
        supply: Its batches.
        num_steps: Steps to train.
        seed: Of what is random within a step.
    """
    started_s = time.perf_counter()
    seed_everything(seed, rank=0)
    losses = record_losses(state, supply, num_steps=num_steps)
    return replace(
        row, losses=losses, loss=losses[-1], spent_s=row.spent_s | {"steps": time.perf_counter() - started_s}
    )
