"""Occupancy by arithmetic, counters from ncu's table, and the report of the tilings."""

import json
import os
import stat
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is for Linux")

from detr.benchmark.findings.ncu import Counters, ncu_command, parse_ncu_csv, read_counters
from detr.benchmark.findings.occupancy import MULTIPROCESSORS, Resources, theoretical_occupancy
from detr.benchmark.findings.tile_kernel import Tiling
from detr.benchmark.findings.tiling import DRAM, DRAM_SHARE, L2, METRICS, OCCUPANCY, TilingRow, with_counters
from detr.benchmark.findings.tiling_report import markdown, plot, verdict
from detr.benchmark.origin import Origin

ORIGIN = Origin("T", "python x", "gpu  H", "2026-01-02", "p.png")
HOPPER = MULTIPROCESSORS[9, 0]

# as Nsight Compute prints it with --csv --print-units base
NCU = """==PROF== Connected to process 77 (/usr/bin/python)
==PROF== Profiling "_tile_forward_kernel" - 0: 0%....50%....100% - 1 pass
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"
"0","77","python","127.0.0.1","_tile_forward_kernel","1","7","(32, 1, 1)","(22223, 8, 2)","0","9.0","Command line profiler metrics","dram__bytes.sum.per_second","byte/second","218,150,000,000"
"0","77","python","127.0.0.1","_tile_forward_kernel","1","7","(32, 1, 1)","(22223, 8, 2)","0","9.0","Command line profiler metrics","sm__warps_active.avg.pct_of_peak_sustained_active","%","84.97"
"1","77","python","127.0.0.1","_tile_forward_kernel","1","7","(64, 1, 1)","(1389, 8, 2)","0","9.0","Command line profiler metrics","dram__bytes.sum.per_second","byte/second","n/a"
"1","77","python","127.0.0.1","_tile_forward_kernel","1","7","(64, 1, 1)","(1389, 8, 2)","0","9.0","Command line profiler metrics","sm__warps_active.avg.pct_of_peak_sustained_active","%","17.2"
==PROF== Disconnected from process 77
"""  # noqa: E501 (a table of another program)


@pytest.mark.parametrize(
    ("num_warps", "registers", "shared_bytes", "expected"),
    [
        # 32 warps of 2048 registers
        (4, 64, 0, 0.5),
        (4, 32, 0, 1.0),
        # 33 registers are given out as 40
        (4, 33, 0, 0.75),
        (4, 40, 0, 0.75),
        # two warps a partition, so one block of eight
        (8, 255, 0, 0.125),
        # blocks of one warp: no more than 32
        (1, 32, 0, 0.5),
        # two blocks of 101 KiB and what each reserves
        (16, 32, 100 * 1024, 0.5),
        (16, 32, 227 * 1024, 0.25),
        (32, 64, 0, 0.5),
        (32, 128, 0, 0.0),
    ],
)
def test_occupancy_by_hand(num_warps, registers, shared_bytes, expected):
    assert theoretical_occupancy(Resources(num_warps, registers, shared_bytes), HOPPER) == expected


def test_less_shared_memory_holds_fewer_blocks():
    kernel = Resources(8, 32, 50 * 1024)
    assert theoretical_occupancy(kernel, MULTIPROCESSORS[8, 0]) == 3 * 8 / 64
    assert theoretical_occupancy(kernel, HOPPER) == 4 * 8 / 64


class TestCounters:
    def test_ncu_table(self):
        first, second = parse_ncu_csv(NCU)
        assert first == {DRAM: 218.15e9, OCCUPANCY: 84.97}
        assert second == {OCCUPANCY: 17.2}
        assert parse_ncu_csv("==ERROR== no kernels were profiled\n") == []

    def test_launches_are_in_order_of_their_numbers(self):
        header, *rows = [line for line in NCU.splitlines() if line.startswith('"')]
        eleventh = [row.replace('"1"', '"10"', 1) for row in rows[2:]]
        text = "\n".join([header, *eleventh, *(row.replace('"0"', '"2"', 1) for row in rows[:2])])
        assert [launch[OCCUPANCY] for launch in parse_ncu_csv(text)] == [84.97, 17.2]

    def test_without_ncu_there_is_a_reason(self, monkeypatch, tmp_path):
        monkeypatch.setenv("PATH", str(tmp_path))
        counters = read_counters(["true"], METRICS, num_launches=2, log=tmp_path / "log.csv")
        assert counters == Counters((), "ncu is not installed")

    @pytest.mark.parametrize(
        ("prints", "num_launches", "reason"),
        [
            (NCU, 2, ""),
            (NCU, 3, "ncu counted 2 launches of 3"),
            ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n", 2, "only administrators"),
        ],
    )
    def test_a_stand_in_for_ncu(self, monkeypatch, tmp_path, prints, num_launches, reason):
        """Reads the log that the command names; writes down what it was called with."""
        script = tmp_path / "ncu"
        lines = [f"#!{sys.executable}", "import json, sys, pathlib", "arguments = sys.argv[1:]"]
        lines += [f"pathlib.Path({str(tmp_path / 'called.json')!r}).write_text(json.dumps(arguments))"]
        lines += [f"pathlib.Path(arguments[arguments.index('--log-file') + 1]).write_text({prints!r})"]
        script.write_text("\n".join(lines))
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        log = tmp_path / "log.csv"
        counters = read_counters(["python", "x"], METRICS, num_launches=num_launches, log=log)
        assert reason in counters.reason
        assert bool(counters.launches) == (reason == "")
        called = json.loads((tmp_path / "called.json").read_text())
        assert ["ncu", *called] == ncu_command(["python", "x"], METRICS, log)
        assert called[-2:] == ["python", "x"]


