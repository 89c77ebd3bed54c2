"""Whether a run learns anything: what ends it, and what only earns a word."""

import logging

_logger = logging.getLogger(__name__)

# a run that detects next to nothing after a quarter of its epochs, and at least so many, has a fault
STUCK_AP = 0.02
STUCK_EPOCHS = 5
# an epoch of fewer steps may be skipped as a whole
LEAST_STEPS_TO_JUDGE = 10


def require_progress(*, num_skipped: int, num_steps: int, epoch: int) -> None:
    """Say how many steps of an epoch were skipped; all of them is the end.

    A few steps say nothing: what is left of an epoch after a resume, or a short epoch while the scaler of fp16
    still looks for its scale. `trainer.max_nonfinite` ends runs that go on like that.

    Args:
        num_skipped: Steps whose gradients were not finite.
        num_steps: Of the epoch.
        epoch: Counted from 1.

    Raises:
        FloatingPointError: All of them were skipped.
    """
    if num_skipped == num_steps >= LEAST_STEPS_TO_JUDGE:
        raise FloatingPointError(
            f"none of the {num_steps} steps of epoch {epoch} had finite gradients, so "
            "nothing was learned. Lower optimizer.lr, or use precision=fp32 or bf16"
        )
    if num_skipped:
        _logger.warning(
            "epoch %d: %d of %d steps were skipped because their gradients were not finite",
            epoch,
            num_skipped,
            num_steps,
        )


class StuckWarning:
    """Says once, of all evaluations of a process, what to look at if a run detects next to nothing."""

    def __init__(self) -> None:
        self._said = False

    def check(self, best_ap: float, *, epoch: int, num_epochs: int) -> None:
        """Look at the best AP, in [0, 1] or -1 for none, of `epoch` epochs of `num_epochs`."""
        if self._said:
            return
        if best_ap < 0:
            self._said = True
            _logger.warning(
                "AP cannot be measured, since the validation set has no boxes (-1 in metrics.json stands for no "
                "number): best.pt is the first checkpoint that was evaluated, not the best. Add annotated images to "
                "the val split"
            )
        elif best_ap < STUCK_AP and epoch >= max(STUCK_EPOCHS, num_epochs // 4):
            self._said = True
            _logger.warning(
                "AP is at most %.3f after %d epochs. Look at: train/loss (does it fall?), train/grad_norm (hundreds "
                "or more mean too high an optimizer.lr), the learning rate for this batch size (optimizer.scale_lr), "
                "the boxes and names of the training images, backbone.pretrained (random weights need many epochs)",
                best_ap,
                epoch,
            )
