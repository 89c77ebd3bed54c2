"""Times of steps measured as a whole; importing this imports no torch."""

import statistics
from dataclasses import dataclass


@dataclass(frozen=True)
class WholeSteps:
    """Times of whole steps.

    Attributes:
        step_ms: Of each timed step, ascending, in milliseconds: host, device and the wait for the batch together.
        padded_mpx: Mean size of an image of the timed steps, with its padding, in millions of pixels.
        num_recompiles: Graphs that torch.compile made during the timed steps.
        peak_gib: Most memory in tensors; None on the CPU.
        reserved_gib: Most memory the allocator held; likewise.
        warmup_s: Wall time of the warm-up.
    """

    step_ms: tuple[float, ...]
    padded_mpx: float
    num_recompiles: int
    peak_gib: float | None
    reserved_gib: float | None
    warmup_s: float

    @property
    def median_ms(self) -> float:
        return statistics.median(self.step_ms)

    @property
    def p20_ms(self) -> float:
        return self.step_ms[len(self.step_ms) // 5]

    @property
    def p80_ms(self) -> float:
        return self.step_ms[len(self.step_ms) * 4 // 5]

    @property
    def mean_ms(self) -> float:
        return statistics.fmean(self.step_ms)
