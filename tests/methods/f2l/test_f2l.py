"""F2L against its equations written out, and what its two models may not do to each other."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.cases import METHODS, REFERENCE
from covering import covering, slow
from fedshot.config.load import Config
from fedshot.conformance.federation import LATE, Federation
from fedshot.conformance.small import host_of
from fedshot.core import tree
from fedshot.core.errors import ConfigError
from fedshot.core.seeds import Key
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.learners.learner import EvalEpisode
from fedshot.learners.maml import InnerLoop
from fedshot.learners.probe import FeatureProbe
from fedshot.methods.f2l.f2l import F2L
from fedshot.methods.f2l.readings import InnerChoice, OptimizerChoice, f2l_defaults
from fedshot.methods.f2l.set_transformer import SetTransformer
from fedshot.methods.f2l.transfer import (
    confidences,
    distillation_loss,
    log_likelihoods,
    temperatures,
    transfer_loss,
)
from fedshot.nn.gradients import value_and_grad
from fedshot.nn.heads import CosineHead, LinearHead
from fedshot.nn.models.model import Model
from fedshot.nn.models.recurrent import BiLSTM
from fedshot.nn.optim import Optimizer
from fedshot.protocol.clients import Clients
from fedshot.runs.prepare import PreparedRun
from methods.classification_oracle import SPEC, Run, Twin, assert_readout, unequal_clients
from methods.f2l.oracle import WAY, Client, Oracle, assert_client, begin, close, method
from methods.fedfsl.oracle import assert_slopes
from system.runs import CHOOSING, SMALL, finished, last_hash, merged, stopped

SGD = OptimizerChoice("sgd", 0.02, 0.9, 0.01)
OPTIONS: dict[str, dict[str, Any]] = {
    "strict": {},
    "tuned": {"mode": "tuned"},
    "paper": {"mode": "paper"},
    "official": {"mode": "official"},
    "official, episodes of two": {"mode": "official", "episodes_per_step": 2},
    "transfer from psi": {"mi_from": "psi"},
    "transfer from psi of prototypes": {"mi_from": "psi", "head_start": "prototypes"},
    "gradients through both": {"mi_gradient": "both"},
    "through both, from psi": {"mi_gradient": "both", "mi_from": "psi"},
    "new phi": {"client_phi": "new"},
    "new phi, second order": {"client_phi": "new", "inner": InnerChoice(0.3, 2, order="second")},
    "queries together": {"queries": "query_set"},
    "queries alone": {"queries": "alone"},
    "head only": {"inner": InnerChoice(0.3, 2, adapts="head")},
    "head only, second order": {"inner": InnerChoice(0.3, 2, order="second", adapts="head")},
    "prototypes": {"head_start": "prototypes"},
    "prototypes, second order": {
        "head_start": "prototypes", "inner": InnerChoice(0.3, 2, order="second"),
    },
    "sgd": {"optimizer": SGD},
    "two optimisers": {"client_optimizer": SGD},
    "without transfer": {"lambda_mi": 0.0},
    "without distillation": {"lambda_kd": 0.0},
    "nothing else": {"lambda_mi": 1.0, "lambda_kd": 1.0, "episodes_per_step": 2},
    "classifier of three layers, added": {
        "classifier": "mlp", "weights": "added", "lambda_mi": 2.0, "mi_tau": 0.1,
    },
}  # fmt: skip
# Two of the options together; each has a case of its own.
COMBINED = {
    "official, episodes of two", "transfer from psi of prototypes", "through both, from psi",
    "new phi, second order", "head only, second order", "prototypes, second order",
    "two optimisers", "nothing else",
}  # fmt: skip
# On images: batch norm in training and in evaluation, derivatives through convolutions.
ON_IMAGES = (
    "official, episodes of two", "prototypes, second order", "two optimisers", "queries together",
    "sgd",
)  # fmt: skip
assert OPTIONS.keys() > COMBINED


@pytest.mark.parametrize(("name", "backbone"), [
    *((name, "mlp") for name in OPTIONS if name not in COMBINED),
    *(pytest.param(name, "mlp", marks=pytest.mark.slow) for name in sorted(COMBINED)),
    *(pytest.param(name, "conv4", marks=pytest.mark.slow) for name in ON_IMAGES),
])  # fmt: skip
def test_local_steps_are_the_equations_in_torch(name: str, backbone: str, tmp_path: Path) -> None:
    options = OPTIONS[name]
    if (
        backbone == "conv4" and options.get("mode") != "official"
    ):  # Adam makes steps of the rounding of a bias before batch norm
        options = {"optimizer": SGD} | options
    m = method(backbone, **options)
    at, drawn = begin(m, tmp_path)
    oracle = Oracle(m, at.phi, at.psi, at.stats)
    for _ in range(2):  # psi and its optimiser go on, phi's optimiser begins afresh
        at, _ = m.local(at, drawn)
        oracle.visit(drawn.steps)
        oracle.twin.assert_is(at.phi["body"], at.phi["classifier"], at.stats)
        assert_client(oracle.client, at.psi)
        oracle.receive(at.phi, at.stats)


@pytest.mark.parametrize("weighting", ["examples", *slow("uniform")])
@unequal_clients
def test_a_round_is_the_mean_of_the_clients(
    weighting: Any, images: tuple[int, ...], tmp_path: Path
) -> None:
    """Eq. (2), or by examples; psi's Adam goes on over rounds, phi's begins afresh."""
    m = method(weighting=weighting, episode=EpisodeSpec(WAY, 1, 2), lambda_kd=0.3)
    run = Run(m, tmp_path, images)
    privates = [run.host.private(k, (-1, 0)) for k in run.ids]
    server = run.server
    oracles = [Oracle(m, server.phi, p["psi"], server.stats) for p in privates]
    counts = torch.tensor([sum(len(r) for r in [run.host.data(k).indices]) for k in run.ids])
    share = (
        counts.double() / counts.sum() if weighting == "examples" else torch.ones(3).double() / 3
    )
    for t in (1, 2):
        run.round()
        for k, oracle in zip(run.ids, oracles, strict=True):
            oracle.receive(server.phi, server.stats)
            oracle.visit(run.drawn(k).steps)
            kept = run.host.private(k, (t, 0))
            assert_client(oracle.client, kept["psi"])
            assert int(kept["optimizer"].step) == t * m.local_steps
        server = run.server
        for name, leaf in server.phi["classifier"].items():
            each = [getattr(oracle.twin.classifier, name) for oracle in oracles]
            close(leaf, sum(w * x for w, x in zip(share, each, strict=True)))  # type: ignore[arg-type]


def test_nothing_but_the_server_model_is_sent(tmp_path: Path) -> None:
    run = Run(method("conv4", optimizer=SGD), tmp_path, (10, 10))
    size = 8 * sum(x.numel() for x in tree.leaves(run.server._asdict()))
    run.round()
    for reply in run.spy.seen.values():
        assert set(reply.up) == {"phi", "stats"}
        assert set(reply.up["phi"]) == {"body", "classifier"}
    assert run.meter.total("train", "up") == run.meter.total("train", "down") == 2 * size


def test_without_personal_models_the_client_model_is_averaged_too(tmp_path: Path) -> None:
    run = Run(method(personal=False), tmp_path, (10, 10, 10))
    psi = run.server.psi
    run.round()
    each = [reply.up["psi"] for reply in run.spy.seen.values()]
    mean = tree.map(lambda x, *moved: x + sum(moved) / 3, psi, *each)
    tree.map(close, run.server.psi, mean)
    assert run.host.private(0, (1, 0)) == {}
    assert [a.client for a in answers(run)] == [None] * 6


def support(way: int, shot: int, d: int = 4) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (h_phi, h_psi, z_psi, y) of a support."""
    rng = Key(1).torch()
    n = way * shot
    h = [torch.randn(n, d, generator=rng, dtype=torch.float64) for _ in range(2)]
    z = torch.randn(n, way, generator=rng, dtype=torch.float64)
    return (*h, z, torch.arange(n) % way)  # type: ignore[return-value]


