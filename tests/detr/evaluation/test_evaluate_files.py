"""Annotation and detection files: published values, repaired faults and clear errors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from detr.evaluation import evaluate_files

BACKENDS = ["pycocotools", "faster_coco_eval"]
EDGE_PAIRS = ["val2014_100/bbox", "hotcoco_basic", "fce_small"]

Write = Callable[[str, Any], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_json(name: str, content: Any) -> Path:
        path = tmp_path / name
        path.write_text(json.dumps(content))
        return path

    return write_json


@pytest.fixture(scope="module")
def published(shared_dir: Path) -> dict[str, Any]:
    return json.loads((shared_dir / "data/cocoapi-eval/expected.json").read_text())["pairs"]


def ground_truth_as_detections(annotations: Path) -> list[dict[str, Any]]:
    return [
        {**{key: annotation[key] for key in ("image_id", "category_id", "bbox")}, "score": 0.9}
        for annotation in json.loads(annotations.read_text())["annotations"]
        if not annotation.get("iscrowd")
    ]


def small_dataset() -> dict[str, Any]:
    """Two images; only the required keys."""
    return {
        "images": [{"id": 3}, {"id": 5}],
        "categories": [{"id": 0, "name": "cat"}, {"id": 7, "name": "dog"}],
        "annotations": [
            {"id": 0, "image_id": 3, "category_id": 0, "bbox": [10, 10, 20, 20]},
            {"id": 1, "image_id": 3, "category_id": 7, "bbox": [50, 50, 40, 40]},
            {"id": 2, "image_id": 5, "category_id": 7, "bbox": [5, 5, 100, 100]},
        ],
    }


def one_box(**keys: Any) -> dict[str, Any]:
    return {"id": 9, "image_id": 3, "category_id": 7, "bbox": [0, 0, 1, 1], **keys}


def perfect_results() -> list[dict[str, Any]]:
    return [
        {**{key: annotation[key] for key in ("image_id", "category_id", "bbox")}, "score": 0.9}
        for annotation in small_dataset()["annotations"]
    ]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pair", EDGE_PAIRS)
def test_published_values(shared_dir: Path, published: dict[str, Any], pair: str, backend: str):
    folder, expected = shared_dir / "data/cocoapi-eval", published[pair]
    metrics = evaluate_files(folder / expected["gt"], folder / expected["dt"], backend=backend)
    assert metrics.numbers() == pytest.approx(expected["pycocotools"], abs=1e-6)
    if "pycocotools_per_category_AP" in expected:
        # both list categories by id
        assert list(metrics.per_class.values()) == [
            value if value is None else pytest.approx(value, abs=1e-6)
            for value in expected["pycocotools_per_category_AP"].values()
        ]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_perfect_result_scores_1_although_annotation_ids_start_at_0(shared_dir: Path, backend: str):
    folder = shared_dir / "data/cocoapi-eval/edge"
    metrics = evaluate_files(folder / "hotcoco_zero_gt.json", folder / "hotcoco_zero_dt.json", backend=backend)
    assert pytest.approx(1.0) == metrics.AP
    assert metrics.AR[100] == pytest.approx(1.0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("floats", ["annotations", "detections", "both"])
def test_whole_ids_that_are_floats_are_integers(write: Write, backend: str, floats: str):
    dataset, results = small_dataset(), perfect_results()
    records = [] if floats == "detections" else [record for entries in dataset.values() for record in entries]
    for record in records + ([] if floats == "annotations" else results):
        record |= {key: float(record[key]) for key in ("id", "image_id", "category_id") if key in record}
    metrics = evaluate_files(write("a.json", dataset), write("d.json", results), backend=backend)
    assert pytest.approx(1) == metrics.AP


@pytest.mark.parametrize("backend", BACKENDS)
def test_string_image_ids_are_matched_as_text(shared_dir: Path, write: Write, backend: str):
    folder = shared_dir / "data/cocoapi-eval/edge"
    annotations, detections = folder / "fce_gt_ignore_test.json", folder / "fce_dt_ignore_test.json"
    with_integers = json.loads(annotations.read_text())
    for row in with_integers["images"]:
        row["id"] = int(row["id"])
    for row in with_integers["annotations"]:
        row["image_id"] = int(row["image_id"])
    metrics = evaluate_files(annotations, detections, backend=backend)
    assert metrics == evaluate_files(write("integers.json", with_integers), detections, backend=backend)
    assert metrics.AP > 0.5


@pytest.mark.parametrize(
    ("annotations", "expected"),
    [
        ("coco-mini/annotations/instances_val2017.json", 1.0),
        ("coco-mini/annotations/instances_train2017.json", 1.0),
        # two real boxes have no area, and nothing can be found there
        ("bccd/annotations/instances_train.json", 0.9967),
        ("bccd/annotations/instances_val.json", 0.9966),
    ],
)
def test_ground_truth_as_detections(shared_dir: Path, write: Write, annotations: str, expected: float):
    path = shared_dir / "data" / annotations
    detections = write("detections.json", ground_truth_as_detections(path))
    exact, fast = (evaluate_files(path, detections, backend=backend) for backend in BACKENDS)
    assert pytest.approx(expected, abs=5e-5) == exact.AP
    assert fast.numbers() == pytest.approx(exact.numbers(), abs=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_files_with_only_the_required_keys(write: Write, backend: str, capfd: pytest.CaptureFixture[str]):
    metrics = evaluate_files(write("gt.json", small_dataset()), write("dt.json", perfect_results()), backend=backend)
    assert pytest.approx(1.0) == metrics.AP
    # areas are w * h: 400, 1,600 and 10,000 px
    assert (metrics.APs, metrics.APm, metrics.APl) == pytest.approx((1.0, 1.0, 1.0))
    assert metrics.per_class == pytest.approx({"cat": 1.0, "dog": 1.0})
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_detections_at_all(write: Write, backend: str):
    metrics = evaluate_files(write("gt.json", small_dataset()), write("dt.json", []), backend=backend)
    assert metrics.numbers() == dict.fromkeys(metrics.numbers(), 0.0)
    assert metrics.per_class == {"cat": 0.0, "dog": 0.0}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("detections", [perfect_results(), []], ids=["detections", "nothing"])
def test_no_annotations_at_all(write: Write, backend: str, detections: list[dict[str, Any]]):
    dataset = {**small_dataset(), "annotations": []}
    metrics = evaluate_files(write("gt.json", dataset), write("dt.json", detections), backend=backend)
    assert metrics.numbers() == dict.fromkeys(metrics.numbers(), -1.0)
    assert metrics.to_dict()["per_class"] == {"cat": None, "dog": None}
    assert "-1" not in metrics.format_table()


@pytest.mark.parametrize("backend", BACKENDS)
def test_limits_are_an_image_and_class_and_are_honoured(write: Write, backend: str):
    # 3 + 11 detections of two classes in one image
    def row_of_boxes(category_id: int, count: int) -> list[dict[str, Any]]:
        return [
            {"image_id": 1, "category_id": category_id, "bbox": [30 * index, 60 * category_id, 20, 20]}
            for index in range(count)
        ]

    boxes = [*row_of_boxes(1, 3), *row_of_boxes(2, 11)]
    dataset = {
        "images": [{"id": 1}],
        "categories": [{"id": 1, "name": "three"}, {"id": 2, "name": "eleven"}],
        "annotations": [{**box, "id": index} for index, box in enumerate(boxes)],
    }
    annotations = write("gt.json", dataset)
    detections = write("dt.json", [{**box, "score": 1 - index / 100} for index, box in enumerate(boxes)])
    metrics = evaluate_files(annotations, detections, max_detections=[1, 10], backend=backend)
    assert pytest.approx({1: (1 / 3 + 1 / 11) / 2, 10: (1 + 10 / 11) / 2}) == metrics.AR
    # precision 1 up to recall 10/11, which is 91 of the 101 levels
    assert metrics.per_class == pytest.approx({"three": 1.0, "eleven": 91 / 101})
    names = list(metrics.numbers())
    assert names == ["AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "ARs", "ARm", "ARl"]
    all_found = evaluate_files(annotations, detections, max_detections=[300], backend=backend)
    assert pytest.approx(1.0) == all_found.AP
    assert "AR300" in all_found.to_dict()


def test_categories_that_share_a_name_stay_apart(write: Write):
    dataset = small_dataset()
    dataset["categories"] = [{"id": 0, "name": "cell"}, {"id": 7, "name": "cell"}]
    metrics = evaluate_files(write("gt.json", dataset), write("dt.json", []))
    assert list(metrics.per_class) == ["cell (id 0)", "cell (id 7)"]


def test_metrics_json_is_strict_json_with_the_agreed_keys(write: Write):
    metrics = evaluate_files(write("gt.json", small_dataset()), write("dt.json", perfect_results()))
    read = json.loads(json.dumps(metrics.to_dict(), allow_nan=False))
    assert list(read) == (
        "AP AP50 AP75 APs APm APl AR1 AR10 AR100 ARs ARm ARl per_class".split()  # noqa: SIM905
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_id": 4}, r"image id 4 is not among the 2 images.*first ids: 3, 5"),
        ({"category_id": 1}, r"category_id 1 is not in `categories`.*ids 0, 7"),
        ({"category_id": "7"}, r"category_id '7' is not in `categories`"),
        ({"bbox": [1, 2, float("nan"), 4]}, r": bbox must be four finite numbers"),
        ({"bbox": [1, 2, 3]}, r"bbox must be four finite numbers.*\[1, 2, 3\]"),
        ({"score": None}, r"score must be a finite number; found None"),
    ],
)
def test_a_faulty_detection_is_named(write: Write, change: dict[str, Any], message: str):
    detection = {"image_id": 3, "category_id": 7, "bbox": [1, 2, 3, 4], "score": 0.5, **change}
    with pytest.raises(ValueError, match=rf"detection file .*dt\.json: detection 1 of 1.*{message}"):
        evaluate_files(write("gt.json", small_dataset()), write("dt.json", [detection]))


def test_a_detection_without_score_is_named(write: Write):
    detection = {"image_id": 3, "category_id": 7, "bbox": [1, 2, 3, 4]}
    with pytest.raises(ValueError, match="detection 1 of 1: `score` is missing"):
        evaluate_files(write("gt.json", small_dataset()), write("dt.json", [detection]))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("images", [], "lists no images"),
        ("images", None, "needs a list `images`; found NoneType"),
        ("images", [{"id": 3}, {"id": 5}, {"id": "5"}], "image ids must differ"),
        ("images", [{"id": 3.5}], "image ids must be integers or strings"),
        ("categories", [], "lists no categories"),
        ("categories", [{"id": "7", "name": "dog"}], "category ids must be integers; found '7'"),
        ("categories", [{"id": 7, "name": "a"}, {"id": 7, "name": "b"}], "category id 7 is listed twice"),
        ("annotations", [{"id": 9, "image_id": 3, "category_id": 7}], "annotation 9: bbox must be four"),
        (
            "annotations",
            [{"id": 9, "image_id": 3, "category_id": 8, "bbox": [0, 0, 1, 1]}],
            "annotation 9: category_id 8 is not in `categories`",
        ),
        (
            "annotations",
            [{"id": 9, "image_id": 4, "category_id": 7, "bbox": [0, 0, 1, 1]}],
            "annotation 9: image_id 4 is not in `images`",
        ),
        (
            "annotations",
            [{"id": 9, "image_id": 3, "category_id": 7, "bbox": [0, 0, float("inf"), 1]}],
            "annotation 9: bbox must be four finite numbers",
        ),
        ("annotations", [1, 2], "entry 1 of `annotations` must be an object.*found 1. Give"),
        ("categories", ["a"], "entry 1 of `categories` must be an object.*found 'a'. Give"),
        ("images", [{"id": 3}, None], "entry 2 of `images` must be an object.*found None. Give"),
        ("annotations", [one_box(area="big")], "annotation 9: area must be a finite number.*found 'big'. Correct"),
        ("annotations", [one_box(area=float("nan"))], "annotation 9: area must be a finite number.*found nan"),
        ("annotations", [one_box(area=True)], "annotation 9: area must be a finite number.*found True"),
        ("annotations", [one_box(iscrowd="x")], "annotation 9: iscrowd must be 0 or 1; found 'x'. Correct"),
        ("annotations", [one_box(iscrowd=2)], "annotation 9: iscrowd must be 0 or 1; found 2"),
        ("annotations", [one_box(iscrowd=[])], r"annotation 9: iscrowd must be 0 or 1; found \[\]"),
    ],
)
def test_a_faulty_annotation_file_is_named(write: Write, key: str, value: Any, message: str):
    with pytest.raises(ValueError, match=rf"annotation file .*gt\.json.*{message}"):
        evaluate_files(write("gt.json", {**small_dataset(), key: value}), write("dt.json", []))


def test_area_and_crowd_flag_may_be_null_or_boolean(write: Write):
    dataset = small_dataset()
    for annotation in dataset["annotations"]:
        annotation |= {"area": None, "iscrowd": None}
    dataset["annotations"].append(one_box(iscrowd=True))
    metrics = evaluate_files(write("gt.json", dataset), write("dt.json", perfect_results()))
    # the crowd counts as no object
    assert metrics.AR[100] == pytest.approx(1.0)


def test_encodings(write: Write, tmp_path: Path):
    dataset = small_dataset()
    dataset["categories"][0]["name"] = "vélo"
    plain = evaluate_files(write("gt.json", dataset), write("dt.json", perfect_results()))
    annotations, detections = tmp_path / "mark_gt.json", tmp_path / "mark_dt.json"
    annotations.write_text(json.dumps(dataset, ensure_ascii=False), encoding="utf-8-sig")
    detections.write_text(json.dumps(perfect_results()), encoding="utf-8-sig")
    assert annotations.read_bytes().startswith(b"\xef\xbb\xbf")
    assert evaluate_files(annotations, detections) == plain
    annotations.write_text(json.dumps(dataset, ensure_ascii=False), encoding="latin-1")
    with pytest.raises(ValueError, match=r"mark_gt\.json is not UTF-8: byte \d+ is 0xe9. Save it as UTF-8"):
        evaluate_files(annotations, detections)


def test_wrong_files(write: Write, tmp_path: Path):
    annotations, detections = write("gt.json", small_dataset()), write("dt.json", [])
    with pytest.raises(FileNotFoundError, match=r"no annotation file at .*nowhere\.json"):
        evaluate_files(tmp_path / "nowhere.json", detections)
    with pytest.raises(FileNotFoundError, match=r"is a folder; give the annotation file itself"):
        evaluate_files(tmp_path, detections)
    with pytest.raises(ValueError, match="A list is a detection file"):
        evaluate_files(detections, detections)
    with pytest.raises(ValueError, match="is an annotation file"):
        evaluate_files(annotations, annotations)
    cut = tmp_path / "cut.json"
    cut.write_text(annotations.read_text()[:50])
    with pytest.raises(ValueError, match=r"cut\.json is not valid JSON.*cut while copying"):
        evaluate_files(cut, detections)


def test_settings_are_checked(write: Write, monkeypatch: pytest.MonkeyPatch):
    annotations, detections = write("gt.json", small_dataset()), write("dt.json", [])
    with pytest.raises(ValueError, match="backend=coco is not an evaluation backend"):
        evaluate_files(annotations, detections, backend="coco")
    for limits in ([], [0, 10], [10, 1], [10, 10]):
        with pytest.raises(ValueError, match="max_detections must be ascending"):
            evaluate_files(annotations, detections, max_detections=limits)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install faster-coco-eval"):
        evaluate_files(annotations, detections, backend="faster_coco_eval")
