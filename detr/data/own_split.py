"""Finds the splits of one's own dataset: those it has, or those that are held out."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from detr.data.layouts import Part, Split, SplitSource, find_split, split_sources
from detr.data.undivided import undivided_sources

Paths = Mapping[str, str | None]
"""`annotations` (a COCO file) and `images` (its folder) of a split; None where they are to be looked for."""


def find_own_split(
    split: Split, *, root: str | Path | None, train: Paths, val: Paths, with_images: bool = True
) -> SplitSource:
    """A split in the layouts of `find_split`; where it is not there, the error names `data.holdout` if that would do.

    Args:
        split: "train" or "val".
        root: The folder of the dataset.
        train: Where the training split is, if it is not to be looked for.
        val: Likewise, the validation split.
        with_images: Whether the images must be found too where a file of annotations is given.

    Raises:
        ValueError: Neither a root nor a path is given, or the root holds several layouts.
        FileNotFoundError: The root does not exist or holds none.
    """
    given = train if split == "train" else val
    if not with_images and given["annotations"] is not None:
        return SplitSource("coco", Path(given["annotations"]).expanduser(), Path())
    try:
        return find_split(split, root=root, **given)
    except (FileNotFoundError, ValueError) as error:
        sources = [] if _val_sources(root, val) else _whole_sources(root, train)
        if len(sources) != 1:
            raise
        message = f"{error}. Or hold a tenth of {sources[0]} out for validation: data.holdout=0.1"
        if isinstance(error, FileNotFoundError):
            raise FileNotFoundError(message) from error
        raise ValueError(message) from error


def find_parts(
    *, root: str | Path | None, train: Paths, val: Paths, holdout: float, with_images: bool = True
) -> dict[Split, SplitSource]:
    """Both parts of a dataset that is not divided, which is looked for once.

    Args:
        root: The folder of the dataset.
        train: Where all images are, if they are not to be looked for.
        val: Where a validation split is, which there must not be.
        holdout: The fraction of the images to validate on, in (0, 1).
        with_images: Whether the images must be found too where a file of annotations is given.

    Raises:
        ValueError: `holdout` is no such fraction or not needed, neither a root nor a path is given, or the root holds
            several datasets.
        FileNotFoundError: The root does not exist or holds none.
    """
    if isinstance(holdout, bool) or not isinstance(holdout, int | float) or not 0 < holdout < 1:
        raise ValueError(
            f"data.holdout must be a fraction of the images between 0 and 1, such as 0.1; got {holdout!r}. null is "
            "for data with a validation split"
        )
    present = _val_sources(root, val)
    if present:
        raise ValueError(
            f"data.holdout={holdout} is for data without a validation split, and here is one: {present[0]}. Set "
            "data.holdout=null to validate on it, or move it away"
        )
    whole = _whole(root, train, with_images)
    return {
        "train": replace(whole, part=Part("train", float(holdout))),
        "val": replace(whole, part=Part("val", float(holdout))),
    }


def _whole(root: str | Path | None, train: Paths, with_images: bool) -> SplitSource:
    """All images of a dataset without a validation split."""
    if not with_images and train["annotations"] is not None:
        return SplitSource("coco", Path(train["annotations"]).expanduser(), Path())
    sources = _whole_sources(root, train)
    if len(sources) == 1:
        return sources[0]
    if not sources:
        return find_split("train", root=root, **train)  # says what is missing
    text = "\n  ".join(map(str, sources))
    raise ValueError(
        f"data.root={root} holds {len(sources)} datasets to hold images out of:\n  {text}\nSet "
        "data.train.annotations and data.train.images to a COCO file and its folder, or move the others away"
    )


def _val_sources(root: str | Path | None, val: Paths) -> list[str]:
    """What there is of a validation split, for messages."""
    given = [f"data.val.{key}={path}" for key, path in val.items() if path is not None]
    folder = _folder(root)
    return given or ([] if folder is None else [str(source) for source in split_sources("val", folder)])


def _whole_sources(root: str | Path | None, train: Paths) -> list[SplitSource]:
    """The training split if there is one, else what nobody has divided."""
    folder = _folder(root)
    if any(path is not None for path in train.values()):
        if folder is None and None in train.values():
            return []
        return [find_split("train", root=root, **train)]
    return [] if folder is None else split_sources("train", folder) or undivided_sources(folder)


def _folder(root: str | Path | None) -> Path | None:
    folder = None if root is None else Path(root).expanduser()
    return folder if folder is not None and folder.is_dir() else None
