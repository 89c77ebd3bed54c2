import gc
import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from detr.data import CocoDataset, EvalTransform, load_coco_annotations
from detr.structures import ClassTable

KEEP_SIZE = EvalTransform(None, None)


@pytest.fixture
def open_dataset(write_dataset):
    def open_content(content, *, training=True, **options):
        return CocoDataset(*write_dataset(content), KEEP_SIZE, training=training, **options)

    return open_content


def test_an_item_is_the_image_with_normalised_boxes(open_dataset, content):
    dataset = open_dataset(content)
    image, target = dataset[1]
    assert np.array_equal(image.permute(1, 2, 0).numpy(), np.asarray(Image.open(dataset.image_path(1))))
    assert image.dtype == torch.uint8
    assert target.image_id == 3
    assert target.orig_size == (50, 20)
    assert target.labels.tolist() == [1]
    # [1, 2, 10, 20] in an image 20 wide and 50 high
    torch.testing.assert_close(target.boxes, torch.tensor([[6 / 20, 12 / 50, 10 / 20, 20 / 50]]))
    assert target.boxes.dtype == torch.float32


def test_crowds_are_no_targets_but_are_in_the_ground_truth(open_dataset, content):
    dataset = open_dataset(content)
    _, target = dataset[0]
    assert target.labels.tolist() == [2, 0]
    assert [a["iscrowd"] for a in dataset.coco_ground_truth()["annotations"]] == [0, 1, 0, 0]
    assert dataset.counts.num_crowd == 1


def test_images_without_boxes_stay_as_negatives(open_dataset, content):
    dataset = open_dataset(content)
    assert len(dataset) == 3
    _, target = dataset[2]
    assert target.image_id == 12
    assert target.boxes.shape == (0, 4)
    assert target.labels.shape == (0,)
    assert dataset.counts.num_images_without_targets == 1


def test_labels_can_be_the_category_ids(open_dataset, content):
    dataset = open_dataset(content, label_map="category_id")
    assert dataset.class_table.num_classes == 91
    assert dataset[0][1].labels.tolist() == [90, 1]
    contiguous = CocoDataset(load_coco_annotations(dataset.annotations.path), dataset._images, KEEP_SIZE, training=True)
    assert contiguous.class_table == ClassTable(("person", "plane", "zebra"), (1, 5, 90))


@pytest.mark.parametrize("ids", [(1, 5, 90), (0, 1, 2), (10, 9, 8), (3, 0, 77)])
def test_every_label_leads_back_to_its_category(open_dataset, content, ids):
    renamed = dict(zip((90, 1, 5), ids, strict=True))
    for entry, key in [(c, "id") for c in content["categories"]] + [(a, "category_id") for a in content["annotations"]]:
        entry[key] = renamed[entry[key]]
    for label_map in ("contiguous", "category_id"):
        dataset = open_dataset(content, label_map=label_map)
        zebra, person = dataset[0][1].labels.tolist()
        assert dataset.class_table.names[zebra] == "zebra"
        assert dataset.class_table.category_ids[zebra] == ids[0]
        assert dataset.class_table.names[person] == "person"
        assert dataset.class_table.category_ids[person] == ids[1]


def test_boxes_without_area_are_dropped_and_boxes_beyond_the_edge_cut_both_counted(open_dataset, content):
    content["annotations"] = [
        {"id": i, "image_id": 7, "category_id": 1, "bbox": box}
        for i, box in enumerate(
            [
                [10, 10, -5, 5],
                [0, 0, 1e9, 5],
                [10, 10, 0, 4],
                [40, 0, 5, 5],
                [-9, 3, 8, 8],
                [30, 20, 10.3, 10],
                [5, 5, 3, 3],
            ]
        )
    ]
    dataset = open_dataset(content)
    sides = torch.tensor([40, 30, 40, 30])
    boxes = dataset[0][1].boxes * sides
    torch.testing.assert_close(
        boxes, torch.tensor([[20.0, 2.5, 40, 5], [35, 25, 10, 10], [6.5, 6.5, 3, 3]]), rtol=0, atol=1e-4
    )
    assert dataset.counts.num_without_area == 4
    # a third of a pixel beyond the edge is rounding
    assert dataset.counts.num_clipped == 1
    assert dataset.counts.num_targets == 3
    # the evaluator gets the file's boxes: dropping some would give another AP than pycocotools on the file
    assert len(dataset.coco_ground_truth()["annotations"]) == 7
    assert "4 boxes without area dropped, 1 boxes cut" in str(dataset.counts)


