"""Random changes of images: each by its definition, and all under the key."""

from __future__ import annotations

import pytest
import torch

from fedshot.core.errors import DataError
from fedshot.core.seeds import Key
from fedshot.data.episodes.augment import Augment
from fedshot.data.episodes.episode import ClientData, Tasks
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.data.sources.digits import Digits

X = torch.randint(0, 256, (50, 6, 8, 3), generator=Key(0).torch(), dtype=torch.uint8)
KEY = Key(1).at("augment")


def test_nothing_is_changed_unless_asked_for():
    assert not Augment().active
    assert Augment().apply(X, KEY) is X


@pytest.mark.parametrize("augment", [Augment(2), Augment(flip=True), Augment(2, True, 0.4)])
def test_the_key_alone_decides_and_the_input_stays(augment):
    before = X.clone()
    out = augment.apply(X, KEY)
    assert out.dtype == torch.uint8
    assert out.shape == X.shape
    assert torch.equal(out, augment.apply(X, KEY))
    assert not torch.equal(out, augment.apply(X, Key(2)))
    assert torch.equal(X, before)


def test_a_flip_mirrors_about_half_of_the_images_and_leaves_the_others():
    out = Augment(flip=True).apply(X, KEY)
    mirrored = [torch.equal(a, b.flip(1)) for a, b in zip(out, X, strict=True)]
    same = [torch.equal(a, b) for a, b in zip(out, X, strict=True)]
    assert all(m != s for m, s in zip(mirrored, same, strict=True))
    assert 15 <= sum(mirrored) <= 35


def test_a_crop_is_a_window_of_the_padded_image():
    out = Augment(crop_padding=2).apply(X, KEY)
    padded = torch.nn.functional.pad(X.permute(0, 3, 1, 2), (2, 2, 2, 2)).permute(0, 2, 3, 1)
    found = set()
    for image, wide in zip(out, padded, strict=True):
        places = [
            (i, j)
            for i in range(5)
            for j in range(5)
            if torch.equal(image, wide[i : i + 6, j : j + 8])
        ]
        assert len(places) == 1
        found.add(places[0])
    assert len(found) > 15  # of 25 places, over 50 images


def test_jitter_of_grey_flat_images_is_brightness_alone():
    flat = torch.full((400, 4, 4, 1), 100, dtype=torch.uint8)
    out = Augment(jitter=0.25).apply(flat, KEY)
    levels = out[:, 0, 0, 0].float()
    assert (out == out[:, :1, :1]).all()
    assert levels.min() >= 75
    assert levels.max() <= 125
    assert abs(levels.mean() - 100) < 3


def test_jitter_keeps_grey_pixels_of_colour_images_grey():
    grey = X[..., :1].expand(-1, -1, -1, 3).contiguous()
    out = Augment(jitter=0.5).apply(grey, KEY).int()
    assert (out.amax(-1) - out.amin(-1)).max() <= 1  # rounding


def test_images_of_another_kind_are_refused():
    with pytest.raises(DataError, match=r"torch\.float32.*expected uint8 \[n, H, W, C\]"):
        Augment(1).apply(X.float(), KEY)


def test_training_episodes_are_augmented_and_tests_are_not() -> None:
    data = Digits().load(None)
    client = ClientData(data, data.images_of(range(5)))
    plain, changed = EpisodeSpec(5, 1, 3), EpisodeSpec(5, 1, 3, augment=Augment(flip=True))
    one = client.episode(plain, Key(0).numpy())
    other = client.episode(changed, Key(0).numpy())
    again = client.episode(changed, Key(0).numpy())
    assert torch.equal(one.query_y, other.query_y)
    assert torch.equal(other.query_x, again.query_x)
    flipped = [torch.equal(b, a.flip(1)) for a, b in zip(one.query_x, other.query_x, strict=True)]
    same = [torch.equal(a, b) for a, b in zip(one.query_x, other.query_x, strict=True)]
    assert any(flipped)
    assert all(f or s for f, s in zip(flipped, same, strict=True))
    tasks = [Tasks.draw(data, range(5, 10), spec, 3, Key(1)) for spec in (plain, changed)]
    assert tasks[0].digest(data) == tasks[1].digest(data)
    assert torch.equal(tasks[0].episode(data, 0).query_x, tasks[1].episode(data, 0).query_x)
