"""Datasets on disk as the data of a run."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from detr.data.annotations import CocoAnnotations, LabelMap
from detr.data.coco import CocoDataset
from detr.data.detection_data import DetectionData
from detr.data.epoch_order import Sampling
from detr.data.faults import FaultyAnnotations, FaultyImages
from detr.data.layouts import Split, SplitSource, find_coco_split
from detr.data.own_split import find_own_split, find_parts
from detr.data.parts import Parts
from detr.data.sources import load_source
from detr.data.transforms import DetectionTransform, EvalTransform

Load = Callable[..., tuple[CocoAnnotations, Path]]
"""`load(split, with_images=..., need_annotations=...)`: the annotations of a split, and its image folder, which may be
none where images are not needed."""


def coco_data(
    *,
    root: str | Path | None,
    train: dict[str, str | None],
    val: dict[str, str | None],
    label_map: LabelMap,
    apply_exif: bool,
    batch_size: int,
    val_batch_size: int | None,
    num_workers: int,
    pad_to: int,
    train_transforms: DetectionTransform,
    eval_transforms: EvalTransform,
    faulty_annotations: FaultyAnnotations = "error",
    faulty_images: FaultyImages = "error",
    sampling: Sampling | None = None,
    cache_dir: str | None = None,
) -> DetectionData:
    """A COCO-format dataset: under one root, or file by file.

    Args:
        root: The folder of the dataset, in one of the layouts of `find_coco_split`.
        train: `annotations` (file) and `images` (folder) of the training split; what is None is looked for
            under `root`.
        val: Likewise, of the validation split.
        label_map: See `CocoDataset`.
        apply_exif: See `CocoDataset`.
        batch_size: Images a batch and GPU in training.
        val_batch_size: Images a batch and GPU in validation; None: as in training.
        num_workers: Data worker processes a GPU.
        pad_to: Round padded heights and widths up to a multiple of this many pixels.
        train_transforms: Augmentation of the training images.
        eval_transforms: Resizing of the validation images.
        faulty_annotations: See `CocoDataset`.
        faulty_images: See `CocoDataset`.
        sampling: Which training samples meet in a batch; None: chance alone decides.
        cache_dir: See `CocoDataset`.
    """
    paths = {"train": train, "val": val}

    def find(split: Split, *, with_images: bool) -> SplitSource:
        file = paths[split]["annotations"]
        if not with_images and file is not None:
            return SplitSource("coco", Path(file).expanduser(), Path())
        return SplitSource("coco", *find_coco_split(split, root=root, **paths[split]))

    return _file_data(
        _one_by_one(find, apply_exif=apply_exif, faulty=faulty_annotations),
        label_map=label_map,
        apply_exif=apply_exif,
        faulty_images=faulty_images,
        batch_size=batch_size,
        val_batch_size=val_batch_size,
        num_workers=num_workers,
        pad_to=pad_to,
        train_transforms=train_transforms,
        eval_transforms=eval_transforms,
        sampling=sampling,
        cache_dir=cache_dir,
    )


def custom_data(
    *,
    root: str | Path | None,
    train: dict[str, str | None],
    val: dict[str, str | None],
    apply_exif: bool,
    faulty_annotations: FaultyAnnotations,
    faulty_images: FaultyImages,
    batch_size: int,
    val_batch_size: int | None,
    num_workers: int,
    pad_to: int,
    train_transforms: DetectionTransform,
    eval_transforms: EvalTransform,
    sampling: Sampling | None = None,
    cache_dir: str | None = None,
    holdout: float | None = None,
) -> DetectionData:
    """A dataset of one's own, in any of the layouts of `find_split`; see `coco_data` for the other arguments.

    Args:
        holdout: The fraction of the images to validate on where there is no validation split; see `find_parts`.
    """

    def find(split: Split, *, with_images: bool) -> SplitSource:
        return find_own_split(split, root=root, train=train, val=val, with_images=with_images)

    if holdout is None:
        load = _one_by_one(find, apply_exif=apply_exif, faulty=faulty_annotations)
    else:
        find_both = partial(find_parts, root=root, train=train, val=val, holdout=holdout)
        load = Parts(find_both, apply_exif=apply_exif, faulty=faulty_annotations).load
    return _file_data(
        load,
        label_map="contiguous",
        apply_exif=apply_exif,
        faulty_images=faulty_images,
        batch_size=batch_size,
        val_batch_size=val_batch_size,
        num_workers=num_workers,
        pad_to=pad_to,
        train_transforms=train_transforms,
        eval_transforms=eval_transforms,
        sampling=sampling,
        cache_dir=cache_dir,
        split_by_name=holdout is not None,
    )


def _one_by_one(find: Callable[..., SplitSource], *, apply_exif: bool, faulty: FaultyAnnotations) -> Load:
    """Reads the splits that `find(split, with_images=...)` finds, each when it is asked for."""

    def load(split: Split, *, with_images: bool, need_annotations: bool) -> tuple[CocoAnnotations, Path]:
        source = find(split, with_images=with_images)
        other = None
        if source.format == "voc":
            # no file lists the classes of a Pascal VOC dataset: they are those of both splits
            other = find("val" if split == "train" else "train", with_images=True)
        annotations = load_source(
            source, other=other, need_annotations=need_annotations, apply_exif=apply_exif, faulty=faulty
        )
        return annotations, source.images

    return load


def _file_data(
    load: Load,
    *,
    label_map: LabelMap,
    apply_exif: bool,
    faulty_images: FaultyImages,
    batch_size: int,
    val_batch_size: int | None,
    num_workers: int,
    pad_to: int,
    train_transforms: DetectionTransform,
    eval_transforms: EvalTransform,
    sampling: Sampling | None = None,
    cache_dir: str | None = None,
    split_by_name: bool = False,
) -> DetectionData:
    """The data whose splits `load` reads."""

    def open_split(split: Split, transforms: DetectionTransform) -> CocoDataset:
        annotations, images = load(split, with_images=True, need_annotations=split == "train")
        return CocoDataset(
            annotations,
            images,
            transforms,
            label_map=label_map,
            training=split == "train",
            apply_exif=apply_exif,
            faulty_images=faulty_images,
            num_threads=num_workers,
            cache_dir=cache_dir,
        )

    def open_val_ground_truth() -> dict[str, Any]:
        annotations, _ = load("val", with_images=False, need_annotations=True)
        return annotations.ground_truth()

    return DetectionData(
        open_train=lambda: open_split("train", train_transforms),
        open_val=lambda: open_split("val", eval_transforms),
        open_val_ground_truth=open_val_ground_truth,
        eval_transforms=eval_transforms,
        batch_size=batch_size,
        val_batch_size=val_batch_size,
        num_workers=num_workers,
        pad_to=pad_to,
        apply_exif=apply_exif,
        sampling=sampling,
        split_by_name=split_by_name,
    )
