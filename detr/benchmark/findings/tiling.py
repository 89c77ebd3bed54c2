"""Tilings of the forward pass from point-parallel to query-block: does occupancy decide? (GPU paper: no.)

One Triton kernel (`tile_kernel.py`) with tiles of any size, so that nothing else differs.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from detr.benchmark.findings.ncu import Counters
from detr.benchmark.findings.occupancy import (
    MULTIPROCESSORS,
    Multiprocessor,
    Resources,
    registers_of,
    theoretical_occupancy,
)
from detr.benchmark.findings.tile_kernel import TileForward, Tiling, compile_tile
from detr.benchmark.ops.inputs import DTYPES, OpCase, compulsory_bytes, make_inputs
from ops.msda.dispatch import backend_module
from ops.msda.problem import Gradients, Problem
from ops.testing import Case as ParityCase
from ops.testing import expectation, random_problem
from ops.timing import Timing, time_cuda

OCCUPANCY = "sm__warps_active.avg.pct_of_peak_sustained_active"
DRAM, DRAM_SHARE = "dram__bytes.sum.per_second", "dram__throughput.avg.pct_of_peak_sustained_elapsed"
L2 = "lts__t_bytes.sum.per_second"
METRICS = (OCCUPANCY, DRAM, DRAM_SHARE, L2)
_PARITY = ParityCase(N=2, Lq=301, M=8, shapes=((20, 39), (13, 17), (7, 8), (2, 4)))
_COPY_BYTES = 2**30


@dataclass(frozen=True)
class TilingRow:
    """One tiling; the order of the fields is the order of the columns.

    Attributes:
        name: Of the tiling, or `cuda` and `triton` for the shipped kernels.
        dtype: Of value.
        batch_size: Images.
        block_q, block_p, num_warps: See `Tiling`; None for the shipped kernels.
        status: `ok`, or why there are no numbers.
        verified: Whether the error bound was met before timing.
        registers: A thread.
        shared_bytes: A block.
        theoretical_occupancy: In [0, 1], from registers and shared memory.
        forward_ms: Median with 20th and 80th percentiles.
        compulsory_gbps: Each input read and each result written once, over the median, in GB/s.
        copy_share: Of a device copy's rate, measured in the same process.
        achieved_occupancy: In [0, 1], by ncu; None without it, as all that follow.
        dram_gbps, l2_gbps: By ncu.
        dram_share: Of the peak, in [0, 1], by ncu.
    """

    name: str
    dtype: str
    batch_size: int
    block_q: int | None
    block_p: int | None
    num_warps: int | None
    status: str
    verified: bool | None = None
    registers: int | None = None
    shared_bytes: int | None = None
    theoretical_occupancy: float | None = None
    forward_ms: float | None = None
    forward_p20_ms: float | None = None
    forward_p80_ms: float | None = None
    compulsory_gbps: float | None = None
    copy_share: float | None = None
    achieved_occupancy: float | None = None
    dram_gbps: float | None = None
    l2_gbps: float | None = None
    dram_share: float | None = None

    @property
    def occupancy(self) -> float | None:
        """Achieved where it is known, else theoretical."""
        return self.theoretical_occupancy if self.achieved_occupancy is None else self.achieved_occupancy


def compiled_rows(
    tilings: Sequence[Tiling], dtype_name: str, batch_size: int, capability: tuple[int, int]
) -> list[TilingRow]:
    """What tilings compile to for a GPU that need not be there: registers, shared memory and occupancy alone.

    Raises:
        ValueError: A compute capability whose multiprocessor is not known.
    """
    if capability not in MULTIPROCESSORS:
        raise ValueError(f"compile_for must be one of {sorted(MULTIPROCESSORS)}; got {capability}")
    import triton

    rows = []
    for tiling in tilings:
        compiled = compile_tile(tiling, DTYPES[dtype_name], capability)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            registers = registers_of(Path(file.name), triton.knobs.nvidia.cuobjdump.path)
        resources = Resources(tiling.num_warps, registers, compiled.metadata.shared)
        row = _row_of(tiling, dtype_name, batch_size, f"compiled for sm_{capability[0]}{capability[1]}, not timed")
        rows.append(_with_resources(row, resources, MULTIPROCESSORS[capability]))
    return rows


def measure_tilings(
    tilings: Sequence[Tiling],
    shipped: Sequence[str],
    dtype_name: str,
    batch_size: int,
    *,
    rounds: int,
    num_iterations: int,
    seed: int,
) -> list[TilingRow]:
    """Check tilings and shipped kernels, then time them in turns."""
    device, dtype = torch.device("cuda"), DTYPES[dtype_name]
    problem, _ = make_inputs(OpCase("encoder", batch_size), dtype, device, seed=seed)
    copy_gbps = measure_copy_gbps()
    rows: list[TilingRow] = []
    calls: list[Callable[[], object] | None] = []
    for tiling in tilings:
        missed = _missed_bound(partial(_tile_once, tiling), dtype)
        row = _row_of(tiling, dtype_name, batch_size, f"error bound missed: {missed}" if missed else "ok")
        call = TileForward(problem, tiling)
        compiled = call.launch()
        resources = Resources(tiling.num_warps, compiled.n_regs, compiled.metadata.shared)
        rows.append(_with_resources(replace(row, verified=not missed), resources, multiprocessor_of(device)))
        calls.append(None if missed else call)
    for name in shipped:
        module = backend_module(name)
        missed = _missed_bound(module.forward, dtype)
        status = f"error bound missed: {missed}" if missed else "ok"
        rows.append(TilingRow(name, dtype_name, batch_size, None, None, None, status, verified=not missed))
        calls.append(None if missed else partial(module.forward, problem))
    samples: list[list[float]] = [[] for _ in rows]
    for _ in range(rounds):
        for call_or_none, pooled in zip(calls, samples, strict=True):
            if call_or_none is not None:
                pooled += time_cuda([call_or_none], num_warmup=2, num_iterations=num_iterations)
    num_bytes = compulsory_bytes(problem, backward=False)
    return [
        _with_times(row, pooled, num_bytes, copy_gbps) if pooled else row
        for row, pooled in zip(rows, samples, strict=True)
    ]


def launch_once(
    tilings: Sequence[Tiling], shipped: Sequence[str], dtype_name: str, batch_size: int, *, seed: int
) -> None:
    """One launch of each between the profiler's start and stop, in the order of `measure_tilings`'s rows."""
    problem, _ = make_inputs(OpCase("encoder", batch_size), DTYPES[dtype_name], torch.device("cuda"), seed=seed)
    calls: list[Callable[[], object]] = [TileForward(problem, tiling) for tiling in tilings]
    calls += [partial(backend_module(name).forward, problem) for name in shipped]
    for call in calls:
        # compiled outside of the profile
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for call in calls:
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def with_counters(rows: Sequence[TilingRow], counters: Counters) -> list[TilingRow]:
    """Rows with what ncu counted of each, in order; as they are if it counted nothing."""
    if not counters.launches:
        return list(rows)
    done = []
    for row, launch in zip(rows, counters.launches, strict=True):
        found = {name: launch.get(name) for name in METRICS}
        done.append(
            replace(
                row,
                achieved_occupancy=_scaled(found[OCCUPANCY], 1e-2),
                dram_gbps=_scaled(found[DRAM], 1e-9),
                l2_gbps=_scaled(found[L2], 1e-9),
                dram_share=_scaled(found[DRAM_SHARE], 1e-2),
            )
        )
    return done


def multiprocessor_of(device: torch.device) -> Multiprocessor:
    """Of a GPU that is there; all from compute capability 5.0 on have as many registers."""
    properties = torch.cuda.get_device_properties(device)
    known = MULTIPROCESSORS.get((properties.major, properties.minor))
    max_warps = properties.max_threads_per_multi_processor // 32
    # consumer GPUs hold fewer blocks than the 32 of a data centre's, as they hold fewer warps
    max_blocks = known.max_blocks if known else max_warps // 2
    shared = properties.shared_memory_per_multiprocessor
    return Multiprocessor(max_warps, max_blocks, MULTIPROCESSORS[9, 0].registers, shared)


def measure_copy_gbps() -> float:
    """What a copy within the device's memory moves, read and written, in GB/s."""
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = time_cuda([lambda: target.copy_(source)], num_warmup=2, num_iterations=5)
    return 2 * _COPY_BYTES / Timing.of(times).median_ms / 1e6


