"""Train a detector, or go on with a run that stopped.

Keys:
  experiment=null        a recipe of configs/experiment, such as quickstart, r50_50ep or fast_r50_refine_50ep
  data=synthetic         custom for your own images (COCO, Roboflow, YOLO, Pascal VOC), with data.root=FOLDER
  schedule.epochs=12     how long; the learning rate falls over it
  data.batch_size=8      images a GPU and step; the learning rate follows it
  precision=fp32         bf16 is much faster on a recent GPU (configs/precision)
  name=tiny_synthetic    folder outputs/NAME (own data: the name of data.root); the same command goes on there

Examples:
  python tools/train.py experiment=quickstart
  python tools/train.py data=custom data.root=photos name=mine
  torchrun --nproc_per_node=8 tools/train.py experiment=r50_50ep data.root=/data/coco

Output:
  outputs/NAME (output_dir=): last.pt, best.pt and step checkpoints, metrics.jsonl, metrics.json, loss.png, ap.png,
  config.yaml, environment.json and MODEL_CARD.md.
"""

from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig

import detr
import ops
from detr.data.detection_data import DetectionData
from detr.distributed import DistributedContext, is_main
from detr.engine.checkpoint import load_checkpoint
from detr.engine.interval import steps_left, steps_per_epoch
from detr.engine.media import EvaluationMedia
from detr.engine.model_card import MODEL_CARD, write_model_card
from detr.engine.optim import describe_groups
from detr.engine.random_state import seed_everything
from detr.engine.restore import Progress, resume
from detr.engine.run_checkpoint import RunDescription
from detr.engine.run_folder import METRICS_LOG, open_run_folder, start_run_folder
from detr.engine.run_lock import RunLock
from detr.engine.same_run import require_same_run
from detr.engine.state import build_train_state
from detr.engine.trainer import Trainer
from detr.engine.weights import init_from
from detr.evaluation import CocoEvaluator, PostProcess, format_ap
from detr.telemetry.environment import code_facts
from detr.telemetry.loggers import CompositeLogger, ConsoleLogger, Evaluations, JsonlLogger, past_evaluation_s
from tools.launcher import hydra_tool, on_rank_zero, print_start, resolved, start_process, warn_if_few_cores
from tools.own_data import fit_to_data
from tools.run_names import name_after_data


@hydra_tool("train")
def main(cfg: DictConfig) -> None:
    name_after_data(cfg)
    context = start_process(cfg)
    data = instantiate(cfg.data)
    if cfg.data._target_ == "detr.data.custom_data":
        fit_to_data(cfg, data)
    with RunLock(Path(cfg.output_dir)) as lock:
        on_rank_zero(lock.acquire)
        train(cfg, context, data, lock)


def train(cfg: DictConfig, context: DistributedContext, data: DetectionData, lock: RunLock) -> None:
    """Build the run of `cfg` and train it to its end, in the folder that `lock` holds."""
    config = resolved(cfg)
    folder = on_rank_zero(lambda: open_run_folder(cfg.output_dir, config, resume=cfg.resume))

    on_gpu = context.device.type == "cuda"
    shard = {"rank": context.rank, "world_size": context.world_size, "pin_memory": on_gpu}
    train_loader = data.train_loader(seed=cfg.seed, **shard)
    val_loader = data.val_loader(**shard)
    evaluator = CocoEvaluator(
        data.val_ground_truth(),
        data.class_table,
        max_detections=cfg.evaluator.max_detections,
        backend=cfg.evaluator.backend,
    )

    fingerprints = data.fingerprints()
    require_same_run(config, fingerprints, code_facts(detr, ops))
    settings = instantiate(cfg.trainer)
    num_classes = data.class_table.num_classes
    model = instantiate(cfg.model, num_classes=num_classes)
    if cfg.init_from is not None and folder.resume_from is None:
        init_from(model, cfg.init_from, data.class_table, reset_head=cfg.reset_head)
    state = build_train_state(
        model,
        instantiate(cfg.criterion, num_classes=num_classes),
        instantiate(cfg.optimizer),
        instantiate(cfg.schedule),
        instantiate(cfg.precision),
        context,
        total_batch=cfg.data.batch_size * context.world_size * settings.accumulate,
        steps_per_epoch=steps_per_epoch(train_loader, settings.accumulate),
        ema_decay=settings.ema_decay,
        max_grad_norm=settings.clip,
        compile=settings.compile,
        compile_shapes=settings.compile_shapes,
        cuda_graphs=settings.cuda_graphs,
        max_graphs=settings.max_graphs,
        recompute=settings.recompute,
        retry_oom=settings.retry_oom,
    )
    seed_everything(cfg.seed, context.rank)
    progress = Progress()
    if folder.resume_from is not None:
        if cfg.init_from is not None and is_main():
            print(f"init_from={cfg.init_from} is not used: the run goes on from {folder.resume_from}")
        progress = resume(
            state, folder.resume_from, class_table=data.class_table, context=context, config=config, data=fingerprints
        )

    on_rank_zero(lambda: start_run_folder(folder, config))
    if is_main():
        compiled = state.compiled or "nothing"
        print_start(cfg, context, compiled=compiled, output=folder.path, parameters=describe_groups(state.optimizer))
        warn_if_few_cores(data.num_workers)
        if state.compiled is not None:
            # on an H200 53 to 110 seconds, and about 15 from the cache
            print("compiling: the first step takes a minute or two, less from PyTorch's cache on disk", flush=True)
    schedule = state.schedule
    num_steps = progress.global_step + steps_left(
        train_loader,
        settings.accumulate,
        epochs=schedule.curve.epochs,
        epoch=progress.epoch,
        epoch_samples=progress.epoch_samples,
    )
    console = ConsoleLogger(
        num_steps,
        first_step=progress.global_step,
        first_minutes=progress.train_s / 60,
        max_minutes=settings.max_minutes,
        evaluations=Evaluations(
            settings.eval_every * schedule.steps_per_epoch,
            # what was trained with other batches counts by the epoch
            origin=num_steps - schedule.total_steps,
            every_minutes=settings.eval_every_minutes,
            seconds=None if folder.resume_from is None else past_evaluation_s(folder.resume_from.parent / METRICS_LOG),
        ),
    )
    loggers = [JsonlLogger(folder.metrics_log), console, *map(instantiate, cfg.logger.values())]
    logger = CompositeLogger(loggers, enabled=is_main())
    media = None
    if logger.takes_media:
        media = EvaluationMedia(logger, data.val_dataset(), num_images=settings.num_pictures)
    trainer = Trainer(
        state,
        train_loader,
        val_loader,
        evaluator,
        PostProcess(cfg.evaluator.top_k),
        settings=settings,
        folder=folder,
        description=RunDescription(data.class_table, data.preprocessing, config, fingerprints),
        context=context,
        progress=progress,
        logger=logger,
        console=console if is_main() else None,
        media=media,
        lock=lock,
    )
    metrics = trainer.fit()
    if is_main():
        print(
            f"{folder.path}: epoch {progress.epoch}, AP {format_ap(metrics['AP'])}, AP50 {format_ap(metrics['AP50'])}"
        )
        if folder.best.is_file():
            write_model_card(load_checkpoint(folder.best), folder.path / MODEL_CARD)


if __name__ == "__main__":
    main()