def test_the_transfer_is_exactly_zero_with_one_shot_as_printed() -> None:
    h_phi, h_psi, z, y = support(5, 1)

    def loss(h: Tensor, over: Any) -> tuple[Tensor, None]:
        return transfer_loss(h, h_psi, z, y, tau=1.0, denominator=over), None

    value, _, grad = value_and_grad(lambda h: loss(h, "same_class"), h_phi)
    assert float(value) == 0.0
    assert torch.equal(grad, torch.zeros_like(grad))
    value, _, grad = value_and_grad(lambda h: loss(h, "all"), h_phi)
    assert float(value) > 0.1
    assert float(grad.abs().max()) > 0.01


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e3])
def test_confidences_are_shares_of_a_class(scale: float) -> None:
    """Also where every probability of a class underflows."""
    for dtype in (torch.float32, torch.float64):
        _, _, z, y = support(3, 4)
        a = confidences((scale * z).to(dtype), y)
        torch.testing.assert_close(a.sum(0), torch.ones(12, dtype=dtype), rtol=1e-6, atol=0)
        assert float(a[y[:, None] != y[None]].abs().max()) == 0.0
        if scale == 0.0:
            torch.testing.assert_close(
                a[y[:, None] == y[None]], torch.full((48,), 0.25, dtype=dtype)
            )


