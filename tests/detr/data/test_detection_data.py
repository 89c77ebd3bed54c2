import json
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from detr.data import DetectionData, EvalTransform, SyntheticDataset

CONFIGS = Path(__file__).resolve().parents[3] / "configs"


def open_data(*overrides: str) -> DetectionData:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = compose(overrides=list(overrides))
    return instantiate(config.data)


@pytest.fixture
def coco_root(tmp_path):
    for split, num_images in (("train", 9), ("val", 5)):
        SyntheticDataset(split, EvalTransform(None, None), num_images=num_images, size=64).write_coco(tmp_path)
    return tmp_path


@pytest.mark.parametrize("transforms", ["detr", "flip_only", "fixed", "native", "lsj", "strong"])
def test_the_synthetic_preset_composes_with_every_transform(transforms):
    data = open_data(
        "+data=synthetic", f"+transforms={transforms}", "data.num_workers=0", "data.size=64", "data.batch_size=2"
    )
    batch = next(iter(data.train_loader(seed=0)))
    assert len(batch) == 2
    batch = next(iter(data.val_loader()))
    expected = {"fixed": (640, 640), "native": (64, 64)}.get(transforms, (800, 800))
    assert batch.images.pixels.shape[2:] == expected
    assert all(target.orig_size == (64, 64) for target in batch.targets)
    assert len(data.val_dataset()) == 200


def test_the_detr_preset_is_the_recipe():
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = compose(overrides=["+transforms=detr"]).transforms
    assert config.train.sizes == list(range(480, 801, 32))
    assert config.train.max_size == config.eval.max_size == 1333
    assert config.train.crop_source_sizes == [400, 500, 600]
    assert config.train.crop_sizes == [384, 600]
    assert config.train.flip_probability == 0.5
    assert config.eval.size == 800


def test_sizes_are_set_from_the_command_line():
    data = open_data(
        "+data=synthetic",
        "+transforms=flip_only",
        "transforms.eval.size=96",
        "transforms.eval.max_size=null",
        "data.num_workers=0",
        "data.pad_to=64",
    )
    assert next(iter(data.train_loader(seed=0))).images.pixels.shape == (8, 3, 128, 128)
    assert next(iter(data.val_loader())).images.sizes.unique().tolist() == [96]


@pytest.mark.parametrize("transforms", ["detr", "fixed", "native"])
def test_preprocessing_is_plain_and_rebuilds_the_transform(transforms):
    data = open_data("+data=synthetic", f"+transforms={transforms}", "data.pad_to=32")
    described = data.preprocessing
    assert json.loads(json.dumps(described)) == described
    assert described["pad_to"] == 32
    assert described["apply_exif"] is True
    assert EvalTransform(**described["resize"]).describe() == described["resize"]
    if transforms == "detr":
        assert described["resize"] == {"size": 800, "max_size": 1333}


def test_a_root_gives_both_splits(coco_root):
    data = open_data("+data=coco", "+transforms=native", f"data.root={coco_root}", "data.num_workers=0")
    assert len(data.train_dataset()) == 9
    assert len(data.val_dataset()) == 5
    assert data.class_table.names == ("circle", "square", "triangle", "cross", "ring", "star")
    assert data.train_dataset() is data.train_dataset()
    seen = [target.image_id for batch in data.val_loader() for target in batch.targets]
    assert seen == [1, 2, 3, 4, 5]


def test_paths_are_given_one_by_one(coco_root):
    data = open_data(
        "+data=coco",
        "+transforms=native",
        f"data.train.annotations={coco_root}/annotations/instances_train.json",
        f"data.train.images={coco_root}/train",
        f"data.val.annotations={coco_root}/annotations/instances_val.json",
        f"data.val.images={coco_root}/val",
    )
    assert (len(data.train_dataset()), len(data.val_dataset())) == (9, 5)


def test_evaluation_touches_no_training_file(coco_root):
    (coco_root / "annotations/instances_train.json").unlink()
    data = open_data("+data=coco", "+transforms=native", f"data.root={coco_root}", "data.num_workers=0")
    assert sum(len(batch) for batch in data.val_loader()) == 5
    assert data.class_table.num_classes == 6
    with pytest.raises(FileNotFoundError, match="no train split"):
        data.train_dataset()


