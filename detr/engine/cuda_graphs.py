"""The detector's forward and backward pass as CUDA graphs: one launch each instead of thousands.

With small batches the host cannot launch the step's kernels as fast as a GPU runs them. Only the matcher, the loss and
the optimizer stay outside.
"""

import gc
import logging
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from detr.engine.as_if_not_run import as_if_not_run
from detr.rank_logging import OF_THIS_RANK
from detr.structures import DetectorOutput, ImageBatch, LayerOutput

logger = logging.getLogger(__name__)

# of the device's memory, which captured passes leave to evaluation, to sums over ranks and to sizes still to come
LEAST_FREE = 0.1

_Size = tuple[int, ...]  # of the pixels: (N, 3, H, W)


class GraphedDetector(nn.Module):
    """Runs a detector through one pair of CUDA graphs for each padded size and number of images.

    A size is captured when it first comes. All graphs share one pool of memory, since no two of them run at a time.
    Tensors of a larger size find little room among those of the smaller ones that the pool began with. Where memory
    gets short by that, a new pool begins with the largest size, and the others are captured anew as they come.
    Gradients come in buffers of the graphs, which the next pass overwrites: one batch an optimizer step.

    Args:
        detector: On a CUDA device, in training mode. Its parameters must stay where they are.
        max_graphs: Sizes to capture; further ones run uncaptured, which is said once for each. Falls, with a
            warning, when less than a tenth of the device's memory is free after a capture that began a new pool or
            needs none, and in `give_up_half`.

    Raises:
        ValueError: The detector is not on a CUDA device.
    """

    def __init__(self, detector: nn.Module, *, max_graphs: int = 64) -> None:
        super().__init__()
        device = next(detector.parameters()).device
        if device.type != "cuda":
            raise ValueError(f"trainer.cuda_graphs=true needs a CUDA device; got {device}. Set it to false")
        self.detector = detector
        self.max_graphs = max_graphs
        # called before a size is captured: no other thread may use the device meanwhile
        self.before_capture: Callable[[], None] | None = None
        self._pool = torch.cuda.graph_pool_handle()
        self._streams = _StreamRing()
        # in a dict, so no submodules: their parameters are the detector's
        self._passes: dict[_Size, _TensorPass] = {}
        # what the graphs read from
        self._inputs: dict[_Size, tuple[Tensor, Tensor]] = {}
        self._uncaptured: set[_Size] = set()

    @property
    def num_graphs(self) -> int:
        """Sizes captured so far."""
        return len(self._passes)

    def forward(self, images: ImageBatch) -> DetectorOutput:
        """As the detector's; outputs are overwritten by the next call."""
        if not (self.training and torch.is_grad_enabled()):
            return self._plain(images)
        size = tuple(images.pixels.shape)
        if size not in self._passes:
            if len(self._passes) >= self.max_graphs:
                self._warn_uncaptured(size)
                return self._plain(images)
            self._add(size, images)
        return _from_tensors(self._passes[size](images.pixels, images.sizes))

    def give_up_half(self) -> None:
        """Free the memory of all captured passes, and capture half as many sizes from now on, as they come again.

        Gradients that a captured pass made must be gone: they lie in that memory.
        """
        self.max_graphs = len(self._passes) // 2
        self._release()

    def _release(self) -> None:
        """Free what captured passes hold; the next ones start a new pool."""
        self._passes.clear()
        self._inputs.clear()
        # a captured module and what replays it hold each other
        gc.collect()
        self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()

    def _add(self, size: _Size, images: ImageBatch) -> None:
        """Capture a size; where memory is short for it, in a new pool if that makes room."""
        device = images.pixels.device
        largest = max([*self._passes, size], key=math.prod)
        began_with = next(iter(self._passes), size)
        has_gaps = math.prod(began_with) < math.prod(largest)
        # copies, since the graph reads from where they are now
        self._inputs[size] = (images.pixels.clone(), images.sizes.clone())
        try:
            self._passes[size] = self._capture(*self._inputs[size])
            is_short = self._is_short(device)
        except torch.OutOfMemoryError:
            if not has_gaps:
                raise
            is_short = True
        # behind the except clause, since until then the failed attempt holds memory
        if is_short and has_gaps:
            self._begin_anew(largest, size)
            is_short = self._is_short(device)
        if is_short and len(self._passes) < self.max_graphs:
            self.max_graphs = len(self._passes)
            logger.warning(
                "cuda_graphs: less than %.0f%% of the GPU's memory is free after capturing %d sizes; further ones run "
                "uncaptured. A smaller trainer.max_graphs leaves more, a larger data.pad_to gives fewer sizes",
                *(100 * LEAST_FREE, len(self._passes)),
                extra=OF_THIS_RANK,
            )

    def _begin_anew(self, *sizes: _Size) -> None:
        """A new pool with these sizes alone, in this order."""
        logger.info("cuda_graphs: %d sizes are captured anew, as they come, to save memory", len(self._passes))
        inputs = {size: self._inputs[size] for size in sizes}
        self._release()
        self._inputs.update(inputs)
        for size, arguments in inputs.items():
            self._passes[size] = self._capture(*arguments)

    def _is_short(self, device: torch.device) -> bool:
        free, total = torch.cuda.mem_get_info(device)
        return free < LEAST_FREE * total

    def _plain(self, images: ImageBatch) -> DetectorOutput:
        output: DetectorOutput = self.detector(images)
        return output

    def _capture(self, pixels: Tensor, sizes: Tensor) -> "_TensorPass":
        if self.before_capture is not None:
            self.before_capture()
        # a cast that was cached before would be captured as if it never changed
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        torch.clear_autocast_cache()
        self._streams.rewind()
        try:
            # warming up takes the batch at hand: batch norms would count it several times over, and a resumed run,
            # which captures anew, would draw other numbers than one that never stopped
            with as_if_not_run(self.detector, pixels.device):
                captured = torch.cuda.make_graphed_callables(
                    _TensorPass(self.detector), (pixels, sizes), allow_unused_input=True, pool=self._pool
                )
        finally:
            torch.set_autocast_cache_enabled(cached)
        assert isinstance(captured, _TensorPass)
        # what warming up took outside the graphs' pool
        torch.cuda.empty_cache()
        return captured

    def _warn_uncaptured(self, size: _Size) -> None:
        if size not in self._uncaptured:
            self._uncaptured.add(size)
            logger.warning(
                "cuda_graphs: batches of size %s run uncaptured, since no more than %d sizes are captured "
                "(trainer.max_graphs, or fewer where memory was short); a larger data.pad_to gives fewer sizes "
                "(%d beyond the limit so far)",
                size,
                self.max_graphs,
                len(self._uncaptured),
                extra=OF_THIS_RANK,
            )