@pytest.mark.parametrize("over", ["all", "same_class"])
def test_b_is_a_distribution_over_the_client_models_features(over: Any) -> None:
    h_phi, h_psi, _, y = support(3, 4)
    b = log_likelihoods(h_phi, h_psi, y, 0.5, over).exp()
    close(b.sum(1), torch.ones(12, dtype=torch.float64))
    assert bool((b[y[:, None] != y[None]] == 0).all()) == (over == "same_class")


def test_temperatures_lie_between_a_half_and_one() -> None:
    z = torch.tensor([[0.0, 0.0], [1.0, 3.0], [-1e6, 1e6], [1e6, -1e6], [200.0, -200.0]])
    for dtype in (torch.float32, torch.float64):
        t = temperatures(z.to(dtype), torch.zeros(5, dtype=torch.int64))
        assert t[3:].tolist() == [0.5, 0.5]
        assert float(t[2]) == 1.0
        want = [1 / (1 + math.exp(-math.exp(gap))) for gap in (0.0, 2.0)]
        torch.testing.assert_close(t[:2], torch.tensor(want, dtype=dtype))


def test_the_distillation_has_no_gradient_for_the_server_model() -> None:
    z = torch.randn(4, 3, generator=Key(1).torch(), requires_grad=True)
    mine = torch.randn(4, 3, generator=Key(2).torch(), requires_grad=True)
    loss = distillation_loss(z, mine, torch.tensor([0, 1, 2, 0]))
    theirs, own = torch.autograd.grad(loss, [z, mine], allow_unused=True)
    assert theirs is None
    assert float(own.abs().max()) > 0


def gradients(m: F2L, folder: Path) -> dict[str, Any]:
    at, drawn = begin(m, folder)
    both, e = {"phi": at.phi, "psi": at.psi}, drawn.steps[0][0]
    _, _, grad = value_and_grad(
        lambda w: (m.models.episode_loss(w, at.stats, e, Key(6).tensor()).loss, None), both
    )
    return {part: tree.digest(below) for part, below in grad.items()}


@pytest.mark.parametrize("backbone", ["mlp", "conv4"])
def test_neither_model_is_moved_by_what_it_teaches(backbone: str, tmp_path: Path) -> None:
    """The gradient by one has the same bits whatever the weight of the other's loss."""

    def of(**changes: Any) -> dict[str, Any]:
        return gradients(method(backbone, **changes), tmp_path)

    base = of()
    distilled, transferred, both = of(lambda_kd=0.9), of(lambda_mi=0.9), of(mi_gradient="both")
    assert base["phi"] == distilled["phi"]
    assert base["psi"] != distilled["psi"]
    assert base["psi"] == transferred["psi"] == both["psi"]
    assert len({base["phi"], transferred["phi"], both["phi"]}) == 3
    # The authors' distillation is no constant for the server-model.
    assert of(kd_targets="sum")["phi"] != of(kd_targets="sum", lambda_kd=0.9)["phi"]


