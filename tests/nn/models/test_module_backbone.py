"""A user's module as backbone: the built-in network's numbers, what is trained, and refusals."""
# ruff: noqa: ARG005  (functions that are told what to do, and take what others need)

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedshot.config.load import Config
from fedshot.core import tree
from fedshot.core.errors import ConfigError
from fedshot.core.seeds import Key
from fedshot.learners.proto import Proto
from fedshot.nn.gradients import value_and_grad
from fedshot.nn.models.backbones import Conv4
from fedshot.nn.models.layers import dropout
from fedshot.nn.models.mode import Mode
from fedshot.nn.models.model import Model
from fedshot.nn.models.module_backbone import ModuleBackbone
from fedshot.runs.experiment import Experiment
from fedshot.runs.prepare import PreparedRun
from system.runs import CHOOSING, SMALL, merged

from .user_nets import Conv4Module, SmallViT

SHAPE = (8, 8, 1)
X = torch.randint(0, 256, (9, *SHAPE), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
TWO = {"run": {"rounds": 2, "fleet": "sequential"}}
HEAD: dict[str, Any] = {"head": {"name": "linear", "way": 5}}
INNER = {"steps": 2, "test_steps": 2}
METHODS: dict[str, dict[str, Any]] = {
    "fl_proto": {"name": "fl_proto", "local_steps": 2},
    "fedfsl_mi": {"name": "fedfsl_mi", "local_steps": 2, "inner": INNER},
    "fedmeta": {"name": "fedmeta", "episodes": 2, "inner": INNER},
}


def peft() -> None:
    pytest.importorskip("peft", reason="the extra `encoders` is not installed")


def model(net: nn.Module, shape: Any = SHAPE, dtype: Any = "float64", **options: Any) -> Model:
    return Model(ModuleBackbone(**options).hold(net), None, shape, dtype=dtype)


def names(of: tree.Tree) -> set[str]:
    return {path.replace("/", ".") for path, _ in tree.items(of)}


def trained(folder: Path, method: str, backbone: Any, **run: Any) -> Experiment:
    """Return a finished run; `backbone` is a module, or the settings of one of fedshot's."""
    chosen = backbone if isinstance(backbone, dict) else {"name": "module"}
    network = {"model": {"backbone": chosen, "dtype": "float64", **HEAD}}
    settings = merged(SMALL, CHOOSING, TWO, network, {"method": METHODS[method], "run": run})
    config = Config.of(settings)
    if not isinstance(backbone, dict):
        config = config.with_backbone(ModuleBackbone.holding(config.model.backbone, backbone))
    made = Experiment(PreparedRun(config), folder)
    list(made.run())
    return made


@pytest.mark.parametrize(
    "method",
    ["fl_proto", *(pytest.param(m, marks=pytest.mark.slow) for m in METHODS if m[2] == "d")],
)
def test_our_conv4_as_a_module_trains_as_the_built_in_one(method: str, tmp_path: Path) -> None:
    """Two rounds in float64 from the same weights: losses, sums, bytes, test predictions."""
    mine = trained(tmp_path / "mine", method, {"name": "conv4", "width": 4})
    first, _ = mine.prepared.method.model.init(mine.prepared.key.at("init"))
    net = Conv4Module().double()
    net.load_state_dict(
        {path.replace("/", "."): leaf for path, leaf in tree.items(first["body"])}, strict=False
    )
    theirs = trained(tmp_path / "theirs", method, net)
    assert mine.meter.to_json() == theirs.meter.to_json()
    tree.map(lambda a, b: torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9),
             mine.server, theirs.server)  # fmt: skip
    for a, b in zip(mine.recorder.records(), theirs.recorder.records(), strict=True):
        assert a["metrics"] == pytest.approx(b["metrics"], rel=1e-9)
    scores = [one.evaluate(one.prepared.test) for one in (mine, theirs)]
    np.testing.assert_array_equal(scores[0].per_episode, scores[1].per_episode)


@pytest.mark.parametrize("mode", ["batch", "given", "capture"])
def test_batch_norm_follows_the_mode(mode: Any) -> None:
    built_in, mine = Model(Conv4(4), None, SHAPE, dtype="float64"), model(Conv4Module())
    params, stats = mine.init(Key(0))
    for given in (stats, {}) if mode != "given" else (stats,):
        found = mine.features(params, given, X, Mode(True, mode))
        wanted = built_in.features(params, given, X, Mode(True, mode))
        assert torch.equal(found[0], wanted[0])
        assert tree.difference(wanted[1], found[1]) is None
        tree.map(torch.testing.assert_close, wanted[1], found[1])


