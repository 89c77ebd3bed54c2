"""Finding the fastest launch shapes of a shape class: what is tried, in which order, and what counts as a win."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

from ops.msda.tuning.candidates import combined, cuda_bases, variants, varied
from ops.msda.tuning.launch_shape import Choice, LaunchShape
from ops.msda.tuning.shape_class import ShapeClass


@dataclass(frozen=True)
class Candidate:
    """A backend with its kernels' launch shapes."""

    backend: str
    launch_shapes: tuple[LaunchShape, ...]

    def __str__(self) -> str:
        return f"{self.backend}: {' + '.join(map(str, self.launch_shapes))}"


class Bench(Protocol):
    """One shape class ready to be run."""

    def failure(self, candidate: Candidate) -> str | None:
        """Why a candidate is out: it does not run, or is not right. None if it may be timed."""

    def time_ms(self, candidate: Candidate, num_iterations: int) -> list[float]:
        """Milliseconds of each call."""


@dataclass(frozen=True)
class TuneSettings:
    """How long to look.

    Attributes:
        num_screened: Timed calls of each candidate before the finals.
        num_finalists: Of each backend, besides the shipped choice.
        rounds: Of the finals; finalists take turns, so that drift meets all.
        num_iterations: Timed calls of each finalist a round.
        min_gain: A winner must be this fraction faster than what is shipped, and faster by more than the noise.
    """

    num_screened: int = 5
    num_finalists: int = 3
    rounds: int = 4
    num_iterations: int = 10
    min_gain: float = 0.01


@dataclass(frozen=True)
class Trial:
    """What became of a candidate.

    Attributes:
        candidate: Which.
        status: `ok`, or why it is out.
        ms: Median; of the finals if it took part, else of the screening; None if it is out.
        rounds_ms: Medians of the finals' rounds; empty if it did not take part.
    """

    candidate: Candidate
    status: str
    ms: float | None = None
    rounds_ms: tuple[float, ...] = ()

    @property
    def noise(self) -> float:
        """Spread of the rounds as a fraction of their median."""
        return (max(self.rounds_ms) - min(self.rounds_ms)) / median(self.rounds_ms)


@dataclass(frozen=True)
class ClassResult:
    """The outcome for one shape class.

    Attributes:
        kind: Which.
        trials: Every candidate, in the order they were tried.
        shipped, choice: What the package has, and what won: the same if nothing is faster by more than the noise.
        ms, shipped_ms: Their times; the latter is None if what is shipped does not run here.
    """

    kind: ShapeClass
    trials: tuple[Trial, ...]
    shipped: Choice
    choice: Choice
    ms: float
    shipped_ms: float | None


@dataclass
class _Search:
    """Candidates of one class, tried once each."""

    bench: Bench
    settings: TuneSettings
    trials: dict[Candidate, Trial] = field(default_factory=dict)

    def screen(self, backend: str, found: Iterable[tuple[LaunchShape, ...]]) -> None:
        for launch_shapes in found:
            candidate = Candidate(backend, launch_shapes)
            if candidate in self.trials:
                continue
            reason = self.bench.failure(candidate)
            if reason is None:
                ms = median(self.bench.time_ms(candidate, self.settings.num_screened))
                self.trials[candidate] = Trial(candidate, "ok", ms)
            else:
                self.trials[candidate] = Trial(candidate, reason)

    def times_ms(self, backend: str) -> dict[tuple[LaunchShape, ...], float]:
        """Of those that ran."""
        return {
            candidate.launch_shapes: trial.ms
            for candidate, trial in self.trials.items()
            if candidate.backend == backend and trial.ms is not None
        }

    def run_finals(self, finalists: Sequence[Candidate]) -> None:
        rounds: dict[Candidate, list[list[float]]] = {candidate: [] for candidate in finalists}
        for _ in range(self.settings.rounds):
            for candidate, samples in rounds.items():
                samples.append(self.bench.time_ms(candidate, self.settings.num_iterations))
        for candidate, samples in rounds.items():
            pooled = median(ms for one in samples for ms in one)
            self.trials[candidate] = Trial(candidate, "ok", pooled, tuple(median(one) for one in samples))


def tune_class(
    kind: ShapeClass, shipped: Choice, backends: Sequence[str], bench: Bench, settings: TuneSettings
) -> ClassResult:
    """Try the candidates of a shape class.

    Args:
        backends: Those that can run here, of cuda and triton.

    Raises:
        RuntimeError: Not one candidate runs and is right.
    """
    search = _Search(bench, settings)
    finalists: list[Candidate] = []
    for backend in backends:
        start = shipped.launch_shapes(backend)
        search.screen(backend, [start])
        if backend == "cuda":
            for base in cuda_bases(kind, shipped.cuda):
                search.screen(backend, varied(base))
                search.screen(backend, [combined(base, search.times_ms(backend))])
        else:
            search.screen(backend, [(shape,) for shape in variants("triton")])
        times_ms = search.times_ms(backend)
        others = sorted(times_ms.keys() - {start}, key=lambda shapes: (times_ms[shapes], str(shapes)))
        names = [start] if start in times_ms else []
        finalists += [Candidate(backend, shapes) for shapes in (*names, *others[: settings.num_finalists])]
    if not finalists:
        reasons = "; ".join(f"{trial.candidate}: {trial.status}" for trial in list(search.trials.values())[:3])
        raise RuntimeError(f"no launch shape runs {kind} here: {reasons}")
    search.run_finals(finalists)

    winners: dict[str, Trial] = {}
    for backend in backends:
        mine = [search.trials[candidate] for candidate in finalists if candidate.backend == backend]
        if mine:
            mine_shipped = search.trials[Candidate(backend, shipped.launch_shapes(backend))]
            winners[backend] = _winner(mine, mine_shipped, settings.min_gain)
    # the shipped backend stays unless another is faster
    first = winners.get(shipped.backend)
    overall = _winner(list(winners.values()), first, settings.min_gain)
    cuda, triton = winners.get("cuda"), winners.get("triton")
    choice = Choice(
        overall.candidate.backend if first is not None else shipped.backend,
        cuda.candidate.launch_shapes if cuda else shipped.cuda,
        triton.candidate.launch_shapes[0] if triton else shipped.triton,
    )
    incumbent = search.trials.get(Candidate(shipped.backend, shipped.launch_shapes(shipped.backend)))
    assert overall.ms is not None
    return ClassResult(
        kind, tuple(search.trials.values()), shipped, choice, overall.ms, None if incumbent is None else incumbent.ms
    )


def _winner(trials: Sequence[Trial], incumbent: Trial | None, min_gain: float) -> Trial:
    """The fastest, or the incumbent unless it is beaten by more than the noise."""
    best = min(trials, key=lambda trial: trial.ms or float("inf"))
    if incumbent is None or incumbent.ms is None:
        return best
    assert best.ms is not None
    gain = 1 - best.ms / incumbent.ms
    return best if gain > max(min_gain, best.noise, incumbent.noise) else incumbent
