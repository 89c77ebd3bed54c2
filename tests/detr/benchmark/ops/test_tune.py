"""Tuning without a GPU: what is tried, what wins, what is kept. Times come from a bench that makes them up."""

from dataclasses import replace

import pytest
import torch
from hydra import compose, initialize_config_dir

from detr.benchmark.ops.tune import Candidate, TuneSettings, tune_class
from detr.benchmark.ops.tune_report import markdown_report, result_line, result_table
from ops.msda.tuning.candidates import combined, cuda_bases, variants, varied
from ops.msda.tuning.device import tuning_of
from ops.msda.tuning.launch_shape import KERNELS, LaunchShape
from ops.msda.tuning.shape_class import ShapeClass
from ops.msda.tuning.shipped import shipped_tuning
from ops.msda.tuning.store import TunedClass, TuningFileError, read_tuning, tuning_path, update_tuning
from ops.msda.tuning.table import Device
from tools import tune_ops
from tools.override_checks import CONFIG_DIR

H200 = Device("NVIDIA H200", (9, 0), 132, 232_448)
FORWARD = ShapeClass("forward", 2, None, "encoder", 32, True)
BACKWARD = ShapeClass("backward", 2, "float32", "encoder", 32, True)
DECODER = replace(BACKWARD, regime="decoder")
SETTINGS = TuneSettings(num_screened=2, num_finalists=2, rounds=3, num_iterations=2)
BEST_DOTS, BEST_SCATTER = LaunchShape("dots32", 8, 3), LaunchShape("scatter32", 24, 1, tile_px=20)


class FakeBench:
    """1 ms a kernel, faster by the gains given for launch shapes; the noise alternates with the calls of each."""

    def __init__(self, gains=None, noise=0.0, out=None):
        self.gains, self.noise, self.out = gains or {}, noise, out or {}
        self.calls = {}

    def failure(self, candidate):
        return next((self.out[shape] for shape in candidate.launch_shapes if shape in self.out), None)

    def time_ms(self, candidate, num_iterations):
        count = self.calls[candidate] = self.calls.get(candidate, 0) + 1
        ms = sum(1 - self.gains.get(shape, 0) for shape in candidate.launch_shapes)
        return [ms * (1 + self.noise * (count % 2))] * num_iterations


def tuned(kind=BACKWARD, backends=("cuda",), **options):
    return tune_class(kind, shipped_tuning(H200).choice(kind), backends, FakeBench(**options), SETTINGS)


class TestCandidates:
    @pytest.mark.parametrize("kernel", KERNELS)
    def test_variants_are_many_and_all_different(self, kernel):
        found = variants(kernel)
        assert len(found) >= 5
        assert len(set(found)) == len(found)
        assert {shape.kernel for shape in found} == {kernel}

    @pytest.mark.parametrize("kernel", ["forward", "dots32", "scatter32", "collect32", "backward", "triton"])
    def test_what_is_shipped_is_among_them(self, kernel):
        shipped = {
            shape
            for row in shipped_tuning(H200).rows
            for shape in (*row.choice.cuda, row.choice.triton)
            if shape.kernel == kernel
        }
        assert shipped
        assert shipped <= set(variants(kernel))

    def test_one_kernel_at_a_time_then_the_best_together(self):
        (base,) = cuda_bases(BACKWARD, shipped_tuning(H200).choice(BACKWARD).cuda)
        found = varied(base)
        assert found[0] == base
        assert all(sum(a != b for a, b in zip(shapes, base, strict=True)) <= 1 for shapes in found)
        times = dict.fromkeys(found, 2.0)
        assert combined(base, times) == base
        times[(BEST_DOTS, base[1])] = times[(base[0], BEST_SCATTER)] = 1.0
        assert combined(base, times) == (BEST_DOTS, BEST_SCATTER)

    def test_one_pass_and_two_are_compared_where_there_is_little_work(self):
        for kind in (DECODER, replace(BACKWARD, regime="other")):
            shipped = shipped_tuning(H200).choice(kind).cuda
            bases = cuda_bases(kind, shipped)
            assert bases[0] == shipped
            assert sorted(len(base) for base in bases) == [1, len(shipped)]
        one_pass = replace(DECODER, value_bytes=4)
        bases = cuda_bases(one_pass, shipped_tuning(H200).choice(one_pass).cuda)
        assert [[shape.kernel for shape in base] for base in bases] == [
            ["backward"],
            ["dots32", "collect32", "scatter32"],
        ]
        general = replace(DECODER, head_dim=20, fits32=False)
        assert len(cuda_bases(general, shipped_tuning(H200).choice(general).cuda)) == 1


