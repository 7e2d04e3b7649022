"""Pictures of data by matplotlib: repeatable, sized, unmoved by what names hold."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from fedshot.core.errors import DataError
from fedshot.data.class_split import ClassSplit
from fedshot.data.dataset import Dataset
from fedshot.data.partitions.partition import Partition
from fedshot.reports.partition_plots import class_histogram, partition_picture
from fedshot.reports.sheet import contact_sheet
from reports.example_runs import EVIL


def small_partition(classes: int, clients: int) -> tuple[Partition, np.ndarray, list[str]]:
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(classes), 20)
    owners = rng.integers(0, clients, len(y))
    names = [EVIL, *(f"class {c}" for c in range(1, classes))]
    return Partition.by_owner(np.arange(len(y)), owners, clients), y, names


def test_pictures_repeat_and_carry_no_date():
    parts = small_partition(5, 10)
    svg = partition_picture(*parts)
    assert svg == partition_picture(*parts)
    assert "dc:date" not in svg


def test_drawing_leaves_matplotlib_as_it_was():
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    partition_picture(*small_partition(5, 4))
    assert dict(mpl.rcParams) == before


def test_few_classes_are_bubbles_and_many_a_heat_map():
    assert "<image" not in partition_picture(*small_partition(12, 10))
    assert "<image" in partition_picture(*small_partition(13, 10))


def test_a_partition_of_many_clients_says_how_many_are_shown():
    assert "client, first 50 of 80 shown" in partition_picture(*small_partition(5, 80))
    assert "shown" not in partition_picture(*small_partition(5, 20))


def test_clients_and_classes_without_images_can_be_drawn():
    partition = Partition.of([np.zeros(0, np.int64), np.array([0, 1])])
    svg = partition_picture(partition, np.array([2, 2, 1]), ["a", "b", "c"])
    assert ">c</text>" in svg
    assert ">a</text>" not in svg
    empty = Partition.of([np.zeros(0, np.int64)])
    assert partition_picture(empty, np.array([0]), ["a"]).startswith("<?xml")


def test_the_histogram_tells_what_classes_are_for():
    svg = class_histogram(
        np.array([0, 1, 1, 2, 3]), [EVIL, "b", "c", "d"], ClassSplit((0,), (1,), (2,))
    )
    assert "<script" not in svg
    for part in ("base", "validation", "novel", "unused"):
        assert f">{part}</text>" in svg


def dataset(channels: int) -> Dataset:
    x = np.arange(6 * 8 * 5 * channels, dtype=np.uint8).reshape(6, 8, 5, channels)
    return Dataset("d", x, np.array([0, 0, 0, 0, 1, 1]), ("a", EVIL))


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_a_contact_sheet_has_a_row_for_each_class(channels):
    sheet = contact_sheet(dataset(channels), [0, 1], 2)
    gap = 4
    assert isinstance(sheet, Image.Image)
    assert sheet.height == 2 * (8 * 2 + gap) + gap
    left = sheet.width - 10 * (5 * 2 + gap) - gap
    assert left > 100  # the longer name
    blank = sheet.crop((left + 2 * 14, gap + 20, left + 2 * 14 + 10, gap + 20 + 16))
    assert np.asarray(blank).min() == 255  # class 1 has two images


def test_images_are_enlarged_without_smoothing():
    data = dataset(1)
    sheet = contact_sheet(data, [0], 3)
    left = sheet.width - 10 * (5 * 3 + 4) - 4
    pixels = np.asarray(sheet)[4 : 4 + 24, left : left + 15, 0]
    np.testing.assert_array_equal(pixels, data.x[0, :, :, 0].repeat(3, 0).repeat(3, 1))


def test_a_sheet_that_cannot_be_drawn_is_refused():
    with pytest.raises(DataError, match="2 channels"):
        contact_sheet(dataset(2), [0], 4)