def test_missing_sizes_are_read_from_the_files(write_dataset, content):
    annotations, images = write_dataset(content)
    for image in content["images"][:2]:
        del image["width"], image["height"]
    annotations.write_text(json.dumps(content))
    dataset = CocoDataset(annotations, images, KEEP_SIZE, training=True)
    assert dataset.counts.num_sizes_from_files == 2
    assert dataset[1][1].orig_size == (50, 20)
    assert [image["width"] for image in dataset.coco_ground_truth()["images"]] == [40, 20, 24]


def test_missing_image_files_are_one_error_that_lists_the_first_ten(write_dataset, content):
    content["images"] += [{"id": 100 + i, "file_name": f"extra{i:02}.png", "width": 8, "height": 8} for i in range(15)]
    annotations, images = write_dataset(content)
    for i in range(1, 13):
        (images / f"extra{i:02}.png").unlink()
    with pytest.raises(FileNotFoundError, match="12 of the 18 images") as error:
        CocoDataset(annotations, images, KEEP_SIZE, training=True)
    assert "extra10.png" in str(error.value)
    assert "extra11.png" not in str(error.value)


def test_a_missing_image_folder_is_named(write_dataset, content):
    annotations, images = write_dataset(content)
    shutil.rmtree(images)
    with pytest.raises(FileNotFoundError, match=f"no image folder {images}"):
        CocoDataset(annotations, images, KEEP_SIZE, training=True)


@pytest.mark.parametrize("name", ["../secret.png", "sub/../../secret.png", "/etc/passwd", "..", "a\0.png"])
def test_file_names_cannot_leave_the_image_folder(write_dataset, content, name):
    annotations, images = write_dataset(content)
    content["images"][0]["file_name"] = name
    annotations.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="outside the image folder"):
        CocoDataset(annotations, images, KEEP_SIZE, training=True)


def test_a_name_that_stays_inside_is_fine_however_it_is_spelt(write_dataset, content):
    annotations, images = write_dataset(content)
    content["images"][0]["file_name"] = "./sub/..//a.png"
    annotations.write_text(json.dumps(content))
    assert CocoDataset(annotations, images, KEEP_SIZE, training=True)[0][0].shape == (3, 30, 40)


def test_training_needs_a_box_and_evaluation_does_not(open_dataset, content):
    content["annotations"] = content["annotations"][2:3]
    with pytest.raises(ValueError, match=r"no box to train on \(3 images, 0 boxes, 3 images without boxes"):
        open_dataset(content)
    assert len(open_dataset(content, training=False)) == 3
    del content["annotations"]
    with pytest.raises(ValueError, match="'annotations'; found nothing"):
        open_dataset(content)
    assert open_dataset(content, training=False)[0][1].labels.shape == (0,)


def test_a_photo_turned_by_exif_is_upright_and_its_boxes_fit(write_dataset, content):
    annotations, images = write_dataset(content)
    # stored lying, 30 wide and 40 high; shown, and annotated, 40 wide and 30 high
    upright = np.zeros((30, 40, 3), dtype=np.uint8)
    upright[5:15, 4:12] = 255
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(np.rot90(upright)).save(images / "a.png", exif=exif)
    image, target = CocoDataset(annotations, images, KEEP_SIZE, training=True)[0]
    assert target.orig_size == (30, 40)
    white = np.argwhere(image[0].numpy() == 255)
    assert white.min(0).tolist() == [5, 4]
    assert white.max(0).tolist() == [14, 11]
    torch.testing.assert_close(target.boxes[0], torch.tensor([8 / 40, 10 / 30, 8 / 40, 10 / 30]))
    ignoring = CocoDataset(annotations, images, KEEP_SIZE, training=True, apply_exif=False)
    with pytest.raises(ValueError, match=r"swapped.*data.apply_exif=true"):
        ignoring[0]


def test_swapped_width_and_height_are_an_error_that_says_how_to_go_on(write_dataset, content):
    annotations, images = write_dataset(content)
    Image.fromarray(np.zeros((40, 30, 3), dtype=np.uint8)).save(images / "a.png")
    dataset = CocoDataset(annotations, images, KEEP_SIZE, training=True)
    with pytest.raises(
        ValueError,
        match=r"image 7 \(.*a.png\) is 30 x 40 pixels .* say 40 x 30: width and height are swapped.*apply_exif=false",
    ):
        dataset[0]


def test_another_size_than_annotated_is_an_error(write_dataset, content):
    annotations, images = write_dataset(content)
    Image.fromarray(np.zeros((10, 10, 3), dtype=np.uint8)).save(images / "a.png")
    with pytest.raises(ValueError, match=r"is 10 x 10 pixels .* say 40 x 30, so its boxes would be wrong"):
        CocoDataset(annotations, images, KEEP_SIZE, training=True)[0]