@pytest.mark.parametrize(
    ("options", "adapts"),
    covering([{}, {"head_start": "prototypes"}, {"queries": "query_set"}], ["all", "head"]),
)
def test_second_order_gradients_are_finite_differences(
    options: dict[str, Any], adapts: Any, tmp_path: Path
) -> None:
    m = method(inner=InnerChoice(0.3, 2, order="second", adapts=adapts), **options)
    at, drawn = begin(m, tmp_path)
    e, seed = drawn.steps[0][0], Key(6).tensor()

    def loss(by: F2L, psi: Any) -> Tensor:
        return by.models.client_loss_after(at.phi, at.phi, psi, at.stats, e, seed).loss

    assert_slopes(lambda psi: loss(m, psi), at.psi)
    _, _, second = value_and_grad(lambda psi: (loss(m, psi), None), at.psi)

    def whole(psi: Any) -> tuple[Tensor, None]:
        return m.models.episode_loss({"phi": at.phi, "psi": psi}, at.stats, e, seed).loss, None

    _, _, joint = value_and_grad(whole, at.psi)
    tree.map(close, joint, second)
    first = replace(m, inner=replace(m.inner, order="first"))
    _, _, other = value_and_grad(lambda psi: (loss(first, psi), None), at.psi)
    assert any(not torch.allclose(a, b, rtol=1e-3) for a, b in
               zip(tree.leaves(second), tree.leaves(other), strict=True))  # fmt: skip


def answers(run: Run, eval_episodes: Any = None) -> list[Any]:
    clients = Clients(run.spy, run.ids, round=run.t, phase="evaluate")
    asked = run.episodic_test(6).eval_episodes if eval_episodes is None else eval_episodes
    return run.method.evaluate(run.server, clients, asked, Key(7))


@pytest.mark.slow
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("backbone", ["mlp", "conv4"])
def test_task_u_is_answered_by_client_u_mod_k(backbone: str, many: bool, tmp_path: Path) -> None:
    """With its own client-model, fine-tuned for the task and restored."""
    m = method(backbone, optimizer=SGD, inner=InnerChoice(0.3, test_steps=2))
    run = Run(m, tmp_path, (10, 10, 10))
    run.round()
    before = [tree.digest(run.host.private(k, (9, 0))) for k in run.ids]
    eval_episodes = run.eval_episodes(many)
    found = {a.eval_episode: a for a in answers(run, eval_episodes)}
    assert [found[u].client for u in range(len(eval_episodes))] == [
        run.ids[u % 3] for u in range(len(eval_episodes))
    ]
    server = run.server
    twin = Twin(server.phi["body"], server.phi["classifier"], server.stats).eval()
    for u in range(min(4, len(eval_episodes))):
        q, psi = eval_episodes[u], run.host.private(run.ids[u % 3], (9, 0))["psi"]
        with torch.no_grad():
            s, x = twin.features(q.support_x), twin.features(q.query_x)
        net = Client(m, psi)
        w = net.weights()
        for _ in range(2):
            loss = torch.nn.functional.cross_entropy(classified(net, w, s), q.support_y)
            grads = torch.autograd.grad(loss, list(w.values()))
            w = {n: (p - 0.3 * g).detach().requires_grad_() for (n, p), g in
                 zip(w.items(), grads, strict=True)}  # fmt: skip
        want = net.encode(w, s, x)[1] @ w["head.weight"].T + w["head.bias"]
        torch.testing.assert_close(found[u].logits.double(), want.detach(), rtol=1e-5, atol=1e-6)
    assert [tree.digest(run.host.private(k, (9, 0))) for k in run.ids] == before


def classified(net: Client, w: Any, s: Tensor) -> Tensor:
    return net.encode(w, s, s[:0])[0] @ w["head.weight"].T + w["head.bias"]


