"""What the shared structures refuse."""

import pytest
import torch

from detr.structures import Batch, ClassTable, ImageBatch, Target


def pixels(h, w):
    return torch.randint(0, 256, (3, h, w), dtype=torch.uint8)


def make_target(**changes) -> Target:
    fields = {
        "labels": torch.tensor([1]),
        "boxes": torch.full((1, 4), 0.5),
        "image_id": 3,
        "orig_size": (5, 7),
    }
    return Target(**(fields | changes))


class TestImageBatch:
    def test_images_sit_in_the_top_left_corner(self):
        images = [pixels(5, 7), pixels(6, 4)]
        batch = ImageBatch.from_images(images)
        assert batch.pixels.shape == (2, 3, 6, 7)
        assert batch.sizes.tolist() == [[5, 7], [6, 4]]
        for index, image in enumerate(images):
            h, w = image.shape[1:]
            assert torch.equal(batch.pixels[index, :, :h, :w], image)
            assert not batch.padding_mask[index, :h, :w].any()
            assert batch.padding_mask[index].sum() == 6 * 7 - h * w

    @pytest.mark.parametrize(("pad_to", "expected"), [(1, (6, 7)), (4, (8, 8)), (32, (32, 32))])
    def test_pad_to_rounds_up(self, pad_to, expected):
        batch = ImageBatch.from_images([pixels(5, 7), pixels(6, 4)], pad_to=pad_to)
        assert tuple(batch.pixels.shape[-2:]) == expected

    @pytest.mark.parametrize("size", [(0, 8), (6, 0), (-1, 8), (7, 8), (6, 9)])
    def test_sizes_that_no_padded_image_has(self, size):
        with pytest.raises(ValueError, match=r"sizes\[1\] is .* fit into the padded \(6, 8\)"):
            ImageBatch(torch.zeros(2, 3, 6, 8, dtype=torch.uint8), torch.tensor([[6, 8], size]))

    @pytest.mark.parametrize("pad_to", [1, 16])
    def test_memory_of_any_content_and_room(self, pad_to):
        images = [pixels(5, 7), pixels(6, 4), pixels(6, 7)]
        asked = []

        def allocate(num_bytes):
            asked.append(num_bytes)
            return torch.full((num_bytes + 5,), 77, dtype=torch.uint8)

        mine, reference = (ImageBatch.from_images(images, pad_to=pad_to, allocate=given) for given in (allocate, None))
        assert asked == [reference.pixels.numel()]
        assert torch.equal(mine.pixels, reference.pixels)
        assert mine.pixels.stride() == reference.pixels.stride()
        for index, (h, w) in enumerate(mine.sizes.tolist()):
            assert torch.equal(mine.pixels[index, :, :h, :w], images[index])
        assert not mine.pixels.masked_select(mine.padding_mask[:, None]).any()

    def test_no_memory_is_taken_for_images_that_are_refused(self):
        def allocate(num_bytes):
            raise AssertionError("called")

        with pytest.raises(ValueError, match="uint8 RGB"):
            ImageBatch.from_images([pixels(5, 7), pixels(5, 7).float()], allocate=allocate)

    def test_the_mask_follows_the_batch(self):
        batch = ImageBatch.from_images([pixels(5, 7), pixels(6, 4)], pad_to=8)
        on_meta = batch.to("meta").padding_mask
        assert (on_meta.device.type, on_meta.dtype, on_meta.shape) == ("meta", torch.bool, (2, 8, 8))
        compiled = torch.compile(
            lambda pixels, sizes: ImageBatch(pixels, sizes).padding_mask, backend="eager", fullgraph=True
        )
        assert torch.equal(compiled(batch.pixels, batch.sizes), batch.padding_mask)

    def test_normalised_pixels_are_refused(self):
        good = ImageBatch.from_images([pixels(5, 7)])
        with pytest.raises(ValueError, match=r"uint8 RGB; got torch.float32 .* Do not normalise"):
            ImageBatch(good.pixels.float(), good.sizes)

    def test_no_images(self):
        with pytest.raises(ValueError, match="at least one image"):
            ImageBatch.from_images([])

    def test_gray_image(self):
        with pytest.raises(ValueError, match=r"images\[1\] must be \(3, h, w\) uint8 RGB"):
            ImageBatch.from_images([pixels(5, 7), pixels(5, 7)[:1]])


class TestTarget:
    @pytest.mark.parametrize("box", [[float("nan"), 0.5, 0.1, 0.1], [1.5, 0.5, 0.1, 0.1], [0.5, 0.5, -0.1, 0.1]])
    def test_boxes_outside_the_unit_square(self, box):
        with pytest.raises(ValueError, match=r"image 3: boxes must be finite \(cx, cy, w, h\) in \[0, 1\]; box 0 is"):
            make_target(boxes=torch.tensor([box]))

    def test_pixel_boxes(self):
        with pytest.raises(ValueError, match="Divide by the image size"):
            make_target(boxes=torch.tensor([[100.0, 50.0, 20.0, 20.0]]))

    def test_negative_label(self):
        with pytest.raises(ValueError, match="image 3: labels must be class indices from 0; got -1"):
            make_target(labels=torch.tensor([-1]))

    def test_one_box_a_label(self):
        with pytest.raises(ValueError, match=r"boxes must be \(1, 4\)"):
            make_target(boxes=torch.full((2, 4), 0.5))

    def test_float_labels(self):
        with pytest.raises(ValueError, match="labels must be"):
            make_target(labels=torch.tensor([1.0]))

    def test_no_boxes_is_fine(self):
        target = make_target(labels=torch.zeros(0, dtype=torch.int64), boxes=torch.zeros(0, 4))
        assert target.boxes.shape == (0, 4)


def test_batch_needs_a_target_an_image():
    with pytest.raises(ValueError, match="got 1 images and 2 targets"):
        Batch(ImageBatch.from_images([pixels(5, 7)]), (make_target(), make_target()))


def test_class_table_ids_differ():
    with pytest.raises(ValueError, match="must differ"):
        ClassTable(("a", "b"), (1, 1))
