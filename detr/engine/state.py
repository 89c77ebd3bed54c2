"""The moving parts of a training run, and how they are put together."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from detr.distributed import DistributedContext, broadcast_tensors, require_same
from detr.engine.compile import CompiledRegions, ShapeMode, compile_regions
from detr.engine.cuda_graphs import GraphedDetector
from detr.engine.ema import EMA
from detr.engine.precision import Precision
from detr.engine.schedule import LRCurve, LRSchedule
from detr.losses import SetCriterion
from detr.models import DeformableDETR


@dataclass(frozen=True)
class TrainState:
    """What a step changes, and what it needs to do so.

    Attributes:
        model: The detector on `device`, in training mode, wrapped in DDP when there are several ranks, or in the
            captured passes.
        criterion: The loss, on `device`.
        optimizer: Over the model's trainable parameters.
        schedule: Of the optimizer's rates.
        precision: Of the forward and backward pass.
        scaler: From `precision.make_scaler`.
        device: Where batches go.
        ema: The averaged copy, or None.
        max_grad_norm: Global L2 norm the gradients are clipped to; None does not clip.
        compiled: The regions that run compiled, or None.
        graphs: The captured passes, inside `model`, or None.
        retry_oom: Train a step that does not fit into memory in halves.
        averages_gradients: The step averages the gradients of all ranks after the backward pass, since nothing does
            so within.
    """

    model: nn.Module
    criterion: SetCriterion
    optimizer: Optimizer
    schedule: LRSchedule
    precision: Precision
    scaler: GradScaler
    device: torch.device
    ema: EMA | None = None
    max_grad_norm: float | None = 0.1
    compiled: CompiledRegions | None = None
    graphs: GraphedDetector | None = None
    retry_oom: bool = False
    averages_gradients: bool = False

    @property
    def detector(self) -> nn.Module:
        """The model without its wrappers."""
        model = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        return model.detector if isinstance(model, GraphedDetector) else model

    @property
    def evaluated(self) -> nn.Module:
        """The model to evaluate: the averaged copy where there is one."""
        return self.detector if self.ema is None else self.ema.module


def build_train_state(
    model: nn.Module,
    criterion: SetCriterion,
    make_optimizer: Callable[..., Optimizer],
    curve: LRCurve,
    precision: Precision,
    context: DistributedContext,
    *,
    total_batch: int,
    steps_per_epoch: int,
    ema_decay: float | None = None,
    max_grad_norm: float | None = 0.1,
    compile: bool = False,
    compile_shapes: ShapeMode = "auto",
    cuda_graphs: bool = False,
    max_graphs: int = 64,
    recompute: bool = False,
    retry_oom: bool = False,
) -> TrainState:
    """Move the model to its device and build what trains it; sets the process's matmul modes.

    Args:
        model: The detector; under several ranks, rank 0's weights go to all.
        criterion: The loss.
        make_optimizer: Called with the model and `total_batch`, as `build_adamw`.
        curve: Of the learning rates.
        precision: Of the forward and backward pass.
        context: Ranks and device.
        total_batch: Images an optimizer step, over all ranks and accumulated batches.
        steps_per_epoch: Optimizer steps an epoch.
        ema_decay: Of the averaged copy; None keeps none.
        max_grad_norm: See `TrainState`.
        compile: Compile the regions of `compile_regions`; the averaged copy stays uncompiled.
        compile_shapes: See `compile_regions`.
        cuda_graphs: Run forward and backward as captured graphs, see `GraphedDetector`. Several ranks average their
            gradients after the backward pass, not beside it: sizes are captured by each rank when they come, so no
            collective may be part of a capture, and DDP's hooks on the parameters cannot be.
        max_graphs: Sizes to capture, see `GraphedDetector`.
        recompute: Keep less of the encoder for the backward pass, see `Encoder`.
        retry_oom: See `TrainState`; one process only, and no captured graphs.

    Raises:
        ValueError: The device or the model cannot do what is asked, or options do not go together.
    """
    if retry_oom and cuda_graphs:
        raise ValueError(
            "trainer.retry_oom=true splits batches, and trainer.cuda_graphs=true takes one batch an optimizer step; "
            "set one of them to false"
        )
    if retry_oom and context.world_size > 1:
        raise ValueError(
            f"trainer.retry_oom=true needs one process, got {context.world_size} ranks: one that starts a step again "
            "would leave the others waiting. Lower data.batch_size and raise trainer.accumulate"
        )
    device = context.device
    precision.prepare(device)
    model = model.to(device).train()
    if recompute:
        recompute_encoder(model)
    optimizer = make_optimizer(model, total_batch=total_batch)
    graphs = GraphedDetector(model, max_graphs=max_graphs) if cuda_graphs else None
    wrapped = graphs or model
    if graphs is not None:
        share_weights(model)
    elif context.world_size > 1:
        # the batch is moved by the step, so DDP gets no device ids; gradients live in the buckets that travel.
        # Not static_graph: with no_sync it leaves the gradients of the first window unreduced (PyTorch 2.14), and
        # since every parameter takes part in every step it saves nothing
        wrapped = DistributedDataParallel(wrapped, gradient_as_bucket_view=True)
        # batch statistics are not read in training; evaluation takes those of rank 0. Set here since the argument
        # also leaves out the first synchronisation, and warns in newer versions of PyTorch
        wrapped.broadcast_buffers = False
    ema = None if ema_decay is None else EMA(model, ema_decay)
    compiled = compile_regions(model, criterion, shapes=compile_shapes) if compile else None
    return TrainState(
        model=wrapped,
        criterion=criterion.to(device).train(),
        optimizer=optimizer,
        schedule=LRSchedule(optimizer, curve, steps_per_epoch),
        precision=precision,
        scaler=precision.make_scaler(device),
        device=device,
        ema=ema,
        max_grad_norm=max_grad_norm,
        compiled=compiled,
        graphs=graphs,
        retry_oom=retry_oom,
        averages_gradients=graphs is not None and context.world_size > 1,
    )


def share_weights(model: nn.Module) -> None:
    """Give every rank the weights of rank 0, as DDP does when it is built. A collective.

    Raises:
        ValueError: Ranks have parameters of other shapes, memory formats or dtypes: their gradients, which are averaged
            in the order of their memory, would get into each other's places.
    """
    parameters = dict(model.named_parameters())
    layouts = {name: f"{list(p.shape)}, strides {p.stride()}, {p.dtype}" for name, p in parameters.items()}
    require_same(layouts, advice="start all ranks with the same command, code and versions")
    # one tensor carries all gradients
    assert len({p.dtype for p in parameters.values() if p.requires_grad}) <= 1
    broadcast_tensors([*parameters.values(), *model.buffers()])


def recompute_encoder(model: nn.Module) -> None:
    """Make the encoder of `model` keep only the inputs of its layers in training.

    Raises:
        ValueError: The model is not a `DeformableDETR`.
    """
    if not isinstance(model, DeformableDETR):
        raise ValueError(
            f"trainer.recompute=true knows the encoder of DeformableDETR; got {type(model).__name__}. Set "
            "trainer.recompute=false"
        )
    model.encoder.recompute = True


def has_batch_statistics(model: nn.Module) -> bool:
    """Whether a layer of `model` keeps running statistics of the batches."""
    return any(isinstance(m, _BatchNorm) and m.track_running_stats for m in model.modules())