def test_layers_keep_their_own_epsilon_and_momentum() -> None:
    norm = nn.BatchNorm1d(5, eps=0.5, momentum=0.25, dtype=torch.float64)
    x = torch.randn(7, 5, dtype=torch.float64)
    mine = model(norm, (5,))
    params, stats = mine.init(Key(0))
    found, after = mine.features(params, stats, x, Mode(True, "batch"))
    torch.testing.assert_close(found, norm.train()(x))
    torch.testing.assert_close(after["0"]["mean"], norm.running_mean)
    torch.testing.assert_close(after["0"]["var"], norm.running_var)

    def stacked(x: Tensor) -> Any:
        return mine.features(params, stats, x, Mode(True, "batch"))

    many = torch.func.vmap(stacked)(torch.stack([x, 2 * x]))
    torch.testing.assert_close(many[0][0], found)
    torch.testing.assert_close(many[1]["0"]["var"][0], after["0"]["var"])


CHOICES: dict[str, Callable[[str], bool]] = {
    "none": lambda name: False,
    "all": lambda name: True,
    "head": lambda name: name.startswith("out."),
    "norm": lambda name: ".norm" in name,
    "bias": lambda name: name.endswith("bias"),
}


@pytest.mark.parametrize("tune", CHOICES)
def test_each_choice_trains_exactly_its_leaves(tune: Any) -> None:
    net = SmallViT()
    mine = model(net, tune=tune)
    params, stats = mine.init(Key(0))
    wanted = {name for name, _ in net.named_parameters() if CHOICES[tune](name)}
    assert (names(params["body"]), stats) == (wanted, {})
    for path, leaf in tree.items(params["body"]):
        assert torch.equal(leaf, net.get_parameter(path.replace("/", ".")).double())
    with torch.no_grad():
        found, _ = mine.features(params, {}, X, Mode())
        torch.testing.assert_close(found, net.double().eval()(mine.prepare(X)))


def test_batch_norm_that_is_not_trained_stays_as_it_is() -> None:
    net = Conv4Module().double()
    net.norm1.running_mean.fill_(0.3)
    mine = model(net, tune="bias")
    params, stats = mine.init(Key(0))
    assert (stats, mine.backbone.norm_policies) == ({}, ("running",))
    with torch.no_grad():
        wanted = net.eval()(mine.prepare(X))
    for mode in (Mode(), Mode(True, "batch"), Mode(norm="capture")):
        found, after = mine.features(params, {}, X, mode)
        torch.testing.assert_close(found, wanted)
        assert after == {}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_weights_without_values_and_scripts_are_refused() -> None:
    for net in (nn.LazyLinear(3), nn.Linear(4, 3, device="meta")):
        with pytest.raises(ConfigError, match=r"no values for 'weight'\. Load its weights"):
            model(net).init(Key(0))
    traced = torch.jit.trace(nn.Linear(4, 3), torch.zeros(1, 4))
    with pytest.raises(ConfigError, match=r"model\.backbone is TorchScript"):
        model(traced).init(Key(0))


def test_a_parameter_that_requires_no_gradient_is_not_trained() -> None:
    net = SmallViT()
    net.layers.requires_grad_(False)
    assert names(model(net).init(Key(0))[0]["body"]) == {
        "patch.weight", "patch.bias", "out.weight", "out.bias",
    }  # fmt: skip
    with pytest.raises(ConfigError, match="tune is 'norm', and the module has no such parameter"):
        model(net, tune="norm").init(Key(0))


def test_shared_weights_are_one_leaf_and_stay_shared() -> None:
    layer = nn.Linear(5, 5)
    net = nn.Sequential(layer, nn.Tanh(), layer)
    mine, x = model(net, (5,)), torch.randn(3, 5, dtype=torch.float64)
    params, _ = mine.init(Key(0))
    assert names(params["body"]) == {"0.weight", "0.bias"}
    changed = tree.map(lambda w: w + 1, params)
    w, b = changed["body"]["0"]["weight"], changed["body"]["0"]["bias"]
    found, _ = mine.features(changed, {}, x, Mode())
    torch.testing.assert_close(found, torch.tanh(x @ w.T + b) @ w.T + b)


