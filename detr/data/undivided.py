"""Where a dataset that nobody has divided into training and validation keeps its annotations and images."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from detr.data.annotation_file import read_json
from detr.data.image_files import leaves_folder
from detr.data.images import IMAGE_SUFFIXES
from detr.data.layouts import SplitSource
from detr.data.yolo import NAMES_FILES

# images that are looked for to tell which folder a COCO file names them in
_NUM_TRIED = 20
# text files beside images that are no labels
_NO_LABELS = (*NAMES_FILES, "train.txt", "val.txt", "test.txt")


def undivided_sources(root: Path) -> list[SplitSource]:
    """All datasets of one part that a folder holds, in the layouts of docs/data.md.

    COCO: the JSON files with `images`, `annotations` and `categories` in the folder and in annotations/, as of CVAT
    (annotations/instances_default.json), Label Studio (result.json) and FiftyOne (labels.json). Their image folder is
    that which holds most of the first images. YOLO: names, and text files in labels/, obj_train_data/ (CVAT) or beside
    the images. Pascal VOC: XML files in Annotations/ or beside the images; ImageSets/Main/trainval.txt counts.

    Args:
        root: The folder.
    """
    return list(dict.fromkeys((*_coco_sources(root), *_yolo_sources(root), *_voc_sources(root))))


def _coco_sources(root: Path) -> Iterator[SplitSource]:
    for file in (*sorted(root.glob("*.json")), *sorted((root / "annotations").glob("*.json"))):
        try:
            content = read_json(file)
        except ValueError:
            continue  # of another kind; such files lie about in many exports
        if all(isinstance(content.get(key), list) for key in ("images", "annotations", "categories")):
            yield SplitSource("coco", file, _image_folder(root, file, content["images"]), content=content)


def _image_folder(root: Path, file: Path, images: list[Any]) -> Path:
    """The folder with the most of the first images; the first of several, `root` if none has any."""
    given = [record.get("file_name") for record in images[:_NUM_TRIED] if isinstance(record, dict)]
    names = [name for name in given if isinstance(name, str) and name and not leaves_folder(name)]
    places = ("images/default", "images", "JPEGImages", "data", file.stem)
    folders = [root, *(root / place for place in places), file.parent]
    return max(folders, key=lambda folder: sum((folder / name).is_file() for name in names))


def _yolo_sources(root: Path) -> Iterator[SplitSource]:
    names = next((root / name for name in NAMES_FILES if (root / name).is_file()), None)
    if names is None:
        return
    pairs = [(root / "images", root / "labels"), (root / "images", root / "images"), (root, root)]
    if not any(root.glob("obj_[Vv]al*_data")):
        pairs.append((root / "obj_train_data", root / "obj_train_data"))
    for images, labels in pairs:
        if images.is_dir() and labels.is_dir() and _are_labels(images, labels):
            yield SplitSource("yolo", labels, images, names=names)


def _are_labels(images: Path, labels: Path) -> bool:
    """Whether the text files of a folder, subfolders left out, belong to images of another."""
    stems = {path.stem for path in images.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES}
    return any(file.stem in stems for file in labels.glob("*.txt") if file.name not in _NO_LABELS)


def _voc_sources(root: Path) -> Iterator[SplitSource]:
    listing = root / "ImageSets" / "Main" / "trainval.txt"
    pairs = (
        *((root / "Annotations", root / name) for name in ("JPEGImages", "images")),
        (root / "annotations", root / "images"),
        (root, root),
    )
    for annotations, images in pairs:
        if not images.is_dir() or not any(_voc_files(annotations)):
            continue
        yield SplitSource("voc", annotations, images, listing=listing if listing.is_file() else None)


def _voc_files(folder: Path) -> Iterator[Path]:
    """XML files; annotations.xml is CVAT's own format."""
    return (file for file in folder.glob("*.xml") if file.name != "annotations.xml")
