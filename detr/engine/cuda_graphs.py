"""The detector's forward and backward pass as CUDA graphs: one launch each instead of thousands.

With small batches the host cannot launch the step's kernels as fast as a GPU runs them. Only the matcher, the loss and
the optimizer stay outside.
"""

import logging

import torch
from torch import Tensor, nn

from detr.engine.as_if_not_run import as_if_not_run
from detr.structures import DetectorOutput, ImageBatch, LayerOutput

logger = logging.getLogger(__name__)


class GraphedDetector(nn.Module):
    """Runs a detector through one pair of CUDA graphs for each padded size and number of images.

    A size is captured when it first comes; all graphs share their working memory, since no two of them run at a
    time. Gradients come in buffers of the graphs, which the next pass overwrites: one batch an optimizer step.

    Args:
        detector: On a CUDA device, in training mode. Its parameters must stay where they are.
        max_graphs: Sizes to capture; further ones run uncaptured, which is said once for each.

    Raises:
        ValueError: The detector is not on a CUDA device.
    """

    def __init__(self, detector: nn.Module, *, max_graphs: int = 32) -> None:
        super().__init__()
        device = next(detector.parameters()).device
        if device.type != "cuda":
            raise ValueError(f"trainer.cuda_graphs=true needs a CUDA device; got {device}. Set it to false")
        self.detector = detector
        self.max_graphs = max_graphs
        self._pool = torch.cuda.graph_pool_handle()
        # in a dict, so no submodules: their parameters are the detector's
        self._passes: dict[tuple[int, ...], _TensorPass] = {}
        self._uncaptured: set[tuple[int, ...]] = set()

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
            self._passes[size] = self._capture(images)
        return _from_tensors(self._passes[size](images.pixels, images.sizes))

    def _plain(self, images: ImageBatch) -> DetectorOutput:
        output: DetectorOutput = self.detector(images)
        return output

    def _capture(self, images: ImageBatch) -> "_TensorPass":
        # copies, since the graph reads from where they are now
        arguments = (images.pixels.clone(), images.sizes.clone())
        # a cast that was cached before would be captured as if it never changed
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        torch.clear_autocast_cache()
        try:
            # warming up takes the batch at hand: batch norms would count it several times over, and a resumed run,
            # which captures anew, would draw other numbers than one that never stopped
            with as_if_not_run(self.detector, images.pixels.device):
                captured = torch.cuda.make_graphed_callables(
                    _TensorPass(self.detector), arguments, allow_unused_input=True, pool=self._pool
                )
        finally:
            torch.set_autocast_cache_enabled(cached)
        assert isinstance(captured, _TensorPass)
        # what warming up took outside the graphs' pool
        torch.cuda.empty_cache()
        return captured

    def _warn_uncaptured(self, size: tuple[int, ...]) -> None:
        if size not in self._uncaptured:
            self._uncaptured.add(size)
            logger.warning(
                "cuda_graphs: batches of size %s run uncaptured, since %d sizes are captured already; a larger "
                "data.pad_to gives fewer sizes (%d beyond the limit so far)",
                size,
                self.max_graphs,
                len(self._uncaptured),
            )


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
