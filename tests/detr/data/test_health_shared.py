"""What checking says of real and of broken datasets."""

from collections import Counter
from pathlib import Path

import pytest

from detr.data import SplitSource, check_split, find_split, format_faults

# what tools/check_dataset.py exits with on every annotation file of the reference material, and the worst it finds.
# Those directly in annotations/ have no images.
SHARED = {
    "odd-images/annotations/datumaro/image_info_train.json": (2, "lists no categories"),
    "odd-images/annotations/datumaro/instances_train.json": (0, "category_unused"),
    "odd-images/annotations/datumaro/instances_val.json": (0, "category_unused"),
    "odd-images/annotations/datumaro/kaggle_relaxed.json": (1, "annotation_id_zero"),
    "odd-images/annotations/datumaro/labels_val.json": (2, "bbox must be four numbers"),
    "odd-images/annotations/datumaro/panoptic_val.json": (2, "category_id must be an integer"),
    "odd-images/annotations/datumaro/roboflow_val.json": (0, None),
    "odd-images/annotations/derived/bbox_empty.json": (1, "box"),
    "odd-images/annotations/derived/bbox_negative_size.json": (1, "box_negative"),
    "odd-images/annotations/derived/bbox_strings.json": (1, "box"),
    "odd-images/annotations/derived/clean.json": (0, "category_unused"),
    "odd-images/annotations/derived/missing_image_file.json": (1, "image_missing"),
    "odd-images/annotations/derived/no_info_no_licenses.json": (0, "no_info"),
    "odd-images/annotations/derived/no_iscrowd_no_area_no_segmentation.json": (1, "area_missing"),
    "odd-images/annotations/derived/no_width_height.json": (1, "size_missing"),
    "odd-images/annotations/derived/truncated_json.json": (2, "is not valid JSON"),
    "odd-images/annotations/derived/unicode_names.json": (0, "non_ascii_file_name"),
    "odd-images/annotations/derived/unknown_category_id.json": (1, "category_id_unknown"),
    "odd-images/annotations/fce_crowdpose_no_area.json": (1, "area_missing"),
    "odd-images/annotations/fce_string_image_ids.json": (2, "its id must be an integer; got '2299'"),
    "odd-images/annotations/hotcoco_healthcheck_quality.json": (1, "box_cut"),
    "odd-images/annotations/hotcoco_zero_ids.json": (1, "annotation_id_zero"),
    "odd-images/instances_odd.json": (1, "image_unreadable"),
    "bccd/annotations/instances_train.json": (1, "box_zero_size"),
    "bccd/annotations/instances_val.json": (1, "box_zero_size"),
    "coco-mini/annotations/instances_train2017.json": (0, "category_id_gaps"),
    "coco-mini/annotations/instances_val2017.json": (0, "category_unused"),
}


def shared_source(data: Path, name: str) -> tuple[SplitSource, bool]:
    path = data / name
    if name.startswith(("bccd", "coco-mini")):
        images = path.parents[1] / path.stem.removeprefix("instances_")
    else:
        images = path.parent / "images"
    return SplitSource("coco", path, images), images.is_dir()


@pytest.mark.parametrize("name", SHARED)
def test_the_exit_code_of_every_shared_file(shared_dir, name):
    source, with_images = shared_source(shared_dir / "data", name)
    report = check_split(source, with_images=with_images)
    code, words = SHARED[name]
    assert report.exit_code == code, format_faults(report.faults)
    assert with_images == (Path(name).parent != Path("odd-images/annotations"))
    if code == 2:
        assert words in report.faults[-1].problem
    elif words is None:
        assert not report.faults
    else:
        (severity,) = {fault.severity for fault in report.faults if fault.kind == words}
        assert severity == ("note" if code == 0 else "fault")


def test_the_table_of_shared_files_is_complete(shared_dir):
    data = shared_dir / "data"
    folders = ("odd-images", "bccd", "coco-mini")
    assert {str(path.relative_to(data)) for folder in folders for path in (data / folder).rglob("*.json")} == set(
        SHARED
    )


def test_odd_images_are_reported_as_their_manifest_says(shared_dir):
    source, _ = shared_source(shared_dir / "data", "odd-images/instances_odd.json")
    report = check_split(source)
    kinds = {fault.kind for fault in report.faults}
    found = {kind: sorted(Path(f.file).name for f in report.faults if f.kind == kind) for kind in kinds}
    assert found["image_unreadable"] == [
        "apng_chunk_no_fctl.png", "broken.png", "truncated_image.png", "truncated_jpeg.jpg",
    ]  # fmt: skip
    assert found["16_bit"] == ["i_trns.png"]
    assert found["cmyk"] == ["pil_sample_cmyk.jpg"]
    assert len(found["image_size"]) == 5
    assert {"hopper_orientation_5.jpg", "exif_Landscape_3.jpg"} <= set(found["exif_orientation"])
    assert {"icc_profile.png", "1_trns.png", "iss634.webp"} <= set(found["alpha"])
    assert {"dispose_bgnd.gif", "iss634.webp"} <= set(found["animation"])
    ignoring = Counter(fault.kind for fault in check_split(source, apply_exif=False).faults)
    # their annotations give the sizes of the images as stored
    assert ignoring["image_size"] == 0
    assert ignoring["exif_orientation"] == 11


def test_a_whole_root_is_found_and_checked(shared_dir):
    root = shared_dir / "data/bccd"
    train, val = (find_split(split, root=root, annotations=None, images=None) for split in ("train", "val"))
    assert (train.format, train.images.name, val.images.name) == ("coco", "train", "val")