class _StreamRing:
    """Has every capture take the same stream of those that PyTorch hands out in turn, 32 a device.

    `make_graphed_callables` warms up on the next one, and PyTorch 2.14 captures on it, too (2.11 on one of its own).
    What a pass frees, a later one can use on the same stream alone: with a new one each time, sizes share nothing. And
    PyTorch keeps cuBLAS's workspaces for each stream, 64 MiB cut out of larger pieces that then cannot be given back.
    They must stay: graphs go on writing to those that their stream had when they were captured.
    """

    NUM_STREAMS = 32

    def __init__(self) -> None:
        self._before: torch.cuda.Stream | None = None

    def rewind(self) -> None:
        """The next stream is the one that followed the first call."""
        if self._before is None:
            self._before = torch.cuda.Stream()
            return
        # another thread that takes streams meanwhile costs memory, nothing else
        for _ in range(self.NUM_STREAMS):
            if torch.cuda.Stream() == self._before:
                return


class _TensorPass(nn.Module):
    """A detector from tensors to tensors, as graphs need it."""

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, pixels: Tensor, sizes: Tensor) -> tuple[Tensor, ...]:
        return _to_tensors(self.detector(ImageBatch(pixels, sizes)))


def _to_tensors(output: DetectorOutput) -> tuple[Tensor, ...]:
    proposals = output.enc_outputs
    layers = (output.layer_logits, output.layer_boxes)
    return layers if proposals is None else (*layers, proposals.pred_logits, proposals.pred_boxes)


def _from_tensors(tensors: tuple[Tensor, ...]) -> DetectorOutput:
    logits, boxes, *proposals = tensors
    return DetectorOutput(logits, boxes, LayerOutput(*proposals) if proposals else None)
