"""Where a dataset keeps its annotations and images."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from detr.data.yolo import NAMES_FILES

Split = Literal["train", "val"]
Format = Literal["coco", "yolo", "voc"]

# instances_train2017.json beside train2017/ is COCO's own; without a year is what most exports write
_YEARS = ("2017", "2014", "")
# what exporters call the splits; Roboflow says valid
_FOLDERS: dict[Split, tuple[str, ...]] = {"train": ("train",), "val": ("val", "valid", "validation")}
# annotation files that lie among the images of a split
_JSON_BESIDE = ("_annotations.coco.json", "annotations.json", "labels.json", "instances.json", "coco.json")


@dataclass(frozen=True)
class Part:
    """What a split is of a dataset that nobody has divided; see `detr.data.holdout`.

    Attributes:
        split: Which split.
        holdout: The fraction of the images that validates, in (0, 1).
    """

    split: Split
    holdout: float

    def __str__(self) -> str:
        return f"the {self.split} part of data.holdout={self.holdout}"


@dataclass(frozen=True)
class SplitSource:
    """Where a split is.

    Attributes:
        format: How its annotations are written.
        annotations: "coco": the JSON file; "yolo": the folder of text files; "voc": the folder of XML files.
        images: The folder that the images' file names are relative to.
        names: "yolo": the file with the class names.
        listing: "voc", "yolo": the text file that lists the images of the split; None: all in the folder.
        part: Which part of these images the split is; None: all of them.
        content: "coco": what the JSON file holds, where telling that it is one took reading it; None: not read yet.
    """

    format: Format
    annotations: Path
    images: Path
    names: Path | None = None
    listing: Path | None = None
    part: Part | None = None
    content: dict[str, Any] | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        extra = "".join(f", {each}" for each in (self.names, self.listing, self.part) if each is not None)
        return f"{self.format}: {self.annotations} with {self.images}{extra}"


def find_split(
    split: Split, *, root: str | Path | None, annotations: str | Path | None, images: str | Path | None
) -> SplitSource:
    """A split in any of the layouts of docs/data.md: COCO JSON, YOLO text files or Pascal VOC XML.

    Args:
        split: "train" or "val".
        root: The folder of the dataset.
        annotations: A COCO annotation file, if it is not to be looked for.
        images: Its image folder, if it is not to be looked for.

    Raises:
        ValueError: Neither a root nor a path is given, or the root holds several layouts.
        FileNotFoundError: The root does not exist or holds none.
    """
    if annotations is not None or images is not None:
        return SplitSource("coco", *find_coco_split(split, root=root, annotations=annotations, images=images))
    folder = _existing_root(split, root, ["annotations", "images"])
    found = split_sources(split, folder)
    if len(found) == 1:
        return found[0]
    remedy = f"Set data.{split}.annotations and data.{split}.images to a COCO file and its folder"
    if found:
        text = "\n  ".join(map(str, found))
        raise ValueError(f"data.root={folder} holds {len(found)} layouts of the {split} split:\n  {text}\n{remedy}")
    names = ", ".join(sorted(path.name + "/" * path.is_dir() for path in folder.iterdir())[:20]) or "nothing"
    raise FileNotFoundError(
        f"no {split} split under data.root={folder}, which holds {names}. Looked for COCO JSON "
        f"(annotations/instances_{split}*.json, {split}/_annotations.coco.json, {split}.json ...), YOLO "
        f"({split}/images with {split}/labels, images/{split} with labels/{split}, and data.yaml or classes.txt) and "
        f"Pascal VOC (Annotations/, JPEGImages/ and ImageSets/Main/{split}.txt, or XML files in {split}/). {remedy}, "
        "or correct data.root"
    )


def split_sources(split: Split, root: Path) -> list[SplitSource]:
    """All that a folder holds of a split; see `find_split`."""
    sources = (*_coco_sources(split, root), *_yolo_sources(split, root), *_voc_sources(split, root))
    return list(dict.fromkeys(sources))


def find_coco_split(
    split: Split,
    *,
    root: str | Path | None,
    annotations: str | Path | None,
    images: str | Path | None,
) -> tuple[Path, Path]:
    """The annotation file and the image folder of a split in COCO's own layout.

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
    missing = [name for name, path in (("annotations", annotations), ("images", images)) if path is None]
    folder = _existing_root(split, root, missing)
    candidates = [
        (file if annotations is None else Path(annotations), place if images is None else Path(images))
        for file, place in _coco_candidates(split, folder)
    ]
    candidates = list(dict.fromkeys((file.expanduser(), place.expanduser()) for file, place in candidates))
    found = [(file, place) for file, place in candidates if file.is_file() and place.is_dir()]
    if len(found) == 1:
        return found[0]
    remedy = f"Set data.{split}.annotations and data.{split}.images"
    if found:
        text = "\n  ".join(f"{file} with {place}" for file, place in found)
        raise ValueError(f"data.root={folder} holds {len(found)} layouts of the {split} split:\n  {text}\n{remedy}")
    tried = "\n  ".join(
        f"{file} ({_state(file.is_file())}) with {place}/ ({_state(place.is_dir())})" for file, place in candidates
    )
    raise FileNotFoundError(
        f"no {split} split under data.root={folder}; tried:\n  {tried}\n{remedy}, or correct data.root (data=custom "
        "finds other layouts too)"
    )


