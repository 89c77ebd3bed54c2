"""The parts of a dataset that nobody has divided: found and read once for both."""

from collections.abc import Callable
from pathlib import Path

from detr.data.annotation_entries import parse_annotations
from detr.data.annotation_file import refuse_or_log
from detr.data.annotations import CocoAnnotations
from detr.data.faults import Fault, FaultyAnnotations
from detr.data.holdout import divide
from detr.data.layouts import Split, SplitSource
from detr.data.sources import read_source


class Parts:
    """Both splits of such a dataset, read when the first of them is asked for.

    Args:
        find: `find(with_images=...)` says where both parts are; see `detr.data.own_split.find_parts`.
        apply_exif: See `read_image`.
        faulty: What to do about faulty entries: "error" or "drop", of a part when it is asked for.
    """

    def __init__(
        self, find: Callable[..., dict[Split, SplitSource]], *, apply_exif: bool, faulty: FaultyAnnotations
    ) -> None:
        self._find = find
        self._apply_exif = apply_exif
        self._faulty = faulty
        self._parts: dict[Split, tuple[CocoAnnotations, list[Fault]]] = {}
        # where they are; None: they were read by a caller who needed no images
        self._images: Path | None = None

    def load(self, split: Split, *, with_images: bool, need_annotations: bool = True) -> tuple[CocoAnnotations, Path]:
        """The annotations of a split, and its image folder.

        Args:
            split: "train" or "val".
            with_images: Whether the images must be found too.
            need_annotations: A file without annotations is an error either way: nothing could be divided by class.

        Raises:
            FileNotFoundError: See `find_parts`.
            ValueError: See `find_parts` and `load_coco_annotations`; or the fraction leaves a split without an
                image.
        """
        if not self._parts or (with_images and self._images is None):
            self._read(with_images)
        annotations, faults = self._parts[split]
        refuse_or_log(faults, annotations.path, self._faulty)
        return annotations, self._images or Path()

    def _read(self, with_images: bool) -> None:
        source = self._find(with_images=with_images)["val"]
        assert source.part is not None
        content, faults = read_source(source, other=None, apply_exif=self._apply_exif)
        annotations, entry_faults = parse_annotations(content, source.annotations)
        self._parts = divide(annotations, [*faults, *entry_faults], source.part.holdout)
        self._images = source.images if with_images else None
