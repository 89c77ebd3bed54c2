"""Time whole training steps, one row a configuration: `python tools/benchmark.py benchmark=NAME [key=value ...]`.

Every row runs in a fresh process, several times, in an order that cancels drift. Writes rows.jsonl, report.md,
rows.csv and report.png to `output_dir`; a row that fails keeps its reason. The keys are those of
configs/benchmark.yaml.
"""

import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig

from detr.benchmark.gate import kernel_is_verified
from detr.benchmark.matrix import run_matrix
from detr.benchmark.step_report import markdown_report, plot_report
from detr.benchmark.step_row import StepRow, write_csv
from detr.benchmark.throughput import measure_steps, msda_share, synthetic_batches
from detr.engine.run_folder import open_result_folder, write_config
from detr.engine.state import build_train_state
from detr.telemetry.environment import collect_environment
from tools.launcher import hydra_tool, resolved, start_process


@hydra_tool("benchmark")
def main(cfg: DictConfig) -> None:
    if cfg.row is not None:
        Path(cfg.result).write_text(measure_row(cfg).to_json(), encoding="utf-8")
        return
    if "shared" not in cfg.benchmark:
        raise ValueError("presets named ops_* are for tools/benchmark_ops.py; here use smoke, kernels, precision, ...")
    config = resolved(cfg)
    folder = open_result_folder(cfg.output_dir, config)
    write_config(folder, config)
    overrides = [
        argument for argument in sys.argv[1:] if not argument.startswith(("benchmark=", "output_dir=", "name="))
    ]
    rows = run_matrix(
        [sys.executable, __file__],
        cfg.benchmark.rows,
        shared=[*cfg.benchmark.shared, *overrides],
        repeats=cfg.benchmark.repeats,
        rows_file=folder / "rows.jsonl",
    )
    command = shlex.join(["python", "tools/benchmark.py", *sys.argv[1:]])
    report = markdown_report(rows, title=f"Training step: {cfg.name}", command=command, baseline=cfg.benchmark.baseline)
    (folder / "report.md").write_text(report, encoding="utf-8")
    write_csv(rows, folder / "rows.csv")
    plot_report(rows, folder / "report.png", title=cfg.name)
    print(report)


def measure_row(cfg: DictConfig) -> StepRow:
    """Measure one row in this process."""
    context = start_process(cfg)
    kernel, precision = instantiate(cfg.kernel), instantiate(cfg.precision)
    verified = kernel_is_verified(kernel, precision.name, context.device)
    model = instantiate(cfg.model, num_classes=cfg.num_classes)
    state = build_train_state(
        model,
        instantiate(cfg.criterion, num_classes=cfg.num_classes),
        instantiate(cfg.optimizer),
        instantiate(cfg.schedule),
        precision,
        context,
        total_batch=cfg.batch_size * context.world_size,
        steps_per_epoch=1000,
        compile=cfg.compile,
    )
    batches = synthetic_batches(
        batch_size=cfg.batch_size,
        height=cfg.height,
        width=cfg.width,
        targets_per_image=cfg.targets_per_image,
        num_classes=cfg.num_classes,
    )
    times = measure_steps(state, batches, num_warmup=cfg.num_warmup, num_steps=cfg.num_steps)
    return StepRow(
        name=cfg.row,
        repeat=cfg.repeat,
        status="ok",
        verified=verified,
        kernel=kernel.backend,
        accumulator=kernel.accumulator,
        deterministic=kernel.deterministic,
        precision=precision.name,
        compile=cfg.compile,
        batch_size=cfg.batch_size,
        height=cfg.height,
        width=cfg.width,
        images_per_s=cfg.batch_size * context.world_size / times.step_ms * 1e3,
        step_ms=times.step_ms,
        step_ms_p20=times.step_ms_p20,
        step_ms_p80=times.step_ms_p80,
        phases_ms=times.phases_ms,
        msda_share=msda_share(state, batches),
        peak_gib=times.peak_gib,
        loss=times.loss,
        date=datetime.now(UTC).isoformat(timespec="minutes"),
        overrides=tuple(
            argument for argument in sys.argv[1:] if not argument.startswith(("row=", "result=", "repeat="))
        ),
        environment=collect_environment(),
    )


if __name__ == "__main__":
    main()