def test_dropout_depends_on_the_seed_alone_and_is_off_at_test() -> None:
    mine = model(SmallViT(dropout=0.5))
    params, _ = mine.init(Key(0))

    def features(train: bool, seed: int) -> Tensor:
        return mine.features(params, {}, X, Mode(train, seed=torch.tensor(seed)))[0]

    assert torch.equal(features(True, 1), features(True, 1))
    assert not torch.allclose(features(True, 1), features(True, 2))
    assert torch.equal(features(False, 1), features(False, 2))


def test_a_dropout_layer_that_is_used_twice_drops_other_elements_each_time() -> None:
    layer, x = nn.Dropout(0.5), torch.ones(4, 64, dtype=torch.float64)
    mode = Mode(True, seed=torch.tensor(1))
    once = model(nn.Sequential(nn.Linear(64, 64), layer), (64,))
    twice = model(nn.Sequential(nn.Linear(64, 64), layer, layer), (64,))
    params, _ = once.init(Key(0))
    params["body"]["0"] = {"weight": torch.eye(64).double(), "bias": torch.zeros(64).double()}
    first, both = (one.features(params, {}, x, mode)[0] for one in (once, twice))
    assert torch.equal(first, dropout(x, 0.5, mode, 1))
    assert torch.equal(both, first * dropout(x, 0.5, mode.layer(1), 1))
    assert 0 < (both != 0).sum() < (first != 0).sum()
    assert torch.equal(both, twice.features(params, {}, x, mode)[0])


def test_whether_a_module_can_be_stacked_is_decided_when_it_is_tried() -> None:
    mine = model(Does(lambda net, h: torch.stack([one * float(one.detach().sum()) for one in h])))
    assert mine.backbone.vmappable
    mine.init(Key(0))
    assert not mine.backbone.vmappable


@pytest.mark.parametrize("net", [Conv4Module(), SmallViT()], ids=["conv4", "vit"])
def test_second_derivatives_are_those_of_finite_differences_also_stacked(net: nn.Module) -> None:
    mine = model(net)
    assert mine.backbone.vmappable
    params, stats = mine.init(Key(0))

    def loss(w: tree.Tree) -> Tensor:
        return mine.features(w, stats, X, Mode(True, "batch"))[0].square().mean()

    def after_a_step(w: tree.Tree) -> Tensor:
        grad = value_and_grad(lambda w: (loss(w), {}), w, differentiable=True)[2]
        return loss(tree.map(lambda w, g: w - 0.1 * g, w, grad))

    _, _, grad = value_and_grad(lambda w: (after_a_step(w), {}), params)
    random = torch.Generator().manual_seed(1)
    way = tree.map(lambda w: torch.randn(w.shape, generator=random, dtype=w.dtype), params)
    h = 1e-6
    sides = (tree.map(lambda w, d, s=s: (w + s * d).requires_grad_(), params, way) for s in (h, -h))
    up, down = map(after_a_step, sides)
    along = sum((g * d).sum() for g, d in zip(tree.leaves(grad), tree.leaves(way), strict=True))
    torch.testing.assert_close((up - down) / (2 * h), along, rtol=1e-5, atol=1e-7)
    many = torch.func.vmap(torch.func.grad(after_a_step))(
        tree.map(lambda w: torch.stack([w, w]), params)
    )
    tree.map(lambda m, g: torch.testing.assert_close(m[1], g), many, grad)


def test_constants_that_were_first_used_in_a_stack_do_not_stay_in_it() -> None:
    mine = model(SmallViT(), tune="head")
    params, _ = mine.init(Key(0))

    def loss(w: tree.Tree) -> Tensor:
        return mine.features(w, {}, X, Mode())[0].sum()

    stacked = torch.func.vmap(torch.func.grad(loss))(
        tree.map(lambda w: torch.stack([w, w]), params)
    )
    held = mine.backbone.net.constants_on(torch.device("cpu"), torch.float64)  # type: ignore[attr-defined]
    assert not any(map(torch._C._functorch.is_functorch_wrapped_tensor, held.values()))
    tree.map(
        lambda a, b: torch.testing.assert_close(a[0], b), stacked, torch.func.grad(loss)(params)
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_stacked_clients_train_as_one_after_another(method: str, tmp_path: Path) -> None:
    one = trained(tmp_path / "one", method, Conv4Module())
    many = trained(tmp_path / "many", method, Conv4Module(), fleet="vectorised")
    tree.map(lambda a, b: torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-8),
             one.server, many.server)  # fmt: skip