def test_all_clients_may_answer_every_task(tmp_path: Path) -> None:
    run = Run(method(test_clients="all"), tmp_path, (10, 10))
    run.round()
    assert sorted((a.eval_episode, a.client) for a in answers(run)) == [
        (u, k) for u in range(6) for k in run.ids
    ]


@pytest.mark.parametrize(
    "options", [{"mode": "official"}, {"evaluated": "server", "probe": "mean"}]
)
def test_a_probe_answers_on_the_server_model(options: dict[str, Any], tmp_path: Path) -> None:
    run = Run(method(**options), tmp_path, (10, 10))
    run.round()
    server = run.server
    twin = Twin(server.phi["body"], server.phi["classifier"], server.stats)
    for many in (False, True):
        eval_episodes = run.eval_episodes(many)
        found = run.answers(eval_episodes)
        assert_readout(FeatureProbe(run.method.reading.probe), twin, eval_episodes, found)


@pytest.mark.parametrize(
    ("queries", "alone"), [("support_context", True), ("alone", True), ("query_set", False)]
)
def test_a_query_is_answered_whatever_the_others_are(
    queries: Any, alone: bool, tmp_path: Path
) -> None:
    m = method(queries=queries)
    assert m.traits.transductive == (not alone)
    probed = method("conv4", queries=queries, evaluated="server", optimizer=SGD)
    assert not probed.traits.transductive
    at, _ = begin(m, tmp_path)
    rng = Key(8).torch()
    s, q = (torch.randn(n, 7, generator=rng, dtype=torch.float64) for n in (6, 5))
    y = torch.tensor([0, 1, 2, 0, 1, 2])

    def answer(rows: Tensor) -> Tensor:
        return m.client_model.answer(at.psi, EvalEpisode(s, y, rows, torch.arange(3)))

    whole = answer(q)
    turned = torch.tensor([0, 4, 2, 1, 3])
    torch.testing.assert_close(answer(q[turned]), whole[turned], rtol=1e-12, atol=1e-12)
    same = torch.allclose(answer(torch.cat([q[:1], 3 - q[1:]]))[0], whole[0], rtol=1e-10)
    assert same == alone


def test_a_head_of_prototypes_classifies_by_squared_distances(tmp_path: Path) -> None:
    m = method(head_start="prototypes", inner=InnerChoice(test_steps=0))
    assert m.traits.max_way is None
    at, _ = begin(m, tmp_path)
    s, q = (torch.randn(n, 7, generator=Key(n).torch(), dtype=torch.float64) for n in (8, 5))
    y = torch.arange(8) % 4  # a way that the head of the model does not have
    net = Client(m, at.psi)
    g_s, g_q = net.encode(net.weights(), s, q)
    c = torch.stack([g_s[y == k].mean(0) for k in range(4)])
    want = (-(torch.cdist(g_q, c) ** 2)).softmax(1)
    found = m.client_model.answer(at.psi, EvalEpisode(s, y, q, torch.arange(4)))
    close(found.softmax(1), want)