def _existing_root(split: Split, root: str | Path | None, missing: list[str]) -> Path:
    if root is None:
        keys = " and ".join(f"data.{split}.{name}" for name in missing)
        raise ValueError(f"where is the {split} split? Set data.root, or {keys}")
    folder = Path(root).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(f"data.root={folder} is not a folder ({folder.absolute()}). Correct the path")
    return folder


def _coco_candidates(split: Split, root: Path) -> Iterator[tuple[Path, Path]]:
    for year in _YEARS:
        for folder in (root / f"{split}{year}", root / "images" / f"{split}{year}"):
            yield root / "annotations" / f"instances_{split}{year}.json", folder


def _coco_sources(split: Split, root: Path) -> Iterator[SplitSource]:
    """COCO's own layout, a JSON file among the images, or one named after the split."""
    pairs = list(_coco_candidates(split, root))
    for name in _FOLDERS[split]:
        pairs += [(root / name / file, root / name) for file in _JSON_BESIDE]
        for file in (root / f"{name}.json", root / "annotations" / f"{name}.json"):
            folders = (root / name, root / "images" / name, root / "images")
            pairs += [(file, folder) for folder in folders if folder.is_dir()][:1]
    for file, folder in pairs:
        if file.is_file() and folder.is_dir():
            yield SplitSource("coco", file, folder)


def _yolo_sources(split: Split, root: Path) -> Iterator[SplitSource]:
    """A names file, and folders of images and text files."""
    names = next((root / name for name in NAMES_FILES if (root / name).is_file()), None)
    if names is None:
        return
    named = _yaml_value(split, names)
    if named is not None and named.suffix == ".txt":
        # what the list leaves out is no part of the split, whatever folders there are
        yield SplitSource("yolo", root, root, names=names, listing=_yaml_listing(split, names, named))
        return
    pairs = []
    for name in _FOLDERS[split]:
        pairs.append((root / "images" / name, root / "labels" / name))
        pairs.append((root / name / "images", root / name / "labels"))
        pairs.append((root / name, root / name))
    folder = None if named is None else _beside(names, named, Path.is_dir)
    if folder is not None and "images" in folder.parts:
        parts = list(folder.parts)
        parts[len(parts) - 1 - parts[::-1].index("images")] = "labels"
        pairs.append((folder, Path(*parts)))
    for images, labels in dict.fromkeys(pairs):
        # beside the images, not in subfolders: those are another layout's
        files = labels.glob("*.txt") if images == labels else labels.rglob("*.txt")
        if images.is_dir() and labels.is_dir() and next(files, None) is not None:
            yield SplitSource("yolo", labels, images, names=names)


def _yaml_value(split: Split, names: Path) -> Path | None:
    """What a YOLO YAML file names for a split: a folder of images, or a text file that lists them."""
    if names.suffix not in (".yaml", ".yml"):
        return None
    try:
        content = yaml.safe_load(names.read_text(encoding="utf-8-sig"))
    except yaml.YAMLError:
        return None  # named when the names are read
    value = content.get(split) if isinstance(content, dict) else None
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, list) and value:
        raise ValueError(
            f"{names} names {len(value)} places for the {split} split ({', '.join(map(str, value))}), of which only "
            f"one can be read. Name one folder, or a text file that lists the images of all ({split}: {split}.txt)"
        )
    return Path(value) if isinstance(value, str) and value else None


def _yaml_listing(split: Split, names: Path, named: Path) -> Path:
    listing = _beside(names, named, Path.is_file)
    if listing is None:
        raise FileNotFoundError(
            f"{names} says that {named} lists the images of the {split} split, but there is no such file beside it. "
            f"Put it there, or name the folder of the images instead ({split}: images/{split})"
        )
    return listing


def _beside(names: Path, named: Path, exists: Callable[[Path], bool]) -> Path | None:
    """The path that a YAML file names, as it is or beside the file."""
    # Roboflow writes ../train/images for a folder beside the file
    parts = [part for part in named.parts if part not in ("..", ".", named.anchor)]
    return next((path for path in (named, names.parent.joinpath(*parts)) if exists(path)), None)


def _voc_sources(split: Split, root: Path) -> Iterator[SplitSource]:
    """Pascal VOC's own folders, or XML files in a folder named after the split."""
    for name in _FOLDERS[split]:
        listing = root / "ImageSets" / "Main" / f"{name}.txt"
        if listing.is_file() and (root / "Annotations").is_dir() and (root / "JPEGImages").is_dir():
            yield SplitSource("voc", root / "Annotations", root / "JPEGImages", listing=listing)
        pairs = (
            (root / name, root / name),
            (root / name / "annotations", root / name / "images"),
            (root / name / "Annotations", root / name / "JPEGImages"),
            (root / "annotations" / name, root / "images" / name),
            (root / "Annotations" / name, root / "JPEGImages" / name),
        )
        for annotations, images in pairs:
            if annotations.is_dir() and images.is_dir() and next(annotations.glob("*.xml"), None) is not None:
                yield SplitSource("voc", annotations, images)


def _state(present: bool) -> str:
    return "found" if present else "missing"
