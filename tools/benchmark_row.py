"""One row of tools/benchmark.py, measured in this process or in all ranks of it."""

import sys
import time
from datetime import UTC, datetime

from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig

from detr.benchmark.gate import kernel_is_verified
from detr.benchmark.steps.data import StepBatches, cached_batches, check_source, loader_batches, synthetic_batches
from detr.benchmark.steps.measure import batches_needed, measure_losses, measure_speed
from detr.benchmark.steps.row import StepRow
from detr.distributed import DistributedContext
from detr.engine.state import build_train_state
from detr.telemetry.environment import collect_environment
from tools.launcher import start_process


def measure_row(cfg: DictConfig) -> StepRow:
    """Build what the row's keys say, as tools/train.py does, and measure it."""
    started_s = time.perf_counter()
    context = start_process(cfg)
    source = check_source(cfg.data_source)
    kernel, precision = instantiate(cfg.kernel), instantiate(cfg.precision)
    verified = kernel_is_verified(kernel, precision.name, context.device)
    state = build_train_state(
        instantiate(cfg.model, num_classes=cfg.num_classes),
        instantiate(cfg.criterion, num_classes=cfg.num_classes),
        instantiate(cfg.optimizer),
        instantiate(cfg.schedule),
        precision,
        context,
        total_batch=cfg.batch_size * context.world_size,
        steps_per_epoch=1000,
        compile=cfg.compile,
        cuda_graphs=cfg.cuda_graphs,
        recompute=cfg.recompute,
    )
    supply = _supply(cfg, context)
    fixed_size = source == "synthetic"
    row = StepRow(
        name=cfg.row,
        repeat=cfg.repeat,
        status="ok",
        verified=verified,
        model=HydraConfig.get().runtime.choices["model"],
        kernel=kernel.backend,
        accumulator=kernel.accumulator,
        deterministic=kernel.deterministic,
        precision=precision.name,
        compile=cfg.compile,
        cuda_graphs=cfg.cuda_graphs,
        num_gpus=context.world_size,
        batch_size=cfg.batch_size,
        data_source=source,
        num_workers=cfg.data.num_workers if source == "loader" else None,
        height=cfg.height if fixed_size else None,
        width=cfg.width if fixed_size else None,
        spent_s={"build": time.perf_counter() - started_s},
        date=datetime.now(UTC).isoformat(timespec="minutes"),
        overrides=tuple(
            argument for argument in sys.argv[1:] if not argument.startswith(("row=", "result=", "repeat="))
        ),
        environment=collect_environment(),
    )
    if cfg.measure == "losses":
        return measure_losses(row, state, supply, num_steps=cfg.num_steps, seed=cfg.seed + cfg.noise_seed)
    return measure_speed(row, state, supply, num_warmup=cfg.num_warmup, num_steps=cfg.num_steps)


def _supply(cfg: DictConfig, context: DistributedContext) -> StepBatches:
    if cfg.data_source == "synthetic":
        return StepBatches.cycle(
            synthetic_batches(
                batch_size=cfg.batch_size,
                height=cfg.height,
                width=cfg.width,
                targets_per_image=cfg.targets_per_image,
                num_classes=cfg.num_classes,
            )
        )
    if cfg.data.batch_size != cfg.batch_size:
        raise ValueError(
            f"a row has one batch size: batch_size={cfg.batch_size}, but data.batch_size={cfg.data.batch_size}. Set "
            "batch_size only"
        )
    data = instantiate(cfg.data)
    shard = {"seed": cfg.seed, "rank": context.rank, "world_size": context.world_size}
    if cfg.data_source == "cached":
        return cached_batches(data, **shard)
    needed = batches_needed(num_warmup=cfg.num_warmup, num_steps=cfg.num_steps)
    return loader_batches(data, num_batches=needed, pin_memory=context.device.type == "cuda", **shard)
