"""Attacks: what dishonest clients send, and that it is the same on every fleet."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conformance.cases import METHODS
from fedshot.conformance.small import CLIENTS, DATASET, PARTITION, host_of
from fedshot.core import tree
from fedshot.core.errors import ConfigError
from fedshot.core.seeds import Key
from fedshot.data.dataset import Dataset
from fedshot.data.episodes.episode import ClientData
from fedshot.data.tokens import Tokens
from fedshot.fleets.attacks import (
    ATTACKS,
    Attack,
    Backdoor,
    FreeRider,
    GaussianNoise,
    LittleIsEnough,
    MinMax,
    PrototypePoisoning,
    Scaling,
    SignFlip,
    z_max,
)
from fedshot.fleets.guard import Guard
from fedshot.fleets.host import Host
from fedshot.fleets.liars import Colluding, Liars
from fedshot.fleets.poisoned_data import flipped, stamped, triggered
from fedshot.fleets.sequential import Sequential
from fedshot.fleets.threads import Threads
from fedshot.fleets.vectorised import Vectorised
from fedshot.methods.base.fl_proto import FLProto
from fedshot.methods.frl.frl import FRL
from fedshot.nn.models.backbones import MLP
from fedshot.nn.models.model import Model
from fedshot.protocol.aggregators import AGGREGATORS, Aggregator, CoordinateMedian, PlainMean
from fedshot.protocol.client_vectors import ClientVectors
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Arrival, ClientWork, Exchange, Fleet, Reply
from fedshot.protocol.method import Method
from fedshot.protocol.reducers import Gather, Mean, Reducer, Sum
from fedshot.protocol.robust_reducers import Aggregation

KEY = Key(0)
MODEL = Model(MLP((5,)), None, (8, 8, 1))
PROTO = FLProto(MODEL, METHODS["fl_proto"].episode, local_steps=1)
ROUNDS = FRL(MODEL, METHODS["frl"].episode, tuple(range(6)), variant="proto", inner_rounds=2)
LIARS = (1, 4)


def lied(attack: Attack, x: Any) -> Any:
    return attack.change(torch.as_tensor(x), KEY)


def vectors(rows: Any) -> ClientVectors:
    found = ClientVectors(len(rows), rows.shape[1], torch.float64)
    for k, row in enumerate(torch.as_tensor(rows)):
        found.add(k, row, 1.0)
    return found


def drawn(n: int, d: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=(n, d))


def test_each_lie_is_the_change_that_its_name_says() -> None:
    x = torch.arange(4.0)
    assert torch.equal(lied(SignFlip(factor=2.0), x), -2 * x)
    assert torch.equal(lied(Scaling(factor=3.0), x), 3 * x)
    assert torch.equal(lied(FreeRider(), x), 0 * x)
    assert torch.equal(lied(Backdoor(factor=4.0), x), 4 * x)
    noise = lied(GaussianNoise(factor=2.0), x)
    assert float(noise.norm()) == pytest.approx(2 * float(x.norm()))
    assert torch.equal(noise, lied(GaussianNoise(factor=2.0), x))
    assert abs(float(torch.nn.functional.cosine_similarity(noise, x, 0))) < 0.99


def test_little_is_enough_moves_each_coordinate_by_z_deviations() -> None:
    x = drawn(8, 5)
    expected = x.mean(0) - 1.5 * x.std(0)
    np.testing.assert_allclose(LittleIsEnough().collude(vectors(x), 2), expected)
    z = z_max(10, 2)
    np.testing.assert_allclose(
        LittleIsEnough(z=None).collude(vectors(x), 2), x.mean(0) - z * x.std(0)
    )
    # 24 of 50: s = 26 - 24 = 2 honest clients are missing for a majority, of 26.
    assert z_max(50, 24) == pytest.approx(statistics.NormalDist().inv_cdf(24 / 26))


def test_z_is_finite_also_where_liars_are_the_majority() -> None:
    assert z_max(10, 8) == pytest.approx(statistics.NormalDist().inv_cdf(1.5 / 2))
    assert z_max(2, 1) == 0
    x = drawn(1, 4)
    np.testing.assert_allclose(LittleIsEnough(z=None).collude(vectors(x), 3), x[0])


@pytest.mark.parametrize("n", [2, 3, 9])
def test_min_max_goes_as_far_as_two_honest_clients_are_apart(n: int) -> None:
    x = drawn(n, 6, seed=n)
    found = MinMax().collude(vectors(x), 1).numpy()
    widest = max(float(np.linalg.norm(a - b)) for a in x for b in x)

    def farthest(z: Any) -> float:
        return float(np.linalg.norm(x - z, axis=1).max())

    mean = x.mean(0)
    assert farthest(found) == pytest.approx(widest)
    assert farthest(mean + 1.001 * (found - mean)) > widest
    direction = (mean - found) / np.linalg.norm(mean - found)
    np.testing.assert_allclose(direction, x.std(0) / np.linalg.norm(x.std(0)), atol=1e-9)


def test_prototype_poisoning_moves_each_mean_to_the_next_class() -> None:
    means = torch.as_tensor(drawn(4, 3))
    counts = torch.tensor([2, 0, 3, 1])
    lie = PrototypePoisoning().sums(counts[:, None] * means, counts, KEY)
    for c, following in ((0, 2), (2, 3), (3, 0)):
        torch.testing.assert_close(lie[c] / counts[c], means[following])
    assert not lie[1].any()


def data(client: int) -> ClientData:
    return PARTITION.data(DATASET, client)


def test_a_label_flip_keeps_the_counts_and_changes_half_of_the_labels() -> None:
    for client in range(CLIENTS):
        honest, lie = data(client), flipped(data(client))
        y, labels = DATASET.y[honest.indices], lie.dataset.y
        assert np.array_equal(np.bincount(y), np.bincount(labels))
        assert 0.3 <= float((y != labels).mean()) <= 0.6
        assert np.array_equal(lie.dataset.x, DATASET.pixels[honest.indices])


def test_a_backdoor_puts_the_trigger_on_examples_of_other_classes() -> None:
    lie = triggered(data(0), KEY.numpy())
    first = lie.dataset.y == 0
    corner = lie.dataset.pixels[:, -1:, -1:]
    assert (corner[first] == 255).all()
    assert np.array_equal(lie.dataset.x[~first], DATASET.pixels[data(0).indices][~first])
    plain = {image.tobytes() for image in DATASET.pixels[DATASET.y == 0]}
    assert not any(image.tobytes() in plain for image in lie.dataset.pixels[first])


def test_texts_and_features_have_triggers_too() -> None:
    table = np.vstack([np.zeros(2), drawn(4, 2)]).astype(np.float32)
    texts = Tokens(np.array([2, 3, 2, 2], np.int32), np.array([0, 2, 2, 4]), table, 4)
    found = triggered(
        ClientData(Dataset("t", texts, np.array([0, 0, 1]), ("a", "b")), np.arange(3)), KEY.numpy()
    )
    tokens = found.dataset.x
    assert isinstance(tokens, Tokens)
    assert tokens.rows(np.arange(3)).tolist() == [[4, 2], [4, 2], [2, 2]]
    assert texts.ids.tolist() == [2, 3, 2, 2]  # the data stay as they are
    rows = Dataset("f", drawn(3, 32).astype(np.float32), np.array([0, 0, 1]), ("a", "b"))
    x = stamped(torch.from_numpy(rows.array), rows)
    assert torch.equal(x[:, :2], torch.from_numpy(rows.array).abs().amax(1)[:, None].expand(3, 2))
    assert torch.equal(x[:, 2:], torch.from_numpy(rows.array)[:, 2:])


class Trained:
    """A few rounds of a method with dishonest clients."""

    def __init__(
        self, folder: Path, attack: Attack | None, method: Method[Any] = PROTO, *,
        build: Callable[[Host], Fleet] = Sequential,
        rule: Aggregator = PlainMean(), rounds: int = 2,
    ) -> None:  # fmt: skip
        host = host_of(method, folder, KEY)
        self.liars = None if attack is None else Liars(attack, KEY, CLIENTS)
        host.liars = self.liars
        fleet = build(host)
        if self.liars is not None:
            fleet = Colluding(fleet, self.liars)
        self.server: Any = method.init(KEY.at("init"))
        self.aggregation = Aggregation(rule, folder)
        self.faults: list[Any] = []
        for round in range(1, rounds + 1):
            clients = Clients(
                Guard(fleet), range(CLIENTS), round=round, aggregation=self.aggregation
            )
            self.server, _ = method.round(self.server, clients, KEY.at("round", round))
            self.faults += clients.faults
        if self.liars is not None:
            self.liars.check_changed()

    @property
    def digest(self) -> str:
        return tree.digest(self.server)


def of(name: str, **options: Any) -> Attack:
    return ATTACKS[name](clients=LIARS, **options)


OTHERS = [name for name in ATTACKS if name != "sign_flip"]


def flower(host: Host) -> Fleet:
    from conformance.wire_messages import on_one_node

    return on_one_node(host)


@pytest.mark.parametrize(
    "name", ["sign_flip", *(pytest.param(one, marks=pytest.mark.slow) for one in OTHERS)]
)
def test_a_lie_is_admitted_and_changes_the_model_the_same_on_every_fleet(
    name: str, tmp_path: Path
) -> None:
    method = ROUNDS if name == "prototypes" else PROTO
    honest = Trained(tmp_path / "honest", None, method)
    here = Trained(tmp_path / "here", of(name), method)
    assert here.faults == []
    assert here.digest != honest.digest
    for place, build in (("threads", lambda host: Threads(host, 3)), ("flower", flower)):
        assert Trained(tmp_path / place, of(name), method, build=build).digest == here.digest
    stacked = Trained(tmp_path / "stacks", of(name), method, build=lambda host: Vectorised(host, 3))
    torch.testing.assert_close(
        tree.flat(stacked.server[0]), tree.flat(here.server[0]), rtol=1e-3, atol=1e-4
    )


def test_clients_lie_from_a_round_on_and_in_one_exchange_alone(tmp_path: Path) -> None:
    honest = Trained(tmp_path / "a", None)
    assert Trained(tmp_path / "b", of("sign_flip", from_round=3)).digest == honest.digest
    assert Trained(tmp_path / "c", of("sign_flip", from_round=2)).digest != honest.digest
    rounds = {n: Trained(tmp_path / f"r{n}", of("sign_flip", exchange=n), ROUNDS, rounds=1).digest
              for n in range(4)}  # fmt: skip
    assert len({*rounds.values(), Trained(tmp_path / "d", None, ROUNDS, rounds=1).digest}) == 5
    assert Trained(tmp_path / "e", of("sign_flip", exchange=4), ROUNDS, rounds=1).digest


def test_a_fraction_that_is_no_client_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"attack\.fraction is 0\.05, which of 5 clients is none"):
        Liars(SignFlip(fraction=0.05), Key(0), 5)
    assert Liars(SignFlip(fraction=0.0), Key(0), 5).clients == frozenset()


def test_the_seed_draws_as_many_liars_as_the_fraction_says() -> None:
    drawn = [Liars(SignFlip(fraction=0.3), Key(seed), 20).clients for seed in range(5)]
    assert {len(clients) for clients in drawn} == {6}
    assert len(set(drawn)) > 1
    assert drawn[0] == Liars(SignFlip(fraction=0.3), Key(0), 20).clients


def test_an_attack_on_nobody_or_on_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"attack\.clients names client 9, but there are 6"):
        Liars(SignFlip(clients=(2, 9)), KEY, CLIENTS)
    with pytest.raises(ConfigError, match=r"attack\.name has no effect"):
        Trained(tmp_path, of("prototypes"))


def exchange(down: Any, **reduce: Reducer) -> Exchange:
    return Exchange(ClientWork(PROTO, "train"), down, (1,), reduce, KEY, (1, 0))


def test_class_sums_and_models_are_not_bounded_by_the_weight_of_the_client() -> None:
    sums, counts = torch.full((2, 3), 1000.0), torch.tensor([5, 0])
    asked = exchange({}, sums=Sum(sums), counts=Sum(counts), theta=Mean(sums))
    reply = Reply({"sums": sums, "counts": counts, "theta": sums}, {}, 1024.0)
    up = Liars(of("sign_flip"), KEY, CLIENTS).reply(asked, 1, {}, reply).up
    assert torch.equal(tree.leaves(up["sums"])[0], -5 * sums)
    assert torch.equal(tree.leaves(up["theta"])[0], torch.full((2, 3), -64.0))


def test_a_message_that_is_one_tensor_can_be_what_a_client_started_from() -> None:
    reply = Reply({"model": torch.ones(2)}, {}, 1.0)
    asked = exchange(torch.zeros(2), model=Gather())
    up = Liars(of("sign_flip"), KEY, CLIENTS).reply(asked, 1, torch.zeros(2), reply).up
    assert torch.equal(tree.leaves(up["model"])[0], torch.full((2,), -5.0))


def test_a_liar_that_cannot_lie_in_a_round_does_not_stop_the_run() -> None:
    """A liar of one class has none to exchange, and colluding clients may be all that replied."""
    for held, stops in ((1, False), (2, True)):
        counts = torch.tensor([1] * held + [0] * (2 - held))
        sums = torch.ones(2, 3) * counts[:, None]  # two equal means: an exchange changes nothing
        asked = exchange({}, sums=Sum(sums), counts=Sum(counts))
        liars = Liars(of("prototypes"), KEY, CLIENTS)
        liars.reply(asked, 1, {}, Reply({"sums": sums, "counts": counts}, {}, 1.0))
        assert liars.asked == stops
    liars = Liars(of("min_max"), KEY, CLIENTS)
    reply = Reply({"theta": torch.ones(2)}, {}, 1.0)
    asked = exchange({}, theta=Mean(torch.ones(2)))
    assert len(list(liars.collude(asked, iter([Arrival(1, reply)])))) == 1
    liars.check_changed()


def test_a_median_holds_against_a_flip_that_turns_the_mean(tmp_path: Path) -> None:
    """The change of the weights with two liars of six, against the change without any."""
    start = PROTO.init(KEY.at("init"))

    def step(name: str, attack: Attack | None, rule: Aggregator) -> Any:
        found = Trained(tmp_path / name, attack, rule=rule, rounds=1)
        return tree.flat(found.server.theta) - tree.flat(start.theta)

    lie = of("sign_flip", factor=20.0)
    honest = step("a", None, PlainMean())
    for name, rule, sign in (("b", PlainMean(), -1), ("c", CoordinateMedian(), 1)):
        cosine = torch.nn.functional.cosine_similarity(step(name, lie, rule), honest, 0)
        assert sign * float(cosine) > 0.1


def test_a_liar_stands_out_in_the_record(tmp_path: Path) -> None:
    found = {}
    for name, attack in (("lie", of("sign_flip", factor=7.0)), ("honest", None)):
        trained = Trained(tmp_path / name, attack, rule=CoordinateMedian(), rounds=1)
        (found[name],) = trained.aggregation.measured
    for c, norm in found["honest"].norms.items():
        assert found["lie"].norms[c] == pytest.approx((7 if c in LIARS else 1) * norm, rel=1e-5)
        assert -1 <= found["lie"].cosines[c] <= 1


# Methods without a mean: models kept apart, sums of products, or nothing that is combined.
APART = {"fedcgs", "fed3r", "pfedfsl", "pfedfsl, literally", "fedfomo",
         "pfedfsl, without zeros", "heur_fedamp"}  # fmt: skip
# Each method under one attack, in turn; the other attacks are for a change of attacks.
PAIRS = [pytest.param(method, attack, [*AGGREGATORS][(i + k) % len(AGGREGATORS)],
                      marks=() if k == i % len(ATTACKS) else pytest.mark.exhaustive)
         for i, method in enumerate(METHODS) for k, attack in enumerate(ATTACKS)]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "attack", "rule"), PAIRS)
def test_every_method_trains_under_attack_and_aggregators_or_is_refused(
    name: str, attack: str, rule: str, tmp_path: Path
) -> None:
    lie = ATTACKS[attack](clients=(1,))
    reason = ""
    try:
        trained = Trained(tmp_path, lie, METHODS[name], rule=AGGREGATORS[rule](), rounds=1)
    except ConfigError as error:
        reason = str(error)
    if reason:
        refused = "there is no mean that a robust one could replace" in reason
        assert refused or "attack.name has no effect" in reason
        assert not (refused and rule == "mean")
        return
    assert trained.faults == []
    assert rule == "mean" or name not in APART
    before = tree.leaves(METHODS[name].init(KEY.at("init")))
    for leaf, first in zip(tree.leaves(trained.server), before, strict=True):
        assert not torch.isfinite(first).all() or torch.isfinite(leaf).all()
