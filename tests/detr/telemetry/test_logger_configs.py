"""The logger presets build what they say."""

from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from detr.telemetry.loggers import TensorboardLogger, WandbLogger

EXPECTED = {"jsonl": [], "none": [], "wandb": [WandbLogger], "tensorboard": [TensorboardLogger]}


def test_every_preset_is_tested(repository: Path):
    assert {path.stem for path in (repository / "configs/logger").glob("*.yaml")} == EXPECTED.keys()


@pytest.mark.parametrize("preset", EXPECTED)
def test_presets_build_their_loggers_without_starting_them(repository: Path, tmp_path: Path, preset: str):
    output_dir = tmp_path / "run"
    config = OmegaConf.create({"name": "run", "output_dir": str(output_dir)})
    config.logger = OmegaConf.load(repository / f"configs/logger/{preset}.yaml")
    loggers = instantiate(config.logger)
    assert [type(logger) for logger in loggers.values()] == EXPECTED[preset]
    for logger in loggers.values():
        logger.close()
    assert not output_dir.exists()