def test_a_truncated_image_names_path_and_image_id(write_dataset, content):
    annotations, images = write_dataset(content)
    path = images / "a.png"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match=f"image 7: cannot read the image {path}"):
        CocoDataset(annotations, images, KEEP_SIZE, training=True)[0]


def break_some(images):
    """One image is cut short, one is of another size, one is missing; the fourth is sound."""
    (images / "a.png").write_bytes((images / "a.png").read_bytes()[:1000])
    Image.new("RGB", (9, 9)).save(images / "sub/b.png")
    (images / "gone.png").unlink()


@pytest.mark.parametrize("training", [True, False])
def test_faulty_images_can_be_skipped_and_are_counted(write_dataset, content, caplog, training):
    content["images"].append({"id": 99, "file_name": "gone.png", "width": 8, "height": 8})
    content["images"].append({"id": 5, "file_name": "sound.png", "width": 30, "height": 20})
    content["annotations"].append({"id": 77, "image_id": 5, "category_id": 5, "bbox": [1, 1, 3, 3]})
    annotations, images = write_dataset(content)
    break_some(images)
    options = {"training": training, "num_threads": 2}
    dataset = CocoDataset(annotations, images, KEEP_SIZE, faulty_images="skip", **options)
    assert [dataset[index][1].image_id for index in range(len(dataset))] == [12, 5]
    assert dataset[1][1].labels.tolist() == [1]
    # what cannot be seen is not asked for either
    truth = dataset.coco_ground_truth()
    assert [image["id"] for image in truth["images"]] == [12, 5]
    assert [annotation["image_id"] for annotation in truth["annotations"]] == [5]
    assert dataset.class_table.num_classes == 3
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    message = record.getMessage()
    assert "3 of 5 images skipped" in message
    for words in ("1 x image_unreadable", "1 x image_size", "1 x image_missing", "a.png", "b.png", "gone.png"):
        assert words in message
    with pytest.raises(FileNotFoundError, match=r"(?s)1 of the 5 images.*gone.png.*data.faulty_images=skip"):
        CocoDataset(annotations, images, KEEP_SIZE, **options)


def test_skipping_every_image_is_an_error(write_dataset, content):
    annotations, images = write_dataset(content)
    for path in images.rglob("*.png"):
        path.unlink()
    with pytest.raises(ValueError, match=r"none of the 3 images .* can be used \(3 x image_missing\)"):
        CocoDataset(annotations, images, KEEP_SIZE, training=True, faulty_images="skip")


def test_a_name_outside_the_folder_is_refused_under_every_policy(write_dataset, content):
    annotations, images = write_dataset(content)
    content["images"][0]["file_name"] = "../a.png"
    annotations.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="outside the image folder"):
        CocoDataset(annotations, images, KEEP_SIZE, training=True, faulty_images="skip", faulty_annotations="drop")


def test_faulty_entries_can_be_dropped_and_are_counted(open_dataset, content, caplog):
    content["annotations"] += [
        {"id": 20, "image_id": 7, "category_id": 77, "bbox": [1, 1, 3, 3]},
        {"id": 21, "image_id": 7, "category_id": 5, "bbox": [float("nan"), 1, 3, 3]},
        {"id": 22, "image_id": 7, "category_id": 5, "bbox": [1, 1, 3, 3], "area": "big"},
    ]
    with pytest.raises(ValueError, match=r"(?s)3 fault\(s\).*data.faulty_annotations=drop"):
        open_dataset(content)
    dataset = open_dataset(content, faulty_annotations="drop")
    assert dataset.counts.num_targets == 4
    assert dataset[0][1].labels.tolist() == [2, 0, 1]
    message = next(record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "3 faulty entries dropped or repaired" in message
    for words in ("1 x category_id_unknown", "annotation 20:", "1 x box_not_finite", "1 x area", "w * h"):
        assert words in message


def test_annotations_take_no_python_object_each(write_dataset, content):
    """Objects that every worker touches get copied into every worker, page by page."""
    content["annotations"] = [
        {"id": i, "image_id": 7, "category_id": 5, "bbox": [i % 30, 1, 2, 3]} for i in range(5000)
    ]
    content["images"] += [{"id": 1000 + i, "file_name": "a.png", "width": 40, "height": 30} for i in range(3000)]
    dataset = CocoDataset(*write_dataset(content), KEEP_SIZE, training=True)
    reached, waiting = set(), [dataset.__dict__]
    while waiting:
        value = waiting.pop()
        if id(value) not in reached and not isinstance(value, type | type(gc)):
            reached.add(id(value))
            if isinstance(value, dict | list | tuple | set) or type(value).__module__.startswith("detr"):
                waiting += gc.get_referents(value)
    assert len(reached) < 200
