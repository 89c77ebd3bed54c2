"""The presets of docs/findings.md, run by tools/benchmark_ops.py."""

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from detr.benchmark.findings import (
    accumulators,
    accumulators_report,
    dispatch_order,
    dispatch_order_report,
    flops,
    memory,
    npu_claims,
    npu_claims_report,
)
from detr.benchmark.findings.ncu import Counters, read_counters
from detr.benchmark.ops.inputs import OpCase
from detr.benchmark.ops.measure import OpVariant, check_or_say_why, measure_workload
from detr.benchmark.ops.row import OpRow, write_rows
from detr.benchmark.origin import Origin
from detr.models import Backbone, deformable_detr
from ops import KernelConfig

FINDINGS = ("flops", "memory", "dispatch_order", "accumulators", "tiling", "npu_claims")


def run_finding(cfg: DictConfig, origin: Origin, picture: Path) -> tuple[Sequence[Any], str]:
    """Measure what `benchmark.case` names: its rows and its report; the plot is written to `picture`."""
    case = cfg.benchmark.case
    if case == "flops":
        counted = count_flops(cfg)
        flops.plot(counted, picture, title=origin.title)
        return counted, flops.markdown(counted, origin)
    if case == "memory":
        rows = measure_memory(cfg)
        memory.plot(rows, picture, title=origin.title)
        return rows, memory.markdown(rows, origin)
    if case == "dispatch_order":
        order_rows = measure_orders(cfg)
        dispatch_order_report.plot(order_rows, picture, title=origin.title)
        return order_rows, dispatch_order_report.markdown(order_rows, origin)
    if case == "accumulators":
        sum_rows = measure_accumulators(cfg)
        accumulators_report.plot(sum_rows, picture, title=origin.title)
        return sum_rows, accumulators_report.markdown(sum_rows, origin)
    if case == "npu_claims":
        against, techniques = measure_npu_claims(cfg)
        npu_claims_report.plot(techniques, picture, title=origin.title)
        write_rows(techniques, picture.with_suffix(".techniques.csv"), picture.with_suffix(".techniques.jsonl"))
        return against, npu_claims_report.markdown(against, techniques, origin)
    if case == "tiling":
        return report_tilings(cfg, origin, picture)
    raise ValueError(f"benchmark.case must be one of {', '.join(FINDINGS)}; got {case}")


def count_flops(cfg: DictConfig) -> list[flops.FlopRow]:
    """The parts of the detector that the preset describes."""
    with torch.device("meta"):
        model = deformable_detr(
            Backbone(cfg.benchmark.backbone),
            num_classes=cfg.benchmark.num_classes,
            with_box_refine=cfg.benchmark.with_box_refine,
            two_stage=cfg.benchmark.two_stage,
            kernel=KernelConfig("reference"),
        )
    return flops.detector_flops(model, height=cfg.benchmark.height, width=cfg.benchmark.width)


def measure_memory(cfg: DictConfig) -> list[OpRow]:
    """Errors and peaks of every combination of the preset."""
    rows = []
    settings = itertools.product(cfg.benchmark.batch_sizes, cfg.benchmark.dtypes, cfg.benchmark.noise_px)
    for batch_size, dtype, noise_px in settings:
        for options in cfg.benchmark.rows:
            variant = OpVariant(**options)
            case = OpCase("encoder", batch_size, noise_px=float(noise_px))
            rows.append(check_or_say_why(case, dtype, variant, seed=cfg.seed))
            torch.cuda.empty_cache()
            print(f"memory N={batch_size} {dtype} {rows[-1].name}: {rows[-1].status}", file=sys.stderr, flush=True)
    return rows


def measure_orders(cfg: DictConfig) -> list[dispatch_order.OrderRow]:
    """Every order in every case of the preset, compared with linear."""
    rows: list[dispatch_order.OrderRow] = []
    settings = itertools.product(
        cfg.benchmark.rows, cfg.benchmark.dtypes, cfg.benchmark.num_levels, cfg.benchmark.num_points
    )
    for kernel, dtype, num_levels, num_points in settings:
        case = dispatch_order.OrderCase(
            kernel.kernel, kernel.direction, dtype, cfg.benchmark.batch_size, num_levels, num_points
        )
        rows += dispatch_order.measure_case(
            case, num_repeats=cfg.benchmark.num_repeats, num_calls=cfg.benchmark.num_calls, seed=cfg.seed
        )
        torch.cuda.empty_cache()
        print(f"{case}: {rows[-1].status}", file=sys.stderr, flush=True)
    return dispatch_order.corrected(rows)