@pytest.mark.slow
def test_clients_on_several_threads_give_the_same_bits(tmp_path: Path) -> None:
    one = trained(tmp_path / "one", "fedmeta", SmallViT(dropout=0.2))
    many = trained(tmp_path / "many", "fedmeta", SmallViT(dropout=0.2), fleet="threads", workers=3)
    assert tree.digest(one.server) == tree.digest(many.server)


@pytest.mark.slow
def test_adapters_are_trained_alone_and_drawn_by_the_seed() -> None:
    peft()
    net = SmallViT()
    mine = model(net, tune="lora", rank=2, alpha=6)
    params, _ = mine.init(Key(0))
    linear = ["layers.layers.0.linear1", "layers.layers.0.linear2",
              "layers.layers.1.linear1", "layers.layers.1.linear2", "out"]  # fmt: skip
    wanted = {f"{name}.lora_{side}.default.weight" for name in linear for side in "AB"}
    assert names(params["body"]) == wanted
    assert tree.nbytes(params) == 8 * (2 * 4 * (8 + 16) + 2 * (8 + 6))
    with torch.no_grad():
        frozen = model(net, tune="none").features({"body": {}}, {}, X, Mode())[0]
        assert torch.equal(mine.features(params, {}, X, Mode())[0], frozen)
    same, other = mine.init(Key(0))[0], mine.init(Key(1))[0]
    assert tree.digest(same) == tree.digest(params)
    a, b = (one["body"]["out"]["lora_A"]["default"]["weight"] for one in (params, other))
    assert not torch.allclose(a, b)
    moved = tree.map(lambda w: w + 0.1, params)
    at = moved["body"]["out"]
    merged_net = model(net, tune="head")
    w, _ = merged_net.init(Key(0))
    w["body"]["out"]["weight"] += (
        3 * at["lora_B"]["default"]["weight"] @ at["lora_A"]["default"]["weight"]
    )
    alone = tree.map(torch.clone, params)
    alone["body"]["out"] = at
    torch.testing.assert_close(mine.features(alone, {}, X, Mode())[0],
                               merged_net.features(w, {}, X, Mode())[0])  # fmt: skip
    with torch.no_grad():  # torch's fast path for inference would skip the adapters
        quiet = mine.features(moved, {}, X, Mode())[0]
    torch.testing.assert_close(quiet, mine.features(moved, {}, X, Mode())[0])


@pytest.mark.slow
def test_adapters_of_convolutions_and_wrong_targets() -> None:
    peft()
    params, _ = model(Conv4Module(), tune="lora", targets=("conv2", "conv4")).init(Key(0))
    assert {name.split(".")[0] for name in names(params["body"])} == {"conv2", "conv4"}
    for targets, message in (
        (None, "the module has no nn.Linear. Name the layers"),
        (("gone",), r"targets is \['gone'\], which the module cannot adapt"),
    ):
        with pytest.raises(ConfigError, match=message):
            model(Conv4Module(), tune="lora", targets=targets).init(Key(0))


def test_adapters_go_to_linear_layers_alone_and_leave_the_generator_of_torch() -> None:
    peft()
    inner = nn.Sequential(nn.Conv1d(1, 1, 1))
    net = nn.Sequential(nn.Linear(5, 5), nn.Unflatten(1, (1, 5)), inner, nn.Flatten())
    before = torch.get_rng_state()
    params, _ = model(net, (5,), tune="lora").init(Key(0))
    assert torch.equal(torch.get_rng_state(), before)
    assert names(params["body"]) == {f"0.lora_{side}.default.weight" for side in "AB"}
    words = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3))
    with pytest.raises(ConfigError, match=r"\['0'\], .* cannot adapt: one of them is an nn.Embed"):
        model(words, (5,), tune="lora", targets=("0",)).init(Key(0))


