"""Every configuration composes, builds what it names, and refuses what does not exist."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from detr.data import DetectionData, SyntheticDataset, flip_and_resize
from detr.engine.optim import parameter_groups
from detr.engine.precision import Precision
from detr.engine.schedule import Cosine, StepDecay
from detr.engine.settings import TrainerSettings
from detr.losses import SetCriterion
from detr.models import DeformableDETR
from tools.override_checks import CONFIG_DIR, check_overrides, require_keys

EXPERIMENTS = sorted(path.stem for path in (CONFIG_DIR / "experiment").glob("*.yaml"))
REQUIRED = {
    "quickstart",
    "debug_cpu",
    "coco_mini_overfit",
    "r50_single_scale_50ep",
    "r50_50ep",
    "r50_refine_50ep",
    "r50_two_stage_50ep",
    "r50_12ep",
}
# recipe section 3: tensors and elements of main, backbone and linear projections
GROUPS = {
    "r50_single_scale_50ep": [(218, 10_413_791), (42, 23_232_512), (26, 197_890)],
    "r50_50ep": [(230, 15_824_735), (42, 23_232_512), (26, 790_018)],
    "r50_refine_50ep": [(270, 16_604_730), (42, 23_232_512), (26, 790_018)],
    "r50_two_stage_50ep": [(285, 16_937_113), (42, 23_232_512), (24, 789_504)],
    "r50_12ep": [(230, 15_824_735), (42, 23_232_512), (26, 790_018)],
}


def config_of(name: str, overrides: Sequence[str] = ()) -> DictConfig:
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        return compose(name, overrides=list(overrides))


def keys_of(config: Any, prefix: str = "") -> set[str]:
    if not isinstance(config, dict):
        return {prefix}
    return {key for name, value in config.items() for key in keys_of(value, f"{prefix}.{name}")} | {prefix}


def test_the_experiments_exist():
    assert set(EXPERIMENTS) >= REQUIRED


@pytest.mark.parametrize("name", ["train", "evaluate", "predict"])
def test_the_tools_compose_and_share_their_keys(name: str):
    cfg = config_of(name)
    assert cfg.output_dir == f"outputs/{cfg.name}"
    assert cfg.device == "auto"
    assert cfg.kernel.backend == "auto"
    assert isinstance(cfg.seed, int)
    assert isinstance(instantiate(cfg.precision), Precision)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_builds(experiment: str, tmp_path: Path):
    cfg = config_of("train", [f"experiment={experiment}", "backbone.pretrained=false"])
    assert cfg.name == experiment
    if "root" in cfg.data:
        assert cfg.data.root is None, "experiments leave data.root to the user"
        cfg.data.root = str(tmp_path)
    data = instantiate(cfg.data)
    num_classes = 91 if cfg.data.get("label_map") == "category_id" else 7
    model = instantiate(cfg.model, num_classes=num_classes)
    optimizer = instantiate(cfg.optimizer)(model, total_batch=32)
    assert isinstance(data, DetectionData)
    assert isinstance(model, DeformableDETR)
    assert isinstance(instantiate(cfg.criterion, num_classes=num_classes), SetCriterion)
    assert isinstance(instantiate(cfg.schedule), StepDecay | Cosine)
    assert isinstance(instantiate(cfg.trainer), TrainerSettings)
    assert len(optimizer.param_groups) == 3
    if experiment in GROUPS:
        groups = parameter_groups(model.named_parameters())
        assert [(len(group.parameters), group.num_elements) for group in groups] == GROUPS[experiment]
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([2e-4, 2e-5, 2e-5])
        assert (cfg.trainer.clip, cfg.trainer.ema_decay, cfg.precision.name) == (0.1, None, "fp32")
        assert cfg.evaluator.top_k == 100


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_only_overrides(experiment: str):
    text = (CONFIG_DIR / "experiment" / f"{experiment}.yaml").read_text()
    own = OmegaConf.to_container(OmegaConf.create(text))
    assert isinstance(own, dict)
    # without the experiment's own keys, but with its choices of groups
    choices = [
        f"{key.removeprefix('override /')}={value}" for each in own.pop("defaults") for key, value in each.items()
    ]
    base = OmegaConf.to_container(config_of("train", choices))
    assert keys_of(own) <= keys_of(base), keys_of(own) - keys_of(base)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_says_how_it_is_run(experiment: str):
    lines = (CONFIG_DIR / "experiment" / f"{experiment}.yaml").read_text().splitlines()
    header = "\n".join(line for line in lines if line.startswith("#"))
    assert f"tools/train.py experiment={experiment}" in header
    assert "AP" in header
    if experiment in GROUPS:
        assert "Not yet run" in header


@pytest.mark.parametrize(
    ("group", "choice"),
    [
        (path.parent.name, path.stem)
        for path in sorted(CONFIG_DIR.glob("*/*.yaml"))
        if path.parent.name not in ("experiment", "local", "hydra", "sweep")
    ],
)
def test_every_option_composes(group: str, choice: str):
    root = "train"
    if group == "benchmark":
        root = "benchmark_ops" if choice.startswith("ops_") else "benchmark"
    elif group == "accuracy":
        root = "compare_accuracy"
    cfg = config_of(root, [f"{group}={choice}"])
    OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)


@pytest.mark.parametrize("choice", sorted(path.stem for path in (CONFIG_DIR / "accuracy").glob("*.yaml")))
def test_the_runs_of_a_comparison_are_configurations_of_training(choice: str):
    preset = config_of("compare_accuracy", [f"accuracy={choice}"]).accuracy
    assert preset.base in preset.rows
    assert set(preset.notes) <= set(preset.rows)
    composed = {}
    for name, overrides in preset.rows.items():
        check_overrides("train", [*preset.shared, *overrides])
        cfg = config_of("train", [*preset.shared, *overrides])
        cfg.name = "one for all"
        composed[name] = OmegaConf.to_yaml(cfg, resolve=True)
    assert len(set(composed.values())) == len(composed), "two rows are the same run"


@pytest.mark.parametrize("choice", ["step_50ep", "step_12ep"])
def test_the_schedules_of_the_paper(choice: str):
    curve = instantiate(config_of("train", [f"schedule={choice}"]).schedule)
    expected = {"step_50ep": (50, (40,)), "step_12ep": (12, (11,))}[choice]
    assert (curve.epochs, curve.milestones, curve.gamma, curve.warmup_steps) == (*expected, 0.1, 0)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.eval_evry=1", ["did you mean trainer.eval_every?", "trainer.accumulate", "trainer.clip"]),
        ("schedul.epochs=1", ["unknown key schedul", "did you mean schedule?", "experiment"]),
        ("data.train.annotations=x", ["unknown key data.train", "add data=custom"]),
        ("data.trian=x", ["unknown key data.trian", "data.num_train_images"]),
        ("optimizer.lr.main=1", ["optimizer.lr is a value (0.0012)"]),
        ("seed.x=1", ["seed is a value"]),
        ("optimizer.lr=high", ["optimizer.lr is a number, as in 0.0012; got high"]),
        ("optimizer.lr=nan", ["optimizer.lr is a number"]),
        ("optimizer.scale_lr=off", ["optimizer.scale_lr is true or false, as in true; got off"]),
        ("model.with_box_refine=flase", ["model.with_box_refine is true or false"]),
        ("model.two_stage=1", ["model.two_stage is true or false"]),
        ("trainer.accumulate=1.5", ["trainer.accumulate is a whole number, as in 1; got 1.5"]),
        ("schedule.epochs=1.5", ["schedule.epochs is a whole number"]),
        ("seed=one", ["seed is a whole number"]),
        ("backbone.nam=resnet18", ["did you mean backbone.name?"]),
        # as other trainers call them
        ("epochs=3", ["did you mean schedule.epochs?"]),
        ("lr=0.1", ["did you mean optimizer.lr?"]),
        ("batch_size=2", ["did you mean data.batch_size?"]),
        ("num_workers=2", ["did you mean data.num_workers?"]),
        ("pretrained=true", ["did you mean backbone.pretrained?"]),
        ("data.root=x", ["unknown key data.root", "data=coco and data=custom have it; add data=custom"]),
        ("data.faulty_images=skip", ["add data=custom"]),
    ],
)
def test_a_typo_is_refused_with_the_valid_names(override: str, words: list[str]):
    with pytest.raises(ValueError, match=r"unknown key|is a|is true or false") as error:
        check_overrides("train", [override])
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "override",
    [
        "trainer.clip=null",
        "trainer.clip=1",
        "optimizer.scale_lr=false",
        "transforms.eval.size=[64,64]",
        "schedule.epochs=${seed}",
        "backbone.pretrained=file.safetensors",
        "experiment=debug_cpu",
        "hydra.verbose=true",
        "+anything=1",
        "optimizer.betas=[0.9,0.99]",
        "--cfg=job",
    ],
)
def test_what_exists_is_accepted(override: str):
    check_overrides("train", [override])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--epochs", "3"], "as in epochs=3"),
        (["--epochs=3"], "as in epochs=3"),
        (["data=custom", "--data.root", "x"], "as in data.root=x"),
        (["--batch-size", "data=custom"], "as in batch_size=VALUE"),
        (["-b"], "as in b=VALUE"),
    ],
)
def test_options_with_dashes_are_refused_with_how_to_write_them(arguments: list[str], words: str):
    with pytest.raises(ValueError, match="key=value without dashes") as error:
        require_keys(arguments)
    assert words in str(error.value)


@pytest.mark.parametrize(
    "text", ["--cfg=job", "--cfg", "-m", "--multirun", "-cn", "seed=-1", "optimizer.lr=1e-3", "~x"]
)
def test_options_of_hydra_and_negative_values_pass(text: str):
    require_keys([text])


def test_keys_of_a_chosen_group_count():
    check_overrides("train", ["data=coco", "data.train.annotations=x"])
    check_overrides("train", ["experiment=r50_50ep", "schedule.milestones=[30]"])
    with pytest.raises(ValueError, match="unknown key data"):
        check_overrides("train", ["data=coco", "data.num_val_images=3"])


@pytest.mark.parametrize(
    "overrides",
    [
        ["experiment=r50_50ep,r50_refine_50ep", "data.root=/x"],
        ["experiment=debug_cpu,r50_50ep", "data.root=/x"],
        ["experiment=glob(r50*)", "data.root=/x,/y"],
        ["data=custom,coco", "data.root=/x", "data.holdout=null"],
        ["experiment=glob(zz*)"],
    ],
)
def test_keys_of_any_option_of_a_sweep_count(overrides: list[str]):
    check_overrides("train", ["-m", *overrides])


@pytest.mark.parametrize(
    ("override", "words"), [("data.rot=/x", "did you mean data.root"), ("schedule.epochs=x", "a whole number")]
)
def test_other_keys_of_a_sweep_are_refused(override: str, words: str):
    with pytest.raises(ValueError, match=words):
        check_overrides("train", ["-m", "experiment=r50_50ep,r50_refine_50ep", override])


def test_the_quickstart_evaluates_the_default_synthetic_set():
    default, quickstart = config_of("train"), config_of("train", ["experiment=quickstart"])
    for key in ("size", "num_classes", "num_val_images", "seed"):
        assert quickstart.data[key] == default.data[key], key
    assert quickstart.data.num_val_images == 200
    assert not quickstart.backbone.pretrained
    assert quickstart.init_from is None


def test_the_models_accept_what_the_default_data_yields():
    cfg = config_of("train", ["backbone.name=test_resnet"])
    model = instantiate(cfg.model, num_classes=cfg.data.num_classes).eval()
    dataset = SyntheticDataset("val", flip_and_resize(None), num_images=1, size=cfg.data.size)
    from detr.structures import ImageBatch

    with torch.no_grad():
        output = model(ImageBatch.from_images([dataset[0][0]]))
    assert output.pred_logits.shape == (1, cfg.model.num_queries, cfg.data.num_classes)