def measure_accumulators(cfg: DictConfig) -> list[accumulators.AccumulatorRow]:
    """Every way to add on every workload, then under growing contention."""
    variants = [accumulators.Sums(**options) for options in cfg.benchmark.rows]
    places = [
        (workload.kind, workload.batch_size, dtype, None)
        for workload, dtype in itertools.product(cfg.benchmark.workloads, cfg.benchmark.dtypes)
    ]
    cells = itertools.product(cfg.benchmark.contention_dtypes, cfg.benchmark.contention_cells)
    places += [("contention", 1, dtype, num_cells) for dtype, num_cells in cells]
    rows = []
    for place in places:
        rows += accumulators.measure_place(
            *place,
            variants,
            rounds=cfg.benchmark.rounds,
            num_iterations=cfg.benchmark.num_iterations,
            seed=cfg.seed,
        )
        torch.cuda.empty_cache()
        print(f"accumulators {place}: {rows[-1].status}", file=sys.stderr, flush=True)
    return rows


def launch_tilings_once(cfg: DictConfig) -> None:
    """What ncu counts: every tiling of the preset once, in the order of its rows."""
    from detr.benchmark.findings import tiling
    from detr.benchmark.findings.tile_kernel import Tiling

    tilings = [Tiling(*sizes) for sizes in cfg.benchmark.tilings]
    for dtype in cfg.benchmark.dtypes:
        tiling.launch_once(tilings, cfg.benchmark.shipped, dtype, cfg.benchmark.batch_size, seed=cfg.seed)


def report_tilings(cfg: DictConfig, origin: Origin, picture: Path) -> tuple[Sequence[Any], str]:
    """Times of every tiling and dtype; counters by ncu, which runs this command again."""
    # Triton is for Linux
    from detr.benchmark.findings import tiling, tiling_report
    from detr.benchmark.findings.tile_kernel import Tiling

    options = cfg.benchmark
    tilings = [Tiling(*sizes) for sizes in options.tilings]
    rows: list[tiling.TilingRow] = []
    if options.compile_for is not None:
        capability = (int(options.compile_for[0]), int(options.compile_for[1]))
        for dtype in options.dtypes:
            rows += tiling.compiled_rows(tilings, dtype, options.batch_size, capability)
        counters = Counters((), "nothing ran")
    else:
        for dtype in options.dtypes:
            counts = {"rounds": options.rounds, "num_iterations": options.num_iterations}
            rows += tiling.measure_tilings(tilings, options.shipped, dtype, options.batch_size, **counts, seed=cfg.seed)
            print(f"tiling {dtype}: {rows[-1].status}", file=sys.stderr, flush=True)
        torch.cuda.empty_cache()
        again = [sys.executable, *sys.argv, "benchmark.profile_only=true"]
        counters = read_counters(
            again, tiling.METRICS, num_launches=len(rows), log=picture.with_name("ops_tiling_ncu.csv")
        )
        rows = tiling.with_counters(rows, counters)
    tiling_report.plot(rows, picture, title=origin.title)
    source = "by Nsight Compute" if counters.launches else f"not available, {counters.reason}"
    return rows, tiling_report.markdown(rows, origin, counters=source)


def measure_npu_claims(cfg: DictConfig) -> tuple[list[OpRow], list[npu_claims.TechniqueRow]]:
    """Our kernels and grid_sample on every workload, then the techniques one by one."""
    options = cfg.benchmark
    counts = {"rounds": options.rounds, "num_iterations": options.num_iterations, "seed": cfg.seed}
    variants = [OpVariant(**row) for row in options.rows]
    rows: list[OpRow] = []
    for batch_size, dtype in itertools.product(options.batch_sizes, options.dtypes):
        case = OpCase("encoder", batch_size)
        rows += measure_workload(case, dtype, variants, num_warmup=options.num_warmup, **counts)
        print(f"npu_claims N={batch_size} {dtype}: {rows[-1].status}", file=sys.stderr, flush=True)
    done: list[npu_claims.TechniqueRow] = []
    directions: tuple[npu_claims.Direction, ...] = ("forward", "backward")
    for direction, dtype in itertools.product(directions, options.dtypes):
        techniques = [npu_claims.technique_of(dict(switches)) for switches in options[direction]]
        done += npu_claims.measure_techniques(direction, techniques, dtype, options.technique_batch_size, **counts)
        torch.cuda.empty_cache()
        print(f"npu_claims {direction} {dtype}: {done[-1].status}", file=sys.stderr, flush=True)
    return rows, done
