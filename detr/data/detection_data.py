"""The data of a run: its two splits, how they are batched, and what a checkpoint must know of them."""

import zlib
from collections.abc import Callable
from typing import Any

from detr.data.dataset import DetectionDataset
from detr.data.epoch_order import Sampling
from detr.data.layouts import Split
from detr.data.loader import DetectionLoader, build_train_loader, build_val_loader
from detr.data.repeated import RepeatedDataset
from detr.data.synthetic import SyntheticDataset
from detr.data.transforms import DetectionTransform, EvalTransform
from detr.structures import ClassTable


class DetectionData:
    """The train and val split of a dataset, each opened when it is first asked for.

    Evaluation so never reads a training file. The splits must have the same classes: once both are open,
    differing class tables are an error.

    Args:
        open_train: Makes the training set.
        open_val: Makes the validation set.
        open_val_ground_truth: Makes its COCO ground truth without needing its images.
        eval_transforms: The resizing of validation images, for the checkpoint.
        batch_size: Images a batch and GPU in training.
        val_batch_size: Images a batch and GPU in validation; None: as in training.
        num_workers: Data worker processes a GPU.
        pad_to: Round padded heights and widths up to a multiple of this many pixels.
        apply_exif: Whether images are turned as their EXIF orientation says, for the checkpoint.
        sampling: Which training samples meet in a batch; None: chance alone decides.
        split_by_name: Whether the names of the images decide which of them validate.
    """

    def __init__(
        self,
        *,
        open_train: Callable[[], DetectionDataset],
        open_val: Callable[[], DetectionDataset],
        open_val_ground_truth: Callable[[], dict[str, Any]],
        eval_transforms: EvalTransform,
        batch_size: int,
        val_batch_size: int | None,
        num_workers: int,
        pad_to: int,
        apply_exif: bool = True,
        sampling: Sampling | None = None,
        split_by_name: bool = False,
    ) -> None:
        self.batch_size = batch_size
        self.val_batch_size = batch_size if val_batch_size is None else val_batch_size
        self.num_workers = num_workers
        self.pad_to = pad_to
        self._eval_transforms = eval_transforms
        self._apply_exif = apply_exif
        self._sampling = sampling
        self._split_by_name = split_by_name
        self._open_train = open_train
        self._open_val = open_val
        self._open_val_ground_truth = open_val_ground_truth
        self._train: DetectionDataset | None = None
        self._val: DetectionDataset | None = None

    def train_dataset(self) -> DetectionDataset:
        """The training set."""
        if self._train is None:
            self._train = self._open_train()
            self._check_class_tables()
        return self._train

    def repeat_training(self, times: int) -> None:
        """Let an epoch go through the training set `times` times; for measurements on a small set."""
        self._train = RepeatedDataset(self.train_dataset(), times)

    def val_dataset(self) -> DetectionDataset:
        """The validation set."""
        if self._val is None:
            self._val = self._open_val()
            self._check_class_tables()
        return self._val

    def val_ground_truth(self) -> dict[str, Any]:
        """The validation set's annotations as a COCO dict for the evaluator; its images need not be there."""
        return self._open_val_ground_truth() if self._val is None else self._val.coco_ground_truth()

    @property
    def class_table(self) -> ClassTable:
        """The classes of both splits; opens the validation set if neither is open."""
        return (self._train or self.val_dataset()).class_table

    @property
    def preprocessing(self) -> dict[str, Any]:
        """What prediction must do to an image before the model sees it, as plain values for the checkpoint.

        `resize` holds the arguments of `EvalTransform`; `apply_exif` that of `read_image`; `pad_to` that of
        `ImageBatch.from_images`. Normalisation belongs to the backbone.
        """
        return {
            "resize": self._eval_transforms.describe(),
            "apply_exif": self._apply_exif,
            "pad_to": self.pad_to,
        }

    def fingerprints(self) -> dict[str, str]:
        """What tells states of the dataset apart, by split: the number of images, and a checksum of their shapes in
        order, on which the order of an epoch depends. Not of pixels and boxes, which would take minutes. Where names
        decide which images validate, also a checksum of the names of these. Opens both.
        """
        fingerprints = {"train": _fingerprint(self.train_dataset()), "val": _fingerprint(self.val_dataset())}
        if self._split_by_name:
            # images of one shape, as exports resize them, would look alike whichever were held out
            names = "/".join(image["file_name"] for image in self.val_ground_truth()["images"])
            fingerprints["val"] += f", names {zlib.crc32(names.encode()):08x}"
        return fingerprints

    def train_loader(
        self, *, seed: int, rank: int = 0, world_size: int = 1, pin_memory: bool = False
    ) -> DetectionLoader:
        """Batches of a rank for training; see `build_train_loader`."""
        return build_train_loader(
            self.train_dataset(),
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            pad_to=self.pad_to,
            seed=seed,
            rank=rank,
            world_size=world_size,
            pin_memory=pin_memory,
            sampling=self._sampling,
        )

    def val_loader(self, *, rank: int = 0, world_size: int = 1, pin_memory: bool = False) -> DetectionLoader:
        """Batches of a rank for validation; see `build_val_loader`."""
        return build_val_loader(
            self.val_dataset(),
            batch_size=self.val_batch_size,
            num_workers=self.num_workers,
            pad_to=self.pad_to,
            rank=rank,
            world_size=world_size,
            pin_memory=pin_memory,
        )

    def _check_class_tables(self) -> None:
        if self._train is None or self._val is None or self._train.class_table == self._val.class_table:
            return
        train, val = (
            set(zip(table.category_ids, table.names, strict=True))
            for table in (self._train.class_table, self._val.class_table)
        )
        raise ValueError(
            "the train and val annotations must list the same categories (id and name). Only in train: "
            f"{sorted(train - val)}; only in val: {sorted(val - train)}. Make both files list all of them, used "
            "or not"
        )


