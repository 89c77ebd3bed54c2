"""A checkpoint as a detector to call with images of any kind."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from detr.engine.checkpoint import Checkpoint, save_checkpoint
from detr.inference.saved_model import Predictor
from detr.models import Backbone, deformable_detr
from detr.structures import ClassTable

MODEL = {"num_queries": 6, "num_levels": 3, "d_model": 32, "num_heads": 2, "num_encoder_layers": 1}
MODEL |= {"num_decoder_layers": 1, "dim_feedforward": 32}


@pytest.fixture(scope="module")
def predictor(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    path = tmp_path_factory.mktemp("run") / "best.pt"
    torch.manual_seed(0)
    model = deformable_detr(Backbone("test_resnet"), num_classes=2, **MODEL)
    backbone = {"_target_": "detr.models.Backbone", "name": "test_resnet"}
    config = {"model": {"_target_": "detr.models.deformable_detr", "backbone": backbone, **MODEL}}
    checkpoint = Checkpoint(
        epoch=1,
        global_step=1,
        model=model.state_dict(),
        optimizer={},
        schedule={},
        scaler={},
        ema=None,
        random_states=[],
        class_table=ClassTable(("cat", "dog"), (3, 7)),
        preprocessing={"resize": {"size": 64, "max_size": None}, "apply_exif": True, "pad_to": 1},
        config=config,
        metrics={},
        best={},
    )
    save_checkpoint(checkpoint, path)
    return Predictor(path, device="cpu")


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    """60 x 40 (w x h) as stored, to be turned by a quarter; lossless, so that all ways to read it agree."""
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png", exif=exif)
    return tmp_path / "photo.png"


@pytest.mark.parametrize(
    "read",
    [
        str,
        Image.open,
        lambda path: np.rot90(np.asarray(Image.open(path)), -1),
        lambda path: np.rot90(np.asarray(Image.open(path)), -1)[..., ::-1].copy()[..., ::-1],
        lambda path: torch.from_numpy(np.rot90(np.asarray(Image.open(path)), -1).copy()).permute(2, 0, 1),
    ],
    ids=["file name", "pillow", "array", "flipped BGR", "tensor"],
)
def test_every_kind_of_image_gives_the_same(predictor: Predictor, photo: Path, read: Callable[[Path], Any]):
    expected = predictor(photo, threshold=0.0)
    assert expected
    assert predictor(read(photo), threshold=0.0) == expected


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16"])
def test_a_pillow_image_of_any_mode_is_as_its_file(predictor: Predictor, tmp_path: Path, mode: str):
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    if mode == "I;16":
        image = Image.fromarray(pixels[..., 0].astype(np.uint16) * 250)
    else:
        image = image.convert(mode)
    path = tmp_path / ("image.tif" if mode == "CMYK" else "image.png")
    image.save(path)
    assert predictor(image, threshold=0.0) == predictor(path, threshold=0.0)


@pytest.mark.parametrize(
    ("image", "error", "message"),
    [
        (np.zeros((40, 60), np.uint8), ValueError, "got uint8 of shape (40, 60). Convert it"),
        (np.zeros((3, 40, 60), np.uint8), ValueError, "an array must be an image (h, w, 3)"),
        (np.zeros((40, 60, 3)), ValueError, "got float64 of shape (40, 60, 3)"),
        (torch.rand(3, 40, 60), ValueError, "a tensor must be an image (3, h, w) of uint8"),
        (torch.zeros(1, 3, 40, 60, dtype=torch.uint8), ValueError, "of shape (1, 3, 40, 60)"),
        (["a.jpg"], TypeError, "got list. Several images are as many calls"),
        (None, TypeError, "got NoneType"),
    ],
)
def test_what_is_no_image_is_refused(predictor: Predictor, image: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=re.escape(message)):
        predictor(image)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named(tmp_path: Path, predictor: Predictor):
    path = tmp_path / "best.pt"
    model = deformable_detr(Backbone("test_resnet"), num_classes=2, **MODEL)
    table = ClassTable(("cat", "dog"), (3, 7))
    save_checkpoint(Checkpoint(1, 1, model.state_dict(), {}, {}, {}, None, [], table, {}, {}, {}, {}), path)
    with pytest.raises(ValueError, match="device=cuda needs a GPU, and PyTorch sees none"):
        Predictor(path, device="cuda")