def test_modes_choose_what_is_not_said() -> None:
    strict, paper, code = method(), method(mode="paper"), method(mode="official")
    assert (strict.reading.mi_denominator, strict.reading.mi_tau) == ("all", 0.5)
    assert (paper.reading.mi_denominator, paper.reading.mi_tau) == ("same_class", 1.0)
    assert [m.reading.mi_gradient for m in (strict, paper, code)] == ["server", "both", "server"]
    assert strict.reading.mi_from == paper.reading.mi_from == "tuned"
    orders = [m.client_model.inner.order for m in (strict, paper, code)]
    assert orders == ["first", "second", "first"]
    small = {"transformer": strict.transformer}
    tuned = F2L(strict.model, SPEC, strict.classes, **small)  # the default
    assert tuned.reading == replace(strict.reading, lambda_mi=1.0)
    assert (tuned.server_steps, tuned.client_steps) == (
        Optimizer("adam", 1e-3, weight_decay=1e-4), Optimizer("sgd", 1e-3),
    )  # fmt: skip
    plain = F2L(strict.model, SPEC, strict.classes, "strict", **small)
    assert plain.server_steps == plain.client_steps == Optimizer("adam", 1e-3, weight_decay=1e-4)
    assert (plain.client_model.inner.lr, plain.client_model.inner.steps) == (0.01, 1)
    assert code.reading.evaluated == "server"
    assert (code.reading.weighting, code.reading.lambda_kd) == ("examples", 0.1)
    official = F2L(strict.model, SPEC, strict.classes, "official", **small)
    assert official.server_steps == Optimizer("sgd", 0.05, 0.9, 1e-5)
    assert official.client_steps == Optimizer("sgd", 1e-3)
    for m in (official, tuned):
        assert m.client_model.inner == InnerLoop(0.1, 5, 5, "first", "head")
    adam = replace(official, optimizer=OptimizerChoice("adam"), lambda_kd=0.0, mi_tau=0.2)
    assert adam.server_steps == Optimizer("adam")  # nothing of SGD's is left
    assert (adam.reading.lambda_kd, adam.reading.mi_tau) == (0.0, 0.2)


def test_the_code_has_other_optimisers_and_no_distillation_for_texts() -> None:
    words = Model(BiLSTM(2), LinearHead(WAY), (5, 4), table=torch.zeros(3, 4))
    code: dict[str, Any] = {"mode": "official", "optimizer": OptimizerChoice()}
    images = method(**code)
    texts = method(model=words, transformer=SetTransformer(2, hidden=5), **code)
    assert (images.reading.lambda_kd, texts.reading.lambda_kd) == (0.1, 0.0)
    assert replace(texts.reading, lambda_kd=0.1) == images.reading
    default = replace(texts, inner=InnerChoice()), replace(images, inner=InnerChoice())
    assert {m.client_model.inner for m in default} == {InnerLoop(0.1, 5, 5, "first", "head")}
    assert texts.server_steps == Optimizer("adam", 1e-3)
    assert texts.client_steps == Optimizer("sgd", 5e-3)
    for mode in ("tuned", "strict", "paper"):
        assert f2l_defaults(mode, text=True) == f2l_defaults(mode, text=False)


def test_a_probe_may_sit_a_test_wider_than_the_head_that_has_no_part_in_it() -> None:
    assert method().traits.max_test_way == method().traits.max_way == WAY
    probed = method(evaluated="server").traits
    assert (probed.max_way, probed.max_test_way) == (WAY, None)
    wide = {
        "split": {"base": ["0-4"], "novel": ["5-9"]},
        "episode": {"way": 3},
        "model": {"head": {"name": "linear", "way": 3}},
        "test": {"way": 5},
    }
    small = {"name": "f2l", "transformer": {"hidden": 8}}

    def setting(**changes: Any) -> PreparedRun:
        return PreparedRun(Config.of(merged(SMALL, wide, {"method": small}, changes)))

    assert setting(method={"name": "f2l", "evaluated": "server"}).test.ways[1] == 5
    with pytest.raises(ConfigError, match=r"test.way is 5; model.head.way is 3"):
        setting()
    with pytest.raises(ConfigError, match=r"episode.way is 4; model.head.way is 3"):
        setting(method={"name": "f2l", "evaluated": "server"}, episode={"way": 4})


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"mode": "code"}, "mode is 'code'. Valid"),
    ({"mi_denominator": "some"}, "mi_denominator is 'some'"),
    ({"queries": "everything"}, "queries is 'everything'"),
    ({"lambda_mi": 1.5}, "lambda_mi is 1.5 .* at most 1"),
    ({"lambda_kd": -0.1}, "lambda_kd is -0.1"),
    ({"mi_tau": 0.0}, "mi_tau is 0.0"),
    ({"transformer": SetTransformer(heads=4)}, "7 features are not divisible by 4 heads"),
    (
        {"mode": "official", "episode": EpisodeSpec(3, 1, 2)},
        "mi_loss is 'shots'.*episode.shot is 1",
    ),
    ({"local_steps": 0}, "local_steps is 0"),
    ({"test_clients": "one"}, "test_clients is 'one'"),
    ({"inner": InnerChoice(lr=-1.0)}, "lr is -1.0"),
    ({"optimizer": OptimizerChoice(lr=0.0)}, "lr is 0.0"),
    ({"probe": "nearest"}, "probe is 'nearest'"),
]


