"""The presets of docs/findings.md through the functions that the tool calls."""

from hydra import compose, initialize_config_dir

from detr.benchmark.origin import Origin
from tools.benchmark_findings import run_finding
from tools.override_checks import CONFIG_DIR


def preset(name, *overrides):
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        return compose("benchmark_ops", overrides=[f"benchmark={name}", *overrides])


def test_flops_are_counted_on_any_machine(tmp_path):
    cfg = preset("ops_flops", "benchmark.backbone=test_resnet", "benchmark.height=160", "benchmark.width=96")
    rows, report = run_finding(cfg, Origin("T", "c", "e", "d", "p.png"), tmp_path / "p.png")
    assert [row.part for row in rows][-1] == "total"
    assert "Verdict: different" in report
    assert (tmp_path / "p.png").is_file()