class TestTuneClass:
    def test_nothing_faster_keeps_what_is_shipped(self):
        result = tuned()
        assert result.choice == result.shipped
        assert result.ms == result.shipped_ms == 2.0
        assert "nothing is faster" in result_line(result)

    def test_the_best_kernels_together_win(self):
        result = tuned(gains={BEST_DOTS: 0.2, BEST_SCATTER: 0.3})
        assert result.choice.cuda == (BEST_DOTS, BEST_SCATTER)
        assert result.choice.triton == result.shipped.triton
        assert result.ms == pytest.approx(1.5)
        assert "0.750 x shipped" in result_line(result)

    def test_a_gain_within_the_noise_is_none(self):
        assert tuned(gains={BEST_SCATTER: 0.1}, noise=0.2).choice == tuned().shipped
        assert tuned(gains={BEST_SCATTER: 0.5}, noise=0.2).choice.cuda[1] == BEST_SCATTER
        # nor one too small to matter
        assert tuned(gains={BEST_SCATTER: 0.005}).choice == tuned().shipped

    def test_what_is_wrong_or_does_not_run_cannot_win(self):
        result = tuned(gains={BEST_SCATTER: 0.9}, out={BEST_SCATTER: "wrong: grad value"})
        assert result.choice == result.shipped
        assert "| wrong: grad value |" in result_table(result)

    def test_a_shipped_shape_that_does_not_run_is_replaced(self):
        scatter = shipped_tuning(H200).choice(BACKWARD).cuda[1]
        dots = shipped_tuning(H200).choice(BACKWARD).cuda[0]
        result = tuned(out={scatter: "does not run: too much"})
        assert result.choice.cuda[0] == dots
        assert result.choice.cuda[1] != scatter
        assert result.shipped_ms is None
        with pytest.raises(RuntimeError, match=r"no launch shape runs backward, encoder.*does not run: broken"):
            tuned(out={dots: "does not run: broken"} | dict.fromkeys(variants("dots32"), "does not run: broken"))

    def test_one_pass_may_beat_two(self):
        kind = replace(BACKWARD, regime="other")
        general = LaunchShape("backward", 8, 2, unroll=1)
        assert tuned(kind, gains={general: 0.1}).choice.cuda == (general,)

    def test_backends_compete(self):
        best = LaunchShape("triton", 4, queries=32)
        result = tuned(FORWARD, ("cuda", "triton"), gains={best: 0.5})
        assert result.choice.backend == "triton"
        assert result.choice.triton == best
        assert result.choice.cuda == result.shipped.cuda
        # as fast as cuda is not faster
        assert tuned(FORWARD, ("cuda", "triton")).choice.backend == "cuda"

    def test_a_backend_that_does_not_run_keeps_its_choice(self):
        best = LaunchShape("triton", 4, queries=32)
        result = tuned(FORWARD, ("triton",), gains={best: 0.5})
        assert (result.choice.backend, result.choice.triton) == ("cuda", best)
        assert result.choice.cuda == result.shipped.cuda

    def test_finalists_take_turns(self):
        bench = FakeBench(gains={BEST_SCATTER: 0.3})
        result = tune_class(BACKWARD, shipped_tuning(H200).choice(BACKWARD), ("cuda",), bench, SETTINGS)
        finalists = [trial for trial in result.trials if trial.rounds_ms]
        assert len(finalists) == SETTINGS.num_finalists + 1
        assert all(len(trial.rounds_ms) == SETTINGS.rounds for trial in finalists)
        assert {bench.calls[trial.candidate] for trial in finalists} == {1 + SETTINGS.rounds}
        # nobody is tried twice
        assert len({trial.candidate for trial in result.trials}) == len(result.trials)


def test_report_names_the_winner_and_what_is_shipped():
    result = tuned(gains={BEST_SCATTER: 0.5}, out={BEST_DOTS: "does not run: registers"})
    report = markdown_report([result, tuned(FORWARD)], command="x", environment="gpu  H", date="2026-01-02", note="n")
    winner = Candidate("cuda", result.choice.cuda)
    assert f"| {winner} | 1.5000 [+- 0.0%] | 0.750 | winner |" in report
    shipped = Candidate("cuda", result.shipped.cuda)
    assert f"| {shipped} | 2.0000 [+- 0.0%] | 1.000 | shipped |" in report
    assert "does not run: registers" in report
    assert "forward, encoder, 16 bit, D = 32: nothing is faster" in report
    short = result_table(result, max_rows=2)
    assert str(winner) in short
    assert len(short.splitlines()) < 12
    assert "more were slower in the screening or out (1 out in all)" in short


