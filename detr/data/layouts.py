"""Where a COCO-format dataset keeps its annotation files and images."""

from pathlib import Path
from typing import Literal

Split = Literal["train", "val"]

# instances_train2017.json beside train2017/ is COCO's own; without a year is what most exports write
_YEARS = ("2017", "2014", "")


def find_coco_split(
    split: Split,
    *,
    root: str | Path | None,
    annotations: str | Path | None,
    images: str | Path | None,
) -> tuple[Path, Path]:
    """The annotation file and the image folder of a split.

    Under `root` these are looked for, with the same year 2017, 2014 or none in both, as in train2017:
    annotations/instances_<split><year>.json, and <split><year>/ or images/<split><year>/.

    Args:
        split: "train" or "val".
        root: The folder of the dataset; not needed where both others are given.
        annotations: The annotation file, if it is not to be looked for.
        images: The image folder, if it is not to be looked for.

    Raises:
        ValueError: Neither a root nor a path is given, or the root holds several layouts.
        FileNotFoundError: The root does not exist or holds none.
    """
    if annotations is not None and images is not None:
        return Path(annotations).expanduser(), Path(images).expanduser()
    if root is None:
        missing = [
            f"data.{split}.{name}" for name, path in (("annotations", annotations), ("images", images)) if path is None
        ]
        raise ValueError(f"where is the {split} split? Set data.root, or {' and '.join(missing)}")
    root = Path(root).expanduser()
    if not root.is_dir():
        raise FileNotFoundError(f"data.root={root} is not a folder ({root.absolute()}). Correct the path")
    candidates = [
        (
            root / "annotations" / f"instances_{split}{year}.json" if annotations is None else Path(annotations),
            folder if images is None else Path(images),
        )
        for year in _YEARS
        for folder in (root / f"{split}{year}", root / "images" / f"{split}{year}")
    ]
    candidates = list(dict.fromkeys((file.expanduser(), folder.expanduser()) for file, folder in candidates))
    found = [(file, folder) for file, folder in candidates if file.is_file() and folder.is_dir()]
    if len(found) == 1:
        return found[0]
    remedy = f"Set data.{split}.annotations and data.{split}.images"
    if found:
        listed = "\n  ".join(f"{file} with {folder}" for file, folder in found)
        raise ValueError(f"data.root={root} holds {len(found)} layouts of the {split} split:\n  {listed}\n{remedy}")
    tried = "\n  ".join(
        f"{file} ({_state(file.is_file())}) with {folder}/ ({_state(folder.is_dir())})" for file, folder in candidates
    )
    raise FileNotFoundError(
        f"no {split} split under data.root={root}; tried:\n  {tried}\n{remedy}, or correct data.root"
    )


def _state(present: bool) -> str:
    return "found" if present else "missing"
