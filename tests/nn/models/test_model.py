"""Models: sizes, seeds, shapes, and what they refuse."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from covering import covering, diagonal, pairwise
from fedshot.core import tree
from fedshot.core.errors import ConfigError
from fedshot.core.seeds import Key
from fedshot.nn.gradients import value_and_grad
from fedshot.nn.heads import HEADS, CosineHead, LinearHead, TwoLayerHead
from fedshot.nn.losses import cross_entropy
from fedshot.nn.models.backbones import BACKBONES, MLP, Adapter, Conv4
from fedshot.nn.models.cost import step_flops
from fedshot.nn.models.layers import batch_norm, init_norm
from fedshot.nn.models.mode import Mode
from fedshot.nn.models.model import Model
from fedshot.nn.models.resnet import ResNet12
from fedshot.nn.optim import Optimizer

BATCH = Mode(train=True, norm="batch", seed=Key(0).tensor())


def images(n: int, *shape: int) -> Tensor:
    return torch.randint(0, 256, (n, *shape), dtype=torch.uint8, generator=Key(0).torch())


@pytest.mark.parametrize(
    ("pixels", "channels", "features"), [(8, 1, 16), (28, 1, 16), (32, 3, 64), (84, 3, 400)]
)
def test_conv4_takes_images_from_digits_to_84_pixels(
    pixels: int, channels: int, features: int
) -> None:
    model = Model(Conv4(16), LinearHead(5), (pixels, pixels, channels))
    params, stats = model.init(Key(0))
    h, after = model.features(params, stats, images(2, *model.shape), BATCH)
    assert h.shape == (2, features)
    assert model.out_features == features
    assert model.logits(params, h).shape == (2, 5)
    assert tree.difference(stats, after) is None


def test_conv4_makes_as_many_features_as_are_asked_for() -> None:
    model = Model(Conv4(16, features=2), None, (28, 28, 1))
    params, stats = model.init(Key(0))
    wide, _ = Model(Conv4(16), None, (28, 28, 1)).features(
        params, stats, images(4, 28, 28, 1), BATCH
    )
    narrow, after = model.features(params, stats, images(4, 28, 28, 1), BATCH)
    assert model.out_features == narrow.shape[1] == 2
    p = params["body"]["linear"]
    torch.testing.assert_close(narrow, wide @ p["weight"].T + p["bias"])
    assert after.keys() == stats.keys()


@pytest.mark.parametrize(("width", "about"), [(64, 113e3), (32, 28.9e3)])
def test_conv4_has_the_published_number_of_parameters(width: int, about: float) -> None:
    params, _ = Model(Conv4(width), None, (84, 84, 3)).init(Key(0))
    assert sum(map(Tensor.numel, tree.leaves(params["body"]))) == pytest.approx(about, rel=1e-3)


@pytest.mark.parametrize(
    ("head", "backbone"),
    diagonal([LinearHead(3), TwoLayerHead(3, 8), CosineHead(3), None], [MLP((8,)), Conv4(4)]),
)
def test_float32_and_float64_models_of_one_key_agree(backbone: Any, head: Any) -> None:
    single = Model(backbone, head, (8, 8, 1))
    double = dataclasses.replace(single, dtype="float64")
    a, b = single.init(Key(0)), double.init(Key(0))
    assert tree.digest(a) == tree.digest(tree.map(Tensor.float, b))
    assert tree.digest(a) == tree.digest(single.init(Key(0)))
    assert tree.digest(a) != tree.digest(single.init(Key(1)))
    assert ("head" in a[0]) == (head is not None)


def test_layers_of_equal_shape_are_drawn_apart_with_the_right_spread() -> None:
    params, _ = Model(Conv4(64), LinearHead(5), (28, 28, 1)).init(Key(0))
    body = params["body"]
    assert not torch.equal(body["conv2"]["weight"], body["conv3"]["weight"])
    assert body["conv2"]["weight"].std().item() == pytest.approx((2 / 576) ** 0.5, rel=0.02)
    assert params["head"]["weight"].abs().max() <= 64**-0.5


def test_the_body_does_not_depend_on_the_head() -> None:
    a, _ = Model(Conv4(4), None, (8, 8, 1)).init(Key(0))
    b, _ = Model(Conv4(4), LinearHead(9), (8, 8, 1)).init(Key(0))
    assert tree.digest(a["body"]) == tree.digest(b["body"])


@pytest.mark.parametrize(
    ("norm", "backbone"),
    covering(["batch", "given", "capture"], [MLP((8,), dropout=0.5), Conv4(16, dropout=0.5)]),
)
def test_a_forward_pass_changes_none_of_its_arguments(backbone: Any, norm: Any) -> None:
    model = Model(backbone, LinearHead(2), (8, 8, 1))
    params, stats = model.init(Key(0))
    x = images(3, 8, 8, 1)
    before = tree.digest((params, stats, x))
    mode = dataclasses.replace(BATCH, norm=norm)
    first, _ = model.features(params, stats, x, mode)
    model.logits(params, first)
    assert tree.digest((params, stats, x)) == before
    assert first.any()
    assert torch.equal(model.features(params, stats, x, mode)[0], first)


def test_captured_statistics_repeat_the_whole_pass() -> None:
    model = Model(Conv4(16), None, (8, 8, 1), dtype="float64")
    params, stats = model.init(Key(0))
    x = images(6, 8, 8, 1)
    h, captured = model.features(params, stats, x, Mode(norm="capture"))
    again, _ = model.features(params, captured, x, Mode(norm="given"))
    assert h.any()
    torch.testing.assert_close(again, h, rtol=1e-10, atol=1e-10)


def test_a_model_without_running_statistics_normalises_by_the_batch_and_keeps_none() -> None:
    model = Model(Conv4(16), None, (8, 8, 1), norm_policy="support")
    params, stats = model.init(Key(0))
    _, running = dataclasses.replace(model, norm_policy="running").init(Key(0))
    x = images(6, 8, 8, 1)
    assert stats == {}
    h, after = model.features(params, stats, x, Mode(norm="batch"))
    assert after == {}
    assert torch.equal(h, model.features(params, running, x, Mode(norm="batch"))[0])
    _, captured = model.features(params, stats, x, Mode(norm="capture"))
    assert tree.difference(running, captured) is None
    with pytest.raises(ConfigError, match="batch norm needs statistics"):
        model.features(params, stats, x, Mode(norm="given"))


@pytest.mark.parametrize("channels", [1, 3])
def test_the_result_ignores_how_pixels_and_weights_lie_in_memory(channels: int) -> None:
    model = Model(Conv4(8), LinearHead(2), (12, 12, channels))
    params, stats = model.init(Key(0))
    y = torch.tensor([0, 1, 0, 1])
    x = model.prepare(images(4, *model.shape))
    plain = torch.empty(x.shape).copy_(x)
    last = tree.map(
        lambda t: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t, params
    )

    def grads(w: tree.Tree, x: Tensor) -> str:
        def loss(w: tree.Tree) -> Tensor:
            h, _ = model.features(w, stats, x, Mode(norm="batch"))
            return cross_entropy(model.logits(w, h), y)

        return tree.digest(torch.func.grad(loss)(w))

    assert grads(params, x) == grads(params, plain) == grads(last, x) == grads(last, plain)


def test_pixels_are_scaled_by_the_mean_and_deviation() -> None:
    model = Model(MLP((2,)), None, (2, 3, 2), dtype="float64", pixel_mean=0.4, pixel_std=0.2)
    x = images(4, 2, 3, 2)
    want = (x.permute(0, 3, 1, 2).double() / 255 - 0.4) / 0.2
    torch.testing.assert_close(model.prepare(x), want, rtol=1e-12, atol=1e-12)
    assert model.prepare(x).is_contiguous(memory_format=torch.channels_last)


def test_prepared_images_give_what_raw_ones_do() -> None:
    model = Model(Conv4(16), None, (8, 8, 3))
    params, stats = model.init(Key(0))
    x = images(3, 8, 8, 3)
    raw, _ = model.features(params, stats, x, BATCH)
    ready, _ = model.features(params, stats, model.prepare(x), BATCH)
    assert raw.any()
    assert torch.equal(raw, ready)


def test_an_mlp_runs_stacked_as_in_the_loop() -> None:
    model = Model(MLP((8,), dropout=0.3), LinearHead(2), (4, 4, 1), dtype="float64")
    many = [model.init(Key(i))[0] for i in range(3)]
    x, seeds = images(6, 4, 4, 1), torch.arange(3)

    def f(w: tree.Tree, seed: Tensor) -> Tensor:
        h, _ = model.features(w, {}, x, Mode(train=True, seed=seed))
        return model.logits(w, h)

    loop = torch.stack([f(w, s) for w, s in zip(many, seeds, strict=True)])
    got = torch.func.vmap(f)(tree.stack(many), seeds)
    torch.testing.assert_close(got, loop, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "backbone", [Conv4(16), Conv4(32), ResNet12((8, 16, 16, 32), dropblock=0.0)]
)
def test_bf16_rounds_gradients_and_leaves_float32_everywhere_else(backbone: Any) -> None:
    """It is another arithmetic: near the gradient of float32, and not it."""
    x, found = images(12, 32, 32, 3), []
    for bf16 in (False, True):
        model = Model(backbone, None, (32, 32, 3), bf16=bf16)
        params, stats = model.init(Key(0))

        def loss(w: Any, model: Model = model, stats: Any = stats) -> Any:
            h, after = model.features(w, stats, x, BATCH)
            return h.square().mean(1).log().mean(), (h.detach(), after)

        _, (h, after), grads = value_and_grad(loss, params)
        assert {leaf.dtype for leaf in tree.leaves((h, after, grads))} == {torch.float32}
        found.append(torch.cat([g.flatten() for g in tree.leaves(grads)]))
        with torch.no_grad():  # as at test
            h, _ = model.features(params, stats, x, Mode(norm="given"))
        assert h.dtype == torch.float32
        assert step_flops(model, 12) > 0
    assert not torch.equal(*found)
    assert torch.cosine_similarity(*found, dim=0) > 0.9


@pytest.mark.parametrize(
    ("backbone", "norm", "stacked"),
    pairwise(
        [Conv4(8), Conv4(16), ResNet12((8, 8, 8, 8), dropblock=0.0)],
        ["batch", "given", "capture"],
        [False, True],
    ),
)
def test_bf16_takes_statistics_in_float32(backbone: Any, norm: Any, stacked: bool) -> None:
    """Whatever batch norm goes by, whether kernels fit the shape or not."""
    x, found = images(12, 32, 32, 3), []
    for bf16 in (False, True):
        model = Model(backbone, None, (32, 32, 3), bf16=bf16)
        params, stats = model.init(Key(0))

        def passed(w: Any, model: Model = model, stats: Any = stats) -> Any:
            return model.features(w, {} if norm == "capture" else stats, x, Mode(norm=norm))

        if stacked:
            h, after = torch.func.vmap(passed)(tree.stack([params, params]))
        else:
            h, after = passed(params)
        assert {leaf.dtype for leaf in tree.leaves((h, after))} == {torch.float32}
        found.append((h, after))
    for exact, rounded in zip(*map(tree.leaves, found), strict=True):
        torch.testing.assert_close(exact, rounded, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("shape", [(2, 9, 8, 1), (2, 8, 8, 3), (2, 1, 8, 8)])
def test_images_of_another_shape_are_refused_naming_both(shape: tuple[int, ...]) -> None:
    model = Model(Conv4(4), None, (8, 8, 1))
    params, stats = model.init(Key(0))
    x = torch.zeros(shape, dtype=torch.uint8)
    with pytest.raises(ConfigError) as error:
        model.features(params, stats, x, Mode())
    assert str(list(shape)) in str(error.value)
    assert "[n, 8, 8, 1]" in str(error.value)


def test_prepared_images_in_the_wrong_order_of_axes_are_refused() -> None:
    model = Model(MLP((4,)), None, (8, 8, 1))
    params, stats = model.init(Key(0))
    with pytest.raises(ConfigError, match=r"\[n, 1, 8, 8\]"):
        model.features(params, stats, torch.zeros(2, 8, 8, 1), Mode())


def test_logits_without_a_head_are_refused() -> None:
    with pytest.raises(ConfigError, match="no head"):
        Model(MLP(), None, (8, 8, 1)).logits({}, torch.zeros(1, 64))


def test_batch_statistics_of_one_value_are_refused() -> None:
    p, s = init_norm(3, torch.float32)
    with pytest.raises(ConfigError, match="at least 2"):
        batch_norm(p, s, torch.zeros(1, 3), Mode(norm="batch"))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: MLP((0,)), "hidden"),
        (lambda: MLP(dropout=1.0), "dropout is 1.0"),
        (lambda: Conv4(0), "width is 0"),
        (lambda: Conv4(dropout=-0.1), "dropout is -0.1"),
        (lambda: Conv4(features=-1), "features is -1"),
        (lambda: LinearHead(1), "way is 1"),
        (lambda: TwoLayerHead(hidden=0), "hidden is 0"),
        (lambda: CosineHead(scale=0.0), "scale is 0.0"),
        (lambda: Model(MLP(), None, (8, 8)), "shape is"),  # type: ignore[arg-type]
        (lambda: Model(MLP(), None, (8, 8, 1), norm_policy="x"), "norm_policy"),  # type: ignore[arg-type]
        (lambda: Model(MLP(), None, (8, 8, 1), dtype="half"), "dtype is 'half'"),  # type: ignore[arg-type]
        (lambda: Model(MLP(), None, (8, 8, 1), dtype="float64", bf16=True), "bf16 needs images"),
        (lambda: Model(MLP(), None, (8, 8, 1), pixel_std=0.0), "pixel_std is 0.0"),
        (lambda: Optimizer("lion"), "name is 'lion'"),  # type: ignore[arg-type]
        (lambda: Optimizer(lr=0.0), "lr is 0.0"),
        (lambda: Optimizer(lr=float("nan")), "lr is nan"),
        (lambda: Optimizer("sgd", momentum=1.0), "momentum is 1.0"),
        (lambda: Optimizer("adam", momentum=0.9), "momentum of its own"),
        (lambda: Optimizer(weight_decay=-1.0), "weight_decay is -1.0"),
    ],
)
def test_values_that_make_no_sense_are_refused(make: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make()


def test_registries_build_with_their_defaults() -> None:
    for name, backbone in BACKBONES.items():
        if name == "module":  # it has no network by default
            continue
        for head in HEADS.values():
            data: Any = {"shape": (8, 8, 1)}
            if backbone.takes == ("features",):
                data = {"shape": (8,)}
            if "text" in backbone.takes:
                data = {"shape": (9, 3), "table": torch.zeros(4, 3)}
            params, _ = Model(backbone(), head(), **data).init(Key(0))
            assert set(params) == {"body", "head"}


def test_an_adapter_starts_at_the_given_features_and_then_adds_a_relu_layer() -> None:
    model = Model(Adapter(3), None, (4,), dtype="float64")
    x = torch.randn(5, 4, dtype=torch.float64)
    params, _ = model.init(Key(0))
    assert model.features(params, {}, x, BATCH)[0].equal(x)
    down, up = params["body"]["down"], params["body"]["up"]
    changed = {"weight": torch.ones_like(up["weight"]), "bias": torch.full_like(up["bias"], 2.0)}
    found, _ = model.features({"body": {"down": down, "up": changed}}, {}, x, BATCH)
    hidden = (x @ down["weight"].T + down["bias"]).clamp_min(0.0)
    torch.testing.assert_close(found, x + hidden.sum(1, keepdim=True) + 2.0)