class TestUpdate:
    ENTRY = TunedClass(BACKWARD, tuned(gains={BEST_SCATTER: 0.5}).choice, 1.5, 2.0)

    def test_classes_are_replaced_one_by_one(self, tmp_path):
        path = tuning_path(H200, tmp_path)
        other = replace(self.ENTRY, kind=DECODER)
        update_tuning(path, H200, BACKWARD, self.ENTRY, {"date": "1"})
        update_tuning(path, H200, DECODER, other, {"date": "2"})
        better = replace(self.ENTRY, ms=1.2)
        update_tuning(path, H200, BACKWARD, better, {"date": "3"})
        tuning = read_tuning(path, H200)
        assert tuning.classes == (other, better)
        assert tuning.versions == {"date": "3"}
        update_tuning(path, H200, BACKWARD, None, {"date": "4"})
        assert read_tuning(path, H200).classes == (other,)

    def test_no_winner_writes_no_file(self, tmp_path):
        path = tuning_path(H200, tmp_path)
        update_tuning(path, H200, BACKWARD, None, {})
        assert not path.exists()

    def test_a_file_that_cannot_be_used_is_begun_anew(self, tmp_path):
        path = tuning_path(H200, tmp_path)
        path.parent.mkdir()
        path.write_text("{")
        with pytest.raises(TuningFileError):
            read_tuning(path, H200)
        update_tuning(path, H200, BACKWARD, self.ENTRY, {})
        assert tuning_of(H200, tmp_path).choice(BACKWARD) == self.ENTRY.choice


def config(*overrides):
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        return compose("tune_ops", overrides=list(overrides))


class TestCommand:
    """All but the GPU: the bench makes up times."""

    @pytest.fixture(autouse=True)
    def stand_in(self, monkeypatch):
        class Bench(FakeBench):
            def __init__(self, cases, dtype, direction, sums, **options):
                (case, *_) = cases
                super().__init__(gains={BEST_SCATTER: 0.3})
                self.kind = ShapeClass(direction, dtype.itemsize, sums, "encoder", case.head_dim, case.head_dim == 32)

        monkeypatch.setattr(tune_ops, "KernelBench", Bench)
        monkeypatch.setattr(tune_ops, "runnable_backends", lambda *_: (["cuda"], ["not triton: none"]))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def run(self, folder, *overrides):
        settings = ("dtypes=[bf16]", "regimes=[encoder]", f"output_dir={folder}", "sums=[float32,native]")
        tune_ops.tune_and_keep(config(*settings, *overrides), H200, folder)

    def test_winners_are_kept_and_everything_is_reported(self, tmp_path, capsys):
        self.run(tmp_path)
        kept = read_tuning(tuning_path(H200, tmp_path), H200)
        assert [entry.kind for entry in kept.classes] == [BACKWARD, replace(BACKWARD, sums="native")]
        assert all(entry.choice.cuda[1] == BEST_SCATTER for entry in kept.classes)
        assert set(kept.versions) == {"date", "cuda", "driver", "torch", "triton"}
        assert "2 of 3 shape classes have launch shapes faster" in capsys.readouterr().out
        assert (tmp_path / "tune_ops.md").read_text().count("## ") == 3
        # the next process takes them
        assert tuning_of(H200, tmp_path).choice(BACKWARD).cuda[1] == BEST_SCATTER

    def test_another_head_leaves_the_first_alone(self, tmp_path):
        self.run(tmp_path)
        before = read_tuning(tuning_path(H200, tmp_path), H200).classes
        self.run(tmp_path, "head_dim=64", "num_heads=4")
        assert read_tuning(tuning_path(H200, tmp_path), H200).classes == before

    def test_shown_but_not_kept(self, tmp_path):
        self.run(tmp_path, "write=false")
        assert not tuning_path(H200, tmp_path).exists()
        assert (tmp_path / "tune_ops.md").exists()

    def test_a_backend_that_does_not_run_is_left_out_or_refused(self, tmp_path):
        with pytest.raises(ValueError, match="none of triton runs here: not triton: none"):
            self.run(tmp_path, "backends=[triton]")

    def test_covers_every_kind_of_pass(self):
        sums = ("float32", "native", "fixed")
        assert tune_ops.passes(config()) == [("forward", None), *(("backward", kind) for kind in sums)]
        assert tune_ops.passes(config("directions=[backward]", "sums=[fixed]")) == [("backward", "fixed")]

    def test_an_encoder_is_tuned_at_several_spreads(self):
        assert len(set(config().noise_px)) > 1