def _fingerprint(dataset: DetectionDataset) -> str:
    return f"{len(dataset)} images, shapes {zlib.crc32(dataset.aspects().tobytes()):08x}"


def synthetic_data(
    *,
    size: int,
    num_classes: int,
    num_train_images: int,
    num_val_images: int,
    seed: int,
    batch_size: int,
    val_batch_size: int | None,
    num_workers: int,
    pad_to: int,
    train_transforms: DetectionTransform,
    eval_transforms: EvalTransform,
    sampling: Sampling | None = None,
    max_objects: int = 7,
    min_side_px: float = 18,
    max_side_share: float = 0.45,
) -> DetectionData:
    """The embedded synthetic dataset.

    Args:
        size: See `SyntheticDataset`.
        num_classes: See `SyntheticDataset`.
        num_train_images: Images to train on.
        num_val_images: Other images to validate on.
        seed: The seed of the images; that of the run is another.
        batch_size: Images a batch and GPU in training.
        val_batch_size: Images a batch and GPU in validation; None: as in training.
        num_workers: Data worker processes a GPU.
        pad_to: Round padded heights and widths up to a multiple of this many pixels.
        train_transforms: Augmentation of the training images.
        eval_transforms: Resizing of the validation images.
        sampling: Which training samples meet in a batch; None: chance alone decides.
        max_objects: See `SyntheticDataset`.
        min_side_px: See `SyntheticDataset`.
        max_side_share: See `SyntheticDataset`.
    """

    def open_split(split: Split, num_images: int, transforms: DetectionTransform) -> SyntheticDataset:
        return SyntheticDataset(
            split,
            transforms,
            num_images=num_images,
            size=size,
            num_classes=num_classes,
            max_objects=max_objects,
            min_side_px=min_side_px,
            max_side_share=max_side_share,
            seed=seed,
        )

    return DetectionData(
        open_train=lambda: open_split("train", num_train_images, train_transforms),
        open_val=lambda: open_split("val", num_val_images, eval_transforms),
        open_val_ground_truth=lambda: open_split("val", num_val_images, eval_transforms).coco_ground_truth(),
        eval_transforms=eval_transforms,
        batch_size=batch_size,
        val_batch_size=val_batch_size,
        num_workers=num_workers,
        pad_to=pad_to,
        sampling=sampling,
    )