POINT = TilingRow(
    "1 x 16, 4w", "bf16", 2, 1, 16, 4, "ok", True, 32, 512, 1.0, 3.7, 3.6, 3.8, 30.0, 0.01
)  # fmt: skip
BLOCK = replace(POINT, name="64 x 1, 2w", block_q=64, block_p=1, theoretical_occupancy=0.3125, forward_ms=0.5)


def test_counters_go_to_their_rows():
    launches = ({OCCUPANCY: 85.0, DRAM: 2e11, DRAM_SHARE: 5.1, L2: 1e12}, {OCCUPANCY: 17.0})
    first, second = with_counters([POINT, BLOCK], Counters(launches))
    assert (first.achieved_occupancy, first.dram_gbps, first.dram_share, first.l2_gbps) == pytest.approx(
        (0.85, 200, 0.051, 1000)
    )
    assert (second.occupancy, second.dram_gbps) == (pytest.approx(0.17), None)
    assert with_counters([POINT, BLOCK], Counters((), "ncu is not installed")) == [POINT, BLOCK]


def test_verdict():
    text = verdict([POINT, BLOCK])
    assert text.startswith("reproduced: bf16, 2 images: 1 x 16, 4w with 100% theoretical occupancy, ")
    assert "64 x 1, 2w with 31% and 7.4x faster; claimed" in text
    assert verdict([POINT, replace(BLOCK, forward_ms=3.0)]).startswith("different")
    assert verdict([POINT, replace(BLOCK, theoretical_occupancy=1.0)]).startswith("different")
    assert verdict([replace(POINT, forward_ms=None), BLOCK]) == "open: no times of bf16, 2 images"
    assert verdict([]) == "open: no times"
    # another point-parallel tiling is no query-block
    assert "64 x 1, 2w" in verdict([POINT, replace(POINT, name="1 x 4, 1w", block_p=4, forward_ms=0.1), BLOCK])


def test_verdict_compares_within_a_dtype():
    """Full occupancy in fp32 is not set against the fastest tiling of bf16."""
    single = [replace(POINT, dtype="fp32", forward_ms=9.0, theoretical_occupancy=1.0), replace(BLOCK, dtype="fp32")]
    text = verdict([replace(POINT, theoretical_occupancy=0.9), replace(BLOCK, forward_ms=0.37), *single])
    assert "bf16, 2 images: 1 x 16, 4w with 90% theoretical occupancy, 64 x 1, 2w with 31% and 10.0x faster" in text
    assert "fp32, 2 images: 1 x 16, 4w with 100% theoretical occupancy, 64 x 1, 2w with 31% and 18.0x faster" in text
    assert verdict([POINT, BLOCK, single[0], replace(single[1], forward_ms=9.0)]).startswith("different")


def test_report(tmp_path):
    text = markdown([POINT, BLOCK], ORIGIN, counters="not available, ncu is not installed")
    assert "| 64 x 1, 2w | 0.5000 [3.6000, 3.8000] | 32 | 512 | 31% | not available | 30 | 1.0% |" in text
    assert "not available, ncu is not installed" in text
    plot([POINT, BLOCK], tmp_path / "p.png", title="T")
    assert Path(tmp_path / "p.png").stat().st_size > 1000


def test_a_tiling_is_made_of_powers_of_two():
    with pytest.raises(ValueError, match="block_q of a tiling must be a power of two; got 3"):
        Tiling(3, 1)