@pytest.mark.parametrize(("options", "text"), REFUSED)
def test_what_cannot_be_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        method(**options)


@pytest.mark.parametrize("head", [None, CosineHead(WAY)])
def test_the_client_models_head_is_one_linear_layer(head: Any) -> None:
    model = replace(method().model, head=head)
    with pytest.raises(ConfigError, match=r"set model\.head to linear"):
        method(model=model)


def test_a_client_that_returns_after_many_rounds_finds_its_own_state(tmp_path: Path) -> None:
    """Private states lie on the disk, and older versions are deleted round by round."""
    run = Federation(replace(METHODS["f2l"], local_steps=1), REFERENCE, tmp_path)

    def train(*cohort: int) -> None:
        run.train_unsealed(cohort)
        run.sealed = run.fleet.seal(run.round, ())

    train(1, 3)
    own = tree.digest(run.private(3))
    for _ in range(8):
        train(0)
    assert [path.name for path in (tmp_path / "clients" / "000003").iterdir()] == [
        "r000001-00.safetensors"
    ]
    later = host_of(run.method, tmp_path, run.key)  # of a process that begins now
    later.store.open(run.round, run.sealed)
    assert tree.digest(later.private(3, LATE)) == own
    train(3)
    (execution,) = [v for v in run.executions if v.client == 3 and v.exchange.version[0] == 10]
    assert tree.digest(execution.private) == own
    assert int(run.private(3)["optimizer"].step) == 2


PRIVATE: dict[str, Any] = {
    "model": {"head": {"name": "linear", "way": 5}},
    "method": {"name": "f2l", "local_steps": 2, "transformer": {"hidden": 8}},
    "episode": {"shot": 2},
}


@pytest.mark.slow
def test_a_resumed_run_ends_like_one_never_disturbed(tmp_path: Path) -> None:
    whole = finished(tmp_path / "whole", CHOOSING, PRIVATE)
    stopped(tmp_path / "stopped", 1, CHOOSING, PRIVATE)
    again = finished(tmp_path / "stopped", CHOOSING, PRIVATE)
    assert last_hash(tmp_path / "stopped") == last_hash(tmp_path / "whole")
    assert again.result() == whole.result()
    assert len(whole.result().clients) == 6


def test_the_codes_classifier_is_three_layers_in_torch() -> None:
    head = method(classifier="mlp").learner.head
    params = head.init(Key(1), 7, torch.float64)
    layers = [torch.nn.Linear(a, b).double() for a, b in ((7, 7), (7, 256), (256, 5))]
    for i, layer in enumerate(layers, 1):
        layer.load_state_dict(params[f"linear{i}"])
    h = torch.randn(4, 7, generator=Key(2).torch(), dtype=torch.float64)
    close(head.logits(params, h), layers[2](layers[1](layers[0](h).relu())))


def test_a_head_that_adam_learns_from_zero_is_warned_of_and_what_learns_is_not() -> None:
    """The default is warned of; prototypes, SGD, a probe, and labels that a head can know, not."""
    sgd = OptimizerChoice("sgd", 1e-3)
    for told, options in (
        (True, {}),
        (True, {"mode": "paper"}),
        (False, {"head_start": "prototypes"}),
        (False, {"client_optimizer": sgd}),
        (False, {"evaluated": "server"}),
        (False, {"mode": "official"}),
        (False, {"episode": replace(SPEC, labels="fixed")}),
    ):
        assert bool(method(**options).traits.warnings) is told, options
    found = PreparedRun(
        Config.of(merged(SMALL, {"method": {"name": "f2l", "mode": "strict"}}))
    ).notices()
    assert any("method.head_start to 'prototypes'" in text for text in found)
