"""A COCO-format dataset: an annotation file and a folder of images."""

import logging
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from detr.data.annotation_file import load_coco_annotations
from detr.data.annotations import CocoAnnotations, LabelMap
from detr.data.dataset import Sample, make_sample
from detr.data.epoch_order import repeat_factors
from detr.data.faults import FaultyAnnotations, FaultyImages, listed
from detr.data.image_cache import ImageCache
from detr.data.image_files import load_checked, missing_files, sound_images
from detr.data.image_health import header_faults, image_faults
from detr.data.images import read_image, read_image_size
from detr.data.transforms import DetectionTransform
from detr.structures import ClassTable

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CocoCounts:
    """What became of the images and boxes of an annotation file.

    Attributes:
        num_images: Images, those without boxes included.
        num_images_without_targets: Images that have no box to train on: pure negatives.
        num_targets: Boxes to train on.
        num_crowd: Crowd boxes: not trained on, but in the ground truth of the evaluation.
        num_without_area: Boxes with w <= 0 or h <= 0 within the image: not trained on.
        num_clipped: Boxes that reach beyond their image by more than half a pixel and were cut at its edge.
        num_sizes_from_files: Images whose size came from the image file, as the annotations give none.
    """

    num_images: int
    num_images_without_targets: int
    num_targets: int
    num_crowd: int
    num_without_area: int
    num_clipped: int
    num_sizes_from_files: int

    def __str__(self) -> str:
        notes = (
            (self.num_images_without_targets, "images without boxes kept as negatives"),
            (self.num_crowd, "crowd boxes kept for evaluation only"),
            (self.num_without_area, "boxes without area dropped"),
            (self.num_clipped, "boxes cut at the image's edge"),
            (self.num_sizes_from_files, "image sizes read from the files"),
        )
        return ", ".join(
            [f"{self.num_images} images, {self.num_targets} boxes"]
            + [f"{count} {what}" for count, what in notes if count]
        )


