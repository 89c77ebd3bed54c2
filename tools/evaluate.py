"""Score a checkpoint on its validation images, or any file of detections, with the COCO numbers.

Keys:
  checkpoint=FILE        needed, or detections=: best.pt of a run, or a file of tools/import_weights.py
  detections=FILE        needed, or checkpoint=: a COCO result file; with data.val.annotations=FILE
  data.root=null         where the data is now; a checkpoint knows where it was in training
  precision=fp32         of the forward pass
  report=false           true: also report.html, which shows where the AP comes from and the worst images

Examples:
  python tools/evaluate.py checkpoint=outputs/NAME/best.pt report=true
  python tools/evaluate.py detections=found.json data.val.annotations=instances_val.json

Output:
  The numbers on the screen; in outputs/evaluate_NAME_best (name=, output_dir=), or evaluate_NAME_best_DATA with data.*
  keys given, metrics.json with the AP of each class too and, for a checkpoint, detections.json and ground_truth.json,
  of which tools/analyze.py makes a report as well. Results of other settings are not overwritten.
"""

from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from detr.data import DetectionData
from detr.distributed import is_main
from detr.engine.checkpoint import Checkpoint, load_checkpoint
from detr.engine.evaluate import evaluate
from detr.engine.run_folder import DETECTIONS, GROUND_TRUTH, METRICS, open_result_folder, write_config, write_json
from detr.evaluation import (
    CocoEvaluator,
    CocoMetrics,
    PostProcess,
    analyze_files,
    evaluate_files,
    format_ap,
    write_results,
)
from detr.inference.analysis_report import write_analysis
from detr.telemetry.loggers import ConsoleLogger
from tools.launcher import hydra_tool, print_start, resolved, start_process, warn_if_few_cores
from tools.run_names import name_after_evaluated
from tools.saved_model import build_detector, data_config


@hydra_tool("evaluate")
def main(cfg: DictConfig) -> None:
    name_after_evaluated(cfg)
    config = resolved(cfg)
    if (cfg.checkpoint is None) == (cfg.detections is None):
        raise ValueError(
            "tools/evaluate.py takes checkpoint=FILE, or detections=FILE with data.val.annotations=FILE; got "
            f"checkpoint={cfg.checkpoint} and detections={cfg.detections}"
        )
    if cfg.checkpoint is None:
        folder = open_result_folder(cfg.output_dir, config)
        metrics = evaluate_detections(cfg)
    else:
        checkpoint = load_checkpoint(cfg.checkpoint)
        data = data_config(cfg, checkpoint)
        config["data"] = OmegaConf.to_container(data, resolve=True)
        folder = open_result_folder(cfg.output_dir, config)
        metrics = evaluate_checkpoint(cfg, checkpoint, data, folder)
    if is_main():
        write_config(folder, config)
        write_json(folder / METRICS, metrics.to_dict())
        print(metrics.format_table())
        print(f"{folder / METRICS}: AP {format_ap(metrics.AP)}, AP50 {format_ap(metrics.AP50)}")


def evaluate_checkpoint(cfg: DictConfig, checkpoint: Checkpoint, data_cfg: DictConfig, folder: Path) -> CocoMetrics:
    """Detect on the validation split with the weights of a checkpoint."""
    context = start_process(cfg)
    precision = instantiate(cfg.precision)
    precision.prepare(context.device)
    if is_main():
        print_start(cfg, context, checkpoint=cfg.checkpoint, epoch=checkpoint.epoch, output=folder)
    data: DetectionData = instantiate(data_cfg)
    warn_if_few_cores(data.num_workers)
    batches = data.val_loader(
        rank=context.rank, world_size=context.world_size, pin_memory=context.device.type == "cuda"
    )
    ground_truth = data.val_ground_truth()
    evaluator = CocoEvaluator(
        ground_truth,
        checkpoint.class_table,
        max_detections=cfg.evaluator.max_detections,
        backend=cfg.evaluator.backend,
    )
    model = build_detector(checkpoint, kernel=cfg.kernel, source=cfg.checkpoint, device=context.device)
    metrics = evaluate(
        model,
        ConsoleLogger().track(batches, "evaluate", num_items=len(batches)) if is_main() else batches,
        evaluator,
        PostProcess(cfg.evaluator.top_k),
        precision=precision,
        device=context.device,
    )
    results = evaluator.gather_results()
    if is_main():
        folder.mkdir(parents=True, exist_ok=True)
        write_results(folder / DETECTIONS, results)
        write_json(folder / GROUND_TRUTH, ground_truth)
        if cfg.report:
            analysis = analyze_files(
                folder / GROUND_TRUTH,
                folder / DETECTIONS,
                max_detections=tuple(cfg.evaluator.max_detections),
                backend=cfg.evaluator.backend,
            )
            title = f"Detections of {cfg.checkpoint}"
            print(write_analysis(analysis, folder, title=title, read=data.val_dataset().original))
    return metrics


def evaluate_detections(cfg: DictConfig) -> CocoMetrics:
    """Score a COCO result file."""
    if cfg.report:
        raise ValueError(
            "report=true is for a checkpoint; for a file of detections run `python tools/analyze.py "
            f"detections={cfg.detections} annotations={cfg.data.val.annotations}`"
        )
    if cfg.data.val.annotations is None:
        raise ValueError("detections=FILE needs data.val.annotations=FILE, the ground truth to score against")
    return evaluate_files(
        Path(cfg.data.val.annotations),
        Path(cfg.detections),
        max_detections=cfg.evaluator.max_detections,
        backend=cfg.evaluator.backend,
    )


if __name__ == "__main__":
    main()
