"""Holds images out for validation where a dataset has no validation split of its own."""

import hashlib
import posixpath
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from detr.data.annotations import CocoAnnotations
from detr.data.faults import Fault
from detr.data.layouts import Part, Split

HOLDOUT_SEED = 0
"""Of the choice; that of the run is another, so runs of different seeds validate on the same images."""


def take_part(annotations: CocoAnnotations, faults: Sequence[Fault], part: Part) -> tuple[CocoAnnotations, list[Fault]]:
    """One split of a dataset that is not divided; see `divide`."""
    return divide(annotations, faults, part.holdout)[part.split]


def divide(
    annotations: CocoAnnotations, faults: Sequence[Fault], fraction: float
) -> dict[Split, tuple[CocoAnnotations, list[Fault]]]:
    """Both splits of a dataset that is not divided.

    Args:
        annotations: Of all images.
        faults: Of all images.
        fraction: Of the images, to validate on, in (0, 1).

    Returns:
        The annotations of the images of each, and the faults of these; those of no sound image count as of training.

    Raises:
        ValueError: The fraction leaves a split without an image.
    """
    validating = held_out(annotations, fraction)
    ids = set(annotations.image_ids[validating].tolist())
    # the id of a fault may be anything that a JSON file holds
    is_of_val = [isinstance(fault.image_id, int) and fault.image_id in ids for fault in faults]
    return {
        "train": (
            annotations.select(~validating),
            [f for f, is_val in zip(faults, is_of_val, strict=True) if not is_val],
        ),
        "val": (annotations.select(validating), [f for f, is_val in zip(faults, is_of_val, strict=True) if is_val]),
    }


def held_out(annotations: CocoAnnotations, fraction: float) -> NDArray[np.bool_]:
    """Which images validate: round(fraction * images) of them, the same ones for the same annotations.

    The order of choice is that of the SHA-256 of "<HOLDOUT_SEED>/<file name>", so it depends neither on the order
    of the images nor on where they are. Classes choose one after the other, the rarest first: the first images of
    each, until `fraction` of its images and at least one of them validates. No image is taken that is the last one
    in training of some class, as long as there are others. Images without boxes are chosen by the same fraction.
    So a class of two or more images is in both splits unless classes share images or the images to choose are fewer
    than the classes; larger classes only come near the fraction. Images of one file stay together.

    Args:
        annotations: Of all images. Crowd boxes do not count.
        fraction: Of the images, in (0, 1).

    Returns:
        (I,) whether each image validates.

    Raises:
        ValueError: The fraction leaves a split without an image.
    """
    images_of: dict[str, list[int]] = {}
    for index in range(len(annotations.image_ids)):
        images_of.setdefault(posixpath.normpath(annotations.file_names[index]), []).append(index)
    names = sorted(images_of, key=lambda name: hashlib.sha256(f"{HOLDOUT_SEED}/{name}".encode()).digest())
    num_wanted = round(fraction * len(names))
    if not 0 < num_wanted < len(names):
        split = "validation" if num_wanted == 0 else "training"
        least = 1 / len(names)
        advice = f"Set it between {least:.3g} and {1 - least:.3g}" if len(names) > 1 else "Add images"
        raise ValueError(
            f"data.holdout={fraction} of the {len(names)} images of {annotations.path} leaves none for {split}. "
            f"{advice}"
        )
    classes = [
        frozenset(label for index in images_of[name] for label in _classes(annotations, index).tolist())
        for name in names
    ]
    chosen = _choose(classes, fraction, num_wanted)
    validating = np.zeros(len(annotations.image_ids), dtype=np.bool_)
    validating[[index for number in chosen for index in images_of[names[number]]]] = True
    return validating


def _classes(annotations: CocoAnnotations, image: int) -> NDArray[np.int64]:
    """The classes of an image's boxes but for crowds."""
    rows = slice(annotations.first_box[image], annotations.first_box[image + 1])
    return annotations.categories[rows][~annotations.crowd[rows]]


def _choose(classes: Sequence[frozenset[int]], fraction: float, num_wanted: int) -> set[int]:
    """The numbers of `num_wanted` images, given the classes of each in the order of choice; see `held_out`."""
    members: dict[int, list[int]] = {}
    for number, labels in enumerate(classes):
        for label in labels:
            members.setdefault(label, []).append(number)
    in_training = Counter({label: len(numbers) for label, numbers in members.items()})
    negatives = [number for number, labels in enumerate(classes) if not labels]
    # one at least is for images with boxes, without which there is nothing to measure
    num_negatives = min(round(fraction * len(negatives)), num_wanted - bool(members))
    chosen = set(negatives[:num_negatives])

    def take(number: int) -> None:
        chosen.add(number)
        in_training.subtract(classes[number])

    def is_spare(number: int) -> bool:
        return number not in chosen and all(in_training[label] > 1 for label in classes[number])

    for label in sorted(members, key=lambda label: (len(members[label]), label)):
        least_in_training = len(members[label]) - max(1, round(fraction * len(members[label])))
        for number in members[label]:
            if len(chosen) == num_wanted or in_training[label] <= least_in_training:
                break
            if is_spare(number):
                take(number)
    # what rounding leaves over: with boxes first, then without, and only then the last image of a class
    with_boxes = [number for number, labels in enumerate(classes) if labels]
    for number in with_boxes:
        if len(chosen) < num_wanted and is_spare(number):
            take(number)
    for number in (*negatives, *with_boxes):
        if len(chosen) < num_wanted and number not in chosen:
            take(number)
    return chosen