class CocoDataset(Dataset[Sample]):
    """Images and targets of a COCO-format annotation file.

    Any integer category ids are fine, in any order and with gaps; names are kept. Crowd boxes and boxes without
    area are no targets; images without boxes stay, as negatives. Everything that can be checked without
    decoding an image is checked here, before training starts.

    Args:
        annotations: The annotation file, or what `load_coco_annotations` made of it.
        images: The folder that its file names are relative to.
        transforms: Augmentation or resizing.
        label_map: "contiguous": labels 0 to C - 1 by ascending category id. "category_id": the label is the
            category id, with C = largest id + 1 rows (91 for COCO), as the original Deformable DETR has it.
        training: Training needs at least one box; evaluation does not, not even an `annotations` list.
        apply_exif: Turn images as their EXIF orientation says before the boxes are used. Cameras write photos
            lying and say so in EXIF; annotation tools show, and so label, them upright.
        faulty_annotations: What to do about faulty entries of the annotation file: "error" or "drop".
        faulty_images: What to do about images that are missing, unreadable or not of their annotated size:
            "error": missing ones here; for evaluation also those whose header says so; others where they are met.
            "skip" decodes all of them beforehand and leaves the faulty ones out, of training as of the ground truth.
        num_threads: How many images "skip" decodes at once.
        cache_dir: Folder in which decoded images are kept; None: nowhere.

    Attributes:
        class_table: The classes, by label.
        counts: What became of the images and boxes of the file.

    Raises:
        FileNotFoundError: The file, the folder or images are missing; the first of them are listed.
        ValueError: The annotations are faulty (see `load_coco_annotations`), a file name leaves the folder, images
            for evaluation have a faulty header, or there is nothing to train on.
    """

    def __init__(
        self,
        annotations: str | Path | CocoAnnotations,
        images: str | Path,
        transforms: DetectionTransform,
        *,
        label_map: LabelMap = "contiguous",
        training: bool,
        apply_exif: bool = True,
        faulty_annotations: FaultyAnnotations = "error",
        faulty_images: FaultyImages = "error",
        num_threads: int = 1,
        cache_dir: str | Path | None = None,
    ) -> None:
        if not isinstance(annotations, CocoAnnotations):
            annotations = load_coco_annotations(annotations, need_annotations=training, faulty=faulty_annotations)
        self.class_table: ClassTable = annotations.class_table(label_map)
        self._images = Path(images).expanduser()
        self._transforms = transforms
        self._apply_exif = apply_exif
        self._cache = None if cache_dir is None else ImageCache(cache_dir)
        if faulty_images == "skip":
            annotations = self._without_faulty_images(annotations, num_threads)
        else:
            _require_files(annotations, self._images)
            if not training:
                # training meets its faulty images in the first epoch, validation only after it
                _require_headers(annotations, self._images, apply_exif=apply_exif)
        num_unsized = int((annotations.image_sizes[:, 0] < 0).sum())
        self._annotations = self._with_image_sizes(annotations) if num_unsized else annotations
        boxes, kept, is_cut = target_boxes(self._annotations)
        is_target = kept & ~annotations.crowd
        self._first_box, self._boxes, self._labels = _grouped(self._annotations, boxes, is_target, self.class_table)
        self.counts = CocoCounts(
            num_images=len(annotations.image_ids),
            num_images_without_targets=int((np.diff(self._first_box) == 0).sum()),
            num_targets=int(is_target.sum()),
            num_crowd=int(annotations.crowd.sum()),
            num_without_area=int((~kept & ~annotations.crowd).sum()),
            num_clipped=int(is_cut.sum()),
            num_sizes_from_files=num_unsized,
        )
        if training and self.counts.num_targets == 0:
            raise ValueError(
                f"{annotations.path} has no box to train on ({self.counts}). Is it the right annotation file?"
            )
        _logger.info("%s: %s", annotations.path, self.counts)

    def __len__(self) -> int:
        return len(self._annotations.image_ids)

    def __getitem__(self, index: int) -> Sample:
        """Image `index`, in file order, with its target; see `load`."""
        return self.load(index, None)

    def load(self, index: int, batch_draw: float | None) -> Sample:
        """Image `index`, in file order, with its target; `batch_draw` is what the images of a batch share.

        Raises:
            ValueError: The image is unreadable, or does not have the size that the annotations give.
        """
        image_id = int(self._annotations.image_ids[index])
        h, w = self._annotations.image_sizes[index].tolist()
        image = load_checked(self.image_path(index), image_id, (h, w), apply_exif=self._apply_exif, cache=self._cache)
        rows = slice(self._first_box[index], self._first_box[index + 1])
        return make_sample(
            image,
            self._boxes[rows].astype(np.float32),
            self._labels[rows].copy(),
            image_id=image_id,
            transforms=self._transforms,
            batch_draw=batch_draw,
        )

    def original(self, file_name: str) -> Tensor:
        """(3, h, w) uint8 RGB: the image of that name in the annotation file, before any transform."""
        return read_image(self._images / file_name, apply_exif=self._apply_exif)

    def aspects(self) -> NDArray[np.float64]:
        """(I,) width / height of every image, as its annotations or else its file give them."""
        h, w = self._annotations.image_sizes.T
        return w / h

    def repeat_factors(self, threshold: float) -> NDArray[np.float64]:
        """(I,) how often each image should come in an epoch; see `detr.data.epoch_order.repeat_factors`."""
        return repeat_factors(self._first_box, self._labels, self.class_table.num_classes, threshold)

    @property
    def annotations(self) -> CocoAnnotations:
        """The annotations of the images that are used."""
        return self._annotations

    def coco_ground_truth(self) -> dict[str, Any]:
        """All annotations as a COCO dict; see `CocoAnnotations.ground_truth`."""
        return self._annotations.ground_truth()

    def image_path(self, index: int) -> Path:
        """The file of image `index`."""
        return self._images / self._annotations.file_names[index]

    def _without_faulty_images(self, annotations: CocoAnnotations, num_threads: int) -> CocoAnnotations:
        """The annotations without the images that cannot be used, which are counted and listed in the log."""
        faults = image_faults(annotations, self._images, apply_exif=self._apply_exif, num_threads=num_threads)
        if not faults:
            return annotations
        counts = ", ".join(f"{count} x {kind}" for kind, count in Counter(fault.kind for fault in faults).items())
        text = listed([f"{fault.file}: {fault.problem}" for fault in faults])
        if len(faults) == len(annotations.image_ids):
            raise ValueError(
                f"none of the {len(faults)} images of {annotations.path} can be used ({counts}):\n  {text}"
            )
        _logger.warning(
            "%s: %d of %d images skipped (%s), data.faulty_images=skip:\n  %s",
            annotations.path,
            len(faults),
            len(annotations.image_ids),
            counts,
            text,
        )
        return annotations.select(sound_images(annotations, faults))

    def _with_image_sizes(self, annotations: CocoAnnotations) -> CocoAnnotations:
        """The annotations with the sizes they lack, read from the image files."""
        sizes = annotations.image_sizes.copy()
        for index in np.flatnonzero(sizes[:, 0] < 0):
            path = self._images / annotations.file_names[int(index)]
            sizes[index] = read_image_size(path, apply_exif=self._apply_exif)
        return replace(annotations, image_sizes=sizes)


