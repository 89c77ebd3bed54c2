"""What is left of a run: against runs that are played to their end on a clock of their own."""

from dataclasses import dataclass

import pytest

from detr.telemetry.loggers.time_left import Evaluations, TimeLeft

STEP_S, LOG_EVERY = 2.0, 10


@dataclass(frozen=True)
class Run:
    """A run to be played; seconds and minutes of training, steps."""

    num_steps: int = 1000
    evaluation_s: float = 45.0
    eval_every: int | None = None
    eval_every_minutes: float | None = None
    max_minutes: float | None = None
    first_step: int = 0
    past_evaluation_s: float | None = None


RUNS = {
    "steps alone": Run(),
    "epochs": Run(eval_every=130),
    "epochs of less than a log": Run(num_steps=200, eval_every=7, evaluation_s=5.0),
    "minutes": Run(num_steps=1_000_000, max_minutes=20),
    "minutes, epochs": Run(num_steps=1_000_000, max_minutes=20, eval_every=130),
    "minutes, evaluations by the minute": Run(num_steps=1_000_000, max_minutes=20, eval_every_minutes=3),
    "more minutes than steps": Run(max_minutes=500, eval_every_minutes=3),
    "long evaluations": Run(num_steps=1_000_000, max_minutes=20, eval_every_minutes=3, evaluation_s=400.0),
    "resumed between evaluations": Run(first_step=585, eval_every=130),
    "resumed, minutes": Run(num_steps=1_000_000, first_step=200, max_minutes=20, eval_every_minutes=3),
    "resumed, evaluations known": Run(first_step=585, eval_every=130, past_evaluation_s=45.0),
    "resumed, minutes, evaluations known": Run(
        num_steps=1_000_000, first_step=200, max_minutes=20, eval_every_minutes=3, past_evaluation_s=45.0
    ),
    "resumed, epochs and minutes": Run(first_step=585, eval_every=130, eval_every_minutes=3, past_evaluation_s=45.0),
}


@dataclass(frozen=True)
class Said:
    """What is known at a log of a played run; `now_s` is the wall clock."""

    now_s: float
    seconds: float | None
    training_s: float | None
    knows_evaluations: bool
    last_step: int | None
    num_evaluations: int


def play(run: Run, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Said], float, int]:
    """What is said at each log, and the wall clock and the step of the end."""
    now_s, trained_s = 500.0, STEP_S * run.first_step
    asked_s = trained_s
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    left = TimeLeft(
        run.num_steps,
        first_step=run.first_step,
        first_minutes=trained_s / 60,
        max_minutes=run.max_minutes,
        evaluations=Evaluations(run.eval_every, every_minutes=run.eval_every_minutes, seconds=run.past_evaluation_s),
    )
    logs: list[Said] = []

    def log(step: int, *, is_evaluation: bool) -> None:
        left.log(step, minutes=trained_s / 60, is_evaluation=is_evaluation)
        num_evaluations = (logs[-1].num_evaluations if logs else 0) + is_evaluation
        logs.append(Said(now_s, left.seconds, left.training_s, left.knows_evaluations, left.last_step, num_evaluations))

    for step in range(run.first_step + 1, run.num_steps + 1):
        now_s += STEP_S
        trained_s += STEP_S
        is_over = step == run.num_steps
        is_due = run.eval_every is not None and step % run.eval_every == 0
        if step % LOG_EVERY == 0:
            log(step, is_evaluation=False)
            is_over |= run.max_minutes is not None and trained_s >= 60 * run.max_minutes
            if run.eval_every_minutes is not None:
                every_s = 60 * run.eval_every_minutes
                is_due |= trained_s // every_s > asked_s // every_s
                asked_s = trained_s
        if is_due or is_over:
            now_s += run.evaluation_s
            log(step, is_evaluation=True)
        if is_over:
            return logs, now_s, step
    raise AssertionError("the run did not end")


@pytest.mark.parametrize("name", RUNS)
def test_the_time_left_comes_true(name: str, monkeypatch: pytest.MonkeyPatch):
    run = RUNS[name]
    logs, end_s, end_step = play(run, monkeypatch)
    # the run looks at its clock when it logs
    slack_s = STEP_S * LOG_EVERY + 1e-6
    for said in logs:
        assert said.seconds is not None
        assert said.training_s is not None
        assert said.last_step is not None
        assert abs(said.last_step - end_step) <= LOG_EVERY
        assert said.knows_evaluations == (said.num_evaluations > 0 or run.past_evaluation_s is not None)
        left_s = end_s - said.now_s
        if said.training_s == 0 or not said.knows_evaluations:
            assert said.seconds == said.training_s
            assert said.training_s <= left_s + slack_s
        else:
            # all that are due, after a resume too; one may fall together with the end, or just before it
            assert abs(said.seconds - left_s) <= run.evaluation_s + slack_s
    assert logs[-1].seconds == 0
    knows = run.eval_every or run.eval_every_minutes or run.past_evaluation_s
    assert any(said.knows_evaluations for said in logs[:-1]) == bool(knows)


def test_an_evaluation_that_the_process_before_missed_says_how_long_the_others_take(monkeypatch: pytest.MonkeyPatch):
    now_s = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    left = TimeLeft(1000, first_step=500, first_minutes=10.0, evaluations=Evaluations(250))
    now_s = 60.0
    left.log(500, minutes=10.0, is_evaluation=True)
    assert left.seconds is None
    assert left.last_step == 1000
    now_s = 70.0
    left.log(510, minutes=10.0 + 10 / 60, is_evaluation=False)
    # 490 steps, and evaluations after 750 and 1000
    assert left.seconds == pytest.approx(490 + 2 * 60)


def test_epochs_count_from_where_another_pace_began(monkeypatch: pytest.MonkeyPatch):
    """100 of 200 steps were made, on twice the ranks 50 of 100 are left: epochs end at 110, 130 and 150."""
    now_s = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    evaluations = Evaluations(20, origin=50, seconds=7.0)
    left = TimeLeft(150, first_step=100, first_minutes=10.0, evaluations=evaluations)
    for step, is_evaluation, seconds in (
        (105, False, 45 + 3 * 7),
        # the one that is due now is still to come
        (110, False, 40 + 3 * 7),
        (110, True, 40 + 2 * 7),
        (111, False, 39 + 2 * 7),
    ):
        now_s = step - 100.0 + (7.0 if is_evaluation or step > 110 else 0.0)
        left.log(step, minutes=10.0 + (step - 100) / 60, is_evaluation=is_evaluation)
        assert left.seconds == pytest.approx(seconds), step


def test_a_run_that_never_says_its_minutes_goes_by_the_wall_clock(monkeypatch: pytest.MonkeyPatch):
    now_s = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    left = TimeLeft(100)
    now_s = 10.0
    left.log(10, minutes=None, is_evaluation=True)
    assert left.seconds == pytest.approx(90)
    assert left.knows_evaluations