def _tile_once(tiling: Tiling, problem: Problem) -> Tensor:
    return TileForward(problem, tiling)()


def _row_of(tiling: Tiling, dtype_name: str, batch_size: int, status: str) -> TilingRow:
    sizes = (tiling.block_q, tiling.block_p, tiling.num_warps)
    return TilingRow(tiling.name, dtype_name, batch_size, *sizes, status)


def _with_resources(row: TilingRow, resources: Resources, multiprocessor: Multiprocessor) -> TilingRow:
    return replace(
        row,
        registers=resources.registers,
        shared_bytes=resources.shared_bytes,
        theoretical_occupancy=theoretical_occupancy(resources, multiprocessor),
    )


def _with_times(row: TilingRow, samples_ms: Sequence[float], num_bytes: int, copy_gbps: float) -> TilingRow:
    timing = Timing.of(samples_ms)
    gbps = num_bytes / timing.median_ms / 1e6
    return replace(
        row,
        forward_ms=timing.median_ms,
        forward_p20_ms=timing.p20_ms,
        forward_p80_ms=timing.p80_ms,
        compulsory_gbps=gbps,
        copy_share=gbps / copy_gbps,
    )


def _missed_bound(forward: Callable[[Problem], Tensor], dtype: torch.dtype) -> str:
    problem, grad_output = random_problem(_PARITY, dtype, device="cuda")
    comparisons = expectation(problem, grad_output).compare(forward(problem), Gradients(None, None, None, None))
    return "; ".join(str(comparison) for comparison in comparisons if not comparison.passed)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