class Does(nn.Module):
    """Computes what it is told from its input and its weight."""

    def __init__(self, fn: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 3)
        self.register_buffer("count", torch.zeros(()))
        self.fn = fn

    def forward(self, x: Tensor) -> Any:
        return self.fn(self, self.layer(x.flatten(1)))


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda net, h: h.mean(), r"returns a tensor \[\] for 3 examples; expected features"),
        (lambda net, h: (h, h), "returns an object of type tuple for 3 examples"),
        (lambda net, h: h[:2], r"returns a tensor \[2, 3\] for 3 examples"),
        (lambda net, h: h.long(), "returns torch.int64; expected floating point"),
        (
            lambda net, h: h.view(7, 7),
            r"raises an error for examples of shape \[3, 1, 8, 8\]: RuntimeErr",
        ),
        (lambda net, h: h + torch.randn(3), "gives other features for the same examples"),
        (lambda net, h: h - h.mean(0), "gives an example different features alone and in a batch"),
        (lambda net, h: h.detach(), "gives features without a gradient"),
        (lambda net, h: h / 0, "gives features that are not finite, before any training"),
        (lambda net, h: h + net.count.add_(1) * 0, "changes its tensor 'count' in a forward pass"),
    ],
)
def test_a_module_without_pure_features_is_refused(fn: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"model.backbone {message}"):
        model(Does(fn)).init(Key(0))


def test_a_module_without_weights_to_train_is_no_backbone() -> None:
    with pytest.raises(ConfigError, match=r"has no parameter that requires .* as `encoder`"):
        model(nn.Flatten()).init(Key(0))
    assert model(nn.Flatten(), tune="none").init(Key(0))[0] == {"body": {}}


def test_the_number_of_features_may_not_change() -> None:
    mine = model(Does(lambda net, h: h[:, : 2 + (len(h) <= 3)]))
    params, _ = mine.init(Key(0))
    with pytest.raises(ConfigError, match="gives 2 features here, and 3 before"):
        mine.features(params, {}, X, Mode())


class ActNorm(nn.BatchNorm2d):
    """Batch norm with more in it, as some libraries have."""


@pytest.mark.parametrize(
    ("norm", "message"),
    [
        (ActNorm(1), "'0' of the module is a ActNorm, which cannot follow"),
        (nn.BatchNorm2d(1, momentum=None), "BatchNorm2d with momentum None"),
    ],
)
def test_batch_norm_of_other_kinds_is_refused_only_where_it_would_be_trained(
    norm: nn.Module, message: str
) -> None:
    net = nn.Sequential(norm, nn.Flatten(), nn.Linear(64, 3))
    with pytest.raises(ConfigError, match=message):
        model(net).init(Key(0))
    assert names(model(net, tune="head").init(Key(0))[0]["body"]) == {"2.weight", "2.bias"}


def test_options_that_contradict_each_other_are_refused() -> None:
    for options, message in (
        ({"tune": "some"}, "model.backbone.tune is 'some'"),
        ({"targets": ["a"]}, "model.backbone.targets is .* only 'lora' adapts"),
        ({"rank": 0}, "model.backbone.rank is 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            Config.of({"model": {"backbone": {"name": "module", **options}}})
    with pytest.raises(ConfigError, match=r"a backbone was passed, and model.backbone is a Conv4"):
        ModuleBackbone.holding(Conv4(), Conv4Module())
    with pytest.raises(ConfigError, match="backbone is of type int"):
        ModuleBackbone.holding(ModuleBackbone(), 3)
    with pytest.raises(ConfigError, match="tune is 'none': prototypes has no parameters"):
        Proto(model(Conv4Module(), tune="none"))


def test_another_module_is_refused_with_both_hashes_and_trained_weights_do_not_count() -> None:
    first = ModuleBackbone(tune="head").hold(SmallViT()).recorded()
    for net, tune, same in ((SmallViT(), "head", True), (SmallViT(seed=1), "head", False)):
        again = ModuleBackbone(tune=tune, digest=first.digest).hold(net)
        if same:
            assert again.recorded().digest == first.digest
            continue
        with pytest.raises(
            ConfigError, match=f"SHA-256 is [0-9a-f]{{64}}, that of the run {first.digest}"
        ):
            again.recorded()
    all_trained = [ModuleBackbone().hold(Conv4Module(seed=s)).recorded().digest for s in (0, 1)]
    assert all_trained[0] == all_trained[1]
    wider = ModuleBackbone().hold(Conv4Module(width=5)).recorded().digest
    assert wider != all_trained[0]