def test_training_touches_no_validation_file_until_it_is_asked_for(coco_root):
    (coco_root / "annotations/instances_val.json").write_text("{")
    data = open_data("+data=coco", "+transforms=native", f"data.root={coco_root}")
    assert len(data.train_dataset()) == 9
    assert data.class_table.num_classes == 6
    with pytest.raises(ValueError, match="not valid JSON"):
        data.val_dataset()


def test_the_ground_truth_needs_no_images(coco_root):
    file = coco_root / "annotations/instances_val.json"
    data = open_data("+data=coco", "+transforms=native", f"data.val.annotations={file}")
    assert data.val_ground_truth()["annotations"] == json.loads(file.read_text())["annotations"]
    with_root = open_data("+data=coco", "+transforms=native", f"data.root={coco_root}")
    before = with_root.val_ground_truth()
    with_root.val_dataset()
    assert with_root.val_ground_truth() == before
    synthetic = open_data("+data=synthetic", "+transforms=native", "data.num_val_images=4")
    assert synthetic.val_ground_truth() == synthetic.val_dataset().coco_ground_truth()


def test_splits_with_different_categories_are_an_error_that_lists_them(coco_root):
    file = coco_root / "annotations/instances_val.json"
    content = json.loads(file.read_text())
    content["categories"][0]["name"] = "disc"
    file.write_text(json.dumps(content))
    data = open_data("+data=coco", "+transforms=native", f"data.root={coco_root}")
    data.train_dataset()
    with pytest.raises(ValueError, match=r"Only in train: \[\(1, 'circle'\)\]; only in val: \[\(1, 'disc'\)\]"):
        data.val_dataset()


def test_the_label_map_sets_the_number_of_classes(coco_root):
    data = open_data("+data=coco", "+transforms=native", f"data.root={coco_root}", "data.label_map=category_id")
    assert data.class_table.names[:2] == ("", "circle")
    assert data.class_table.num_classes == 7


def test_no_path_at_all_says_which_keys_to_set():
    data = open_data("+data=coco", "+transforms=native")
    with pytest.raises(ValueError, match=r"Set data\.root, or data.train.annotations and data.train.images"):
        data.train_dataset()


def test_validation_can_have_its_own_batch_size(coco_root):
    data = open_data(
        "+data=coco", "+transforms=native", f"data.root={coco_root}", "data.val_batch_size=1", "data.num_workers=0"
    )
    assert [len(batch) for batch in data.val_loader()] == [1] * 5
    assert [len(batch) for batch in data.train_loader(seed=0)] == [2] * 4


def test_coco_mini_comes_out_of_the_loader(shared_dir):
    data = open_data(
        "+data=coco",
        "+transforms=flip_only",
        "transforms.eval.size=128",
        "transforms.eval.max_size=200",
        f"data.root={shared_dir}/data/coco-mini",
        "data.label_map=category_id",
        "data.num_workers=0",
        "data.pad_to=32",
    )
    assert data.class_table.num_classes == 91
    batch = next(iter(data.train_loader(seed=0, rank=1, world_size=2)))
    assert batch.images.pixels.dtype == torch.uint8
    assert all(side % 32 == 0 for side in batch.images.pixels.shape[2:])
    assert len(data.val_ground_truth()["images"]) == 40
    assert sum(annotation["iscrowd"] for annotation in data.val_ground_truth()["annotations"]) == 5


@pytest.mark.parametrize("change", ["nothing", "an image less", "another order"])
def test_fingerprints_tell_states_of_a_dataset_apart(coco_root, change):
    def train_fingerprint() -> str:
        return open_data("+data=coco", "+transforms=native", f"data.root={coco_root}").fingerprints()["train"]

    before = train_fingerprint()
    [path] = (coco_root / "annotations").glob("*train*.json")
    content = json.loads(path.read_text())
    first = content["images"][0]
    # order counts, so it must show in the shapes
    first["height"] += 1
    path.write_text(json.dumps(content))
    wider = train_fingerprint()
    assert wider != before
    if change == "an image less":
        content["images"] = content["images"][1:]
        content["annotations"] = [row for row in content["annotations"] if row["image_id"] != first["id"]]
    elif change == "another order":
        other = content["images"][-1]
        first["height"], other["height"] = other["height"], first["height"]
    path.write_text(json.dumps(content))
    assert (train_fingerprint() == wider) == (change == "nothing")
