"""Small COCO datasets made on the spot, and programs with data workers."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

DATASET: dict[str, Any] = {
    "images": [
        {"id": 7, "file_name": "a.png", "width": 40, "height": 30},
        {"id": 3, "file_name": "sub/b.png", "width": 20, "height": 50},
        {"id": 12, "file_name": "empty.png", "width": 24, "height": 24},
    ],
    "categories": [{"id": 90, "name": "zebra"}, {"id": 1, "name": "person"}, {"id": 5, "name": "plane"}],
    "annotations": [
        {"id": 11, "image_id": 3, "category_id": 5, "bbox": [1, 2, 10, 20], "area": 150.5, "iscrowd": 0},
        {"id": 0, "image_id": 7, "category_id": 90, "bbox": [4, 5, 8, 10], "area": 80, "iscrowd": 0},
        {"id": 4, "image_id": 7, "category_id": 1, "bbox": [0, 0, 40, 30], "area": 900, "iscrowd": 1},
        {"id": 5, "image_id": 7, "category_id": 1, "bbox": [20.5, 10.25, 6, 7]},
    ],
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def content() -> dict[str, Any]:
    """A valid dataset of three images with a crowd, an id 0 and missing optional keys, to change at will."""
    return deepcopy(DATASET)


@pytest.fixture
def write_dataset(tmp_path: Path) -> Callable[[dict[str, Any]], tuple[Path, Path]]:
    """Writes annotations and noise images of the sizes they give; returns (annotation file, image folder)."""

    def write(content: dict[str, Any]) -> tuple[Path, Path]:
        annotations, images = tmp_path / "annotations.json", tmp_path / "images"
        annotations.write_text(json.dumps(content))
        random = np.random.default_rng(0)
        for image in {image["file_name"]: image for image in content["images"]}.values():
            path = images / image["file_name"]
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = random.integers(0, 256, (int(image["height"]), int(image["width"]), 3), dtype=np.uint8)
            Image.fromarray(pixels).save(path)
        return annotations, images

    return write


@pytest.fixture
def run_program(tmp_path: Path, environment: dict[str, str]) -> Callable[[str], str]:
    """Runs source text as a program of its own, whose workers may be started in any way; returns what it prints.

    It must end well, in 120 s. One that does not fails with the stack of every thread of every process, workers too.
    """

    def run(source: str) -> str:
        script = tmp_path / "program.py"
        script.write_text(source)
        with subprocess.Popen(
            [sys.executable, script],
            env=environment | {"PYTHONFAULTHANDLER": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                stdout, stderr = process.communicate(timeout=120)
            except subprocess.TimeoutExpired:
                # the group, as workers may outlive the program and hold its pipes
                os.killpg(process.pid, signal.SIGABRT)
                stdout, stderr = process.communicate()
                pytest.fail(f"did not end\n{stdout}\n{stderr}")
        assert process.returncode == 0, f"exit code {process.returncode}\n{stdout}\n{stderr}"
        return stdout

    return run