def _require_files(annotations: CocoAnnotations, folder: Path) -> None:
    """Refuse names that leave `folder` and list the files it lacks."""
    missing = missing_files(annotations.file_names, folder, annotations.path)
    if missing:
        raise FileNotFoundError(
            f"{len(missing)} of the {len(annotations.image_ids)} images of {annotations.path} are not in "
            f"{folder.absolute()}; the first:\n  {listed([annotations.file_names[index] for index in missing])}\n"
            "Correct the folder, add the files, remove the images from the annotations, or leave them out with "
            "data.faulty_images=skip"
        )


def _require_headers(annotations: CocoAnnotations, folder: Path, *, apply_exif: bool) -> None:
    """List the images that are unreadable or not of their annotated size, as far as their headers say."""
    found = header_faults(annotations, folder, apply_exif=apply_exif)
    if found.faults:
        count, looked_at = f"{len(found.faults)}", ""
        if found.num_decoded < found.num_suspect:
            count = f"at least {count}"
            looked_at = (
                f" (by their headers {found.num_suspect} are broken or of another size than annotated, of which the "
                f"first {found.num_decoded} were decoded)"
            )
        raise ValueError(
            f"{count} of the {len(annotations.image_ids)} images of {annotations.path} cannot be evaluated on"
            f"{looked_at}; the first:\n  {listed([fault.problem for fault in found.faults])}\nReplace these files, "
            "correct their annotations, or leave the images out with data.faulty_images=skip"
        )


def target_boxes(
    annotations: CocoAnnotations,
) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_]]:
    """Boxes in the image.

    Returns:
        Boxes (A, 4) as (x0, y0, x1, y1) cut at the image's edge; (A,) which have an area; (A,) which of those, but
        for crowds, reached beyond the edge by more than half a pixel.
    """
    corners = annotations.boxes.copy()
    corners[:, 2:] += corners[:, :2]
    sides = np.repeat(annotations.image_sizes[:, ::-1], np.diff(annotations.first_box), axis=0)  # (A, 2), w h
    clipped = np.clip(corners, 0, np.tile(sides, 2))
    kept = np.all(clipped[:, 2:] > clipped[:, :2], axis=1)
    return clipped, kept, kept & ~annotations.crowd & (np.abs(clipped - corners) > 0.5).any(1)


def _grouped(
    annotations: CocoAnnotations, boxes: NDArray[np.float64], is_target: NDArray[np.bool_], table: ClassTable
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
    """First row of each image (I + 1,), boxes (T, 4) and labels (T,) of the targets alone."""
    first = np.concatenate(([0], np.cumsum(is_target)))[annotations.first_box].astype(np.int64)
    label_of_id = {category_id: label for label, category_id in enumerate(table.category_ids)}
    label_of_category = np.array([label_of_id[category_id] for category_id in annotations.category_ids])
    return first, boxes[is_target], label_of_category[annotations.categories[is_target]]
