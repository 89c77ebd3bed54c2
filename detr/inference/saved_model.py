"""The detector that a checkpoint describes, and detections of it in three lines."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor, nn

from detr.data import EvalTransform, read_image
from detr.data.images import image_to_tensor
from detr.engine.checkpoint import Checkpoint, load_checkpoint
from detr.engine.evaluate import detect
from detr.engine.precision import Precision
from detr.engine.weights import load_weights
from detr.evaluation import PostProcess
from detr.inference.predict import MAX_SIZE_PX, class_labels, detection_batch
from detr.models import Backbone, deformable_detr

_TARGETS = {"model": "detr.models.deformable_detr", "backbone": "detr.models.Backbone"}


def build_saved_detector(checkpoint: Checkpoint, *, source: str, device: torch.device, kernel: Any = None) -> nn.Module:
    """The detector of a checkpoint with the weights that its run evaluated, in evaluation mode.

    Args:
        source: Where the checkpoint comes from, for messages.
        device: Where it goes.
        kernel: The `ops.KernelConfig` of every attention; None chooses what is fastest on the device.

    Raises:
        ValueError: Its configuration is not that of a model of this project, or its weights do not fit.
    """
    config = {name: value for name, value in checkpoint.config["model"].items() if name != "kernel"}
    backbone = dict(config.pop("backbone"))
    for name, arguments in (("model", config), ("backbone", backbone)):
        target = arguments.pop("_target_", None)
        if target != _TARGETS[name]:
            raise ValueError(
                f"{source}: its {name} is {target}, which is not built from a checkpoint; only {_TARGETS[name]} is"
            )
    # the weights come from the checkpoint, not from a download or another file
    backbone["pretrained"] = False
    try:
        model = deformable_detr(
            Backbone(**backbone), num_classes=checkpoint.class_table.num_classes, kernel=kernel, **config
        )
    except TypeError as error:
        raise ValueError(f"{source}: its model has settings that this version does not know ({error})") from error
    load_weights(model, checkpoint.weights, reset_head=False, source=source)
    return model.to(device).eval()


@dataclass(frozen=True)
class Found:
    """A detection as a reader wants it.

    Attributes:
        name: Of the class.
        category_id: Of the class in the training data.
        score: In [0, 1].
        box: (x0, y0, x1, y1) in pixels of the image.
    """

    name: str
    category_id: int
    score: float
    box: tuple[float, float, float, float]


class Predictor:
    """A trained detector to call with images.

    Args:
        checkpoint: File of a run (best.pt), or of tools/import_weights.py.
        device: "cpu", "cuda", ...; None takes the GPU where there is one.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is no checkpoint, or there is no such device.

    Example:
        >>> predictor = Predictor("outputs/NAME/best.pt")  # doctest: +SKIP
        >>> for found in predictor("photo.jpg", threshold=0.5):  # doctest: +SKIP
        ...     print(found.name, found.score, found.box)
    """

    def __init__(self, checkpoint: str | Path, *, device: str | None = None) -> None:
        loaded = load_checkpoint(checkpoint)
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device={device} needs a GPU, and PyTorch sees none. Leave device out, or give 'cpu'")
        self.class_table = loaded.class_table
        self.preprocessing = loaded.preprocessing
        self.model = build_saved_detector(loaded, source=str(checkpoint), device=self.device)
        self._resize = EvalTransform(**loaded.preprocessing["resize"])

    def __call__(
        self,
        image: str | Path | Image | np.ndarray | Tensor,
        *,
        threshold: float = 0.3,
        classes: Sequence[str] | None = None,
        max_size: int | None = MAX_SIZE_PX,
    ) -> list[Found]:
        """What is on an image, best first.

        Args:
            image: A file, a Pillow image, an array (h, w, 3) of uint8 in RGB, or a tensor (3, h, w) likewise.
            threshold: Least score.
            classes: Names to look for; None for all.
            max_size: Longer side in pixels that the image is made smaller to where the training set no limit; None:
                no limit.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file, array or tensor is no image, or there is no such class.
            TypeError: `image` is none of these, as a list of images.
        """
        wanted = None if classes is None else set(class_labels(self.class_table.names, classes))
        batch = detection_batch(
            [self._pixels(image)], self._resize, pad_to=self.preprocessing["pad_to"], max_size=max_size
        )
        [detections] = detect(self.model, batch, PostProcess(300), precision=Precision("fp32"), device=self.device)
        found = []
        for score, label, box in zip(
            detections.scores.tolist(), detections.labels.tolist(), detections.boxes.tolist(), strict=True
        ):
            name = self.class_table.names[label]
            if name and score >= threshold and (wanted is None or label in wanted):
                x0, y0, x1, y1 = box
                found.append(Found(name, self.class_table.category_ids[label], score, (x0, y0, x1, y1)))
        return found

    def _pixels(self, image: str | Path | Image | np.ndarray | Tensor) -> Tensor:
        """(3, h, w) uint8 of any image that a call takes."""
        apply_exif = self.preprocessing["apply_exif"]
        if isinstance(image, Tensor):
            if image.dtype != torch.uint8 or image.ndim != 3 or image.shape[0] != 3:
                raise ValueError(
                    f"a tensor must be an image (3, h, w) of uint8 in RGB; got {image.dtype} of shape "
                    f"{tuple(image.shape)}. Values in [0, 1] become it with (image * 255).round().to(torch.uint8)"
                )
            return image
        if isinstance(image, Image | np.ndarray):
            return image_to_tensor(image, apply_exif=apply_exif)
        if isinstance(image, str | Path):
            return read_image(image, apply_exif=apply_exif)
        raise TypeError(
            f"image must be a file name, a Pillow image, an array or a tensor; got {type(image).__name__}. Several "
            "images are as many calls, or tools/predict.py"
        )
