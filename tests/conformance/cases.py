"""The methods and the fleets, one line each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from conformance.letters import by_letter
from conformance.patchwork import Patchwork
from conformance.small import CLASSES, CLIENTS, SHAPE, Home
from fedshot.data import ClientData, EpisodeSpec
from fedshot.fleets import Sequential, Threads, Vectorised
from fedshot.keys import Key
from fedshot.methods import (
    FedAvgProbe,
    FedBABU,
    FedFSLMI,
    FedFSLMIAdv,
    FedFSLNaive,
    FedFSLProx,
    FedMeta,
    FLProto,
    FSLLocal,
)
from fedshot.nn import Conv4, InnerLoop, Lessons, LinearHead, Model, Optimizer, draw_lessons
from fedshot.protocol import Fleet, Method

EPISODE = EpisodeSpec(way=3, shot=1, query=2)
BODY = Model(Conv4(width=16, dropout=0.1), None, SHAPE)  # norm_policy "running"
HEADED = Model(Conv4(width=16, dropout=0.1), LinearHead(way=3), SHAPE)
INNER = InnerLoop(steps=1, test_steps=2)
BASE = tuple(range(CLASSES))


class UnevenProto(FLProto):
    """FL-Proto where larger clients take more episodes, so that the weights differ."""

    def draw(self, data: ClientData, key: Key) -> Lessons:
        return draw_lessons(data, self.episode, 1 + data.n // 16 % 3, 1, key)


@dataclass(frozen=True)
class FleetCase:
    """A fleet, and how closely it follows the reference.

    `exact`: it runs the same kernel on a CPU, so the bits agree. Where the arithmetic is regrouped
    they agree to `rtol` and `atol` in float64.
    """

    name: str
    build: Callable[[Home], Fleet]
    exact: bool = True
    rtol: float = 0.0
    atol: float = 0.0
    slow: bool = False  # left to the slow suite whole


METHODS: dict[str, Method[Any]] = {
    "fl_proto": FLProto(BODY, EPISODE, local_steps=2),
    "fl_proto, unequal weights": UnevenProto(BODY, EPISODE),
    "fedfsl_naive": FedFSLNaive(HEADED, EPISODE, INNER, local_steps=2),
    "fedfsl_prox, common questions": FedFSLProx(
        HEADED,
        EPISODE,
        inner=INNER,
        local_steps=2,
        optimizer=Optimizer("sgd", 0.05),
        common_questions=2,
    ),
    "fedfsl_mi": FedFSLMI(HEADED, EPISODE, inner=INNER, local_steps=2),
    "fedfsl_mi, exclusive": FedFSLMI(
        HEADED, EPISODE, reference="exclusive", mode="v1", inner=INNER, local_steps=2
    ),
    "fedfsl_mi_adv": FedFSLMIAdv(HEADED, EPISODE, inner=INNER, local_steps=2),
    "fedfsl_mi_adv, first version": FedFSLMIAdv(
        HEADED,
        EPISODE,
        mode="v1",
        second_head="persistent",
        discrepancy="js",
        inner=INNER,
        local_steps=2,
    ),
    "fedavg_probe": FedAvgProbe(BODY, EPISODE, BASE, "ridge", local_steps=2, batch=6),
    "fedavg_probe, then prototypes": FedAvgProbe(
        BODY, EPISODE, BASE, classifier="cosine", local_steps=2, batch=6, classify_rounds=1
    ),
    "fedbabu": FedBABU(BODY, EPISODE, BASE, local_steps=2, batch=6, finetune_steps=5),
    "fedmeta": FedMeta(HEADED, EPISODE, INNER, episodes=2),
    "fedmeta, learned steps": FedMeta(HEADED, EPISODE, INNER, learned_steps=True, episodes=2),
    "fsl_local, maml": FSLLocal(HEADED, EPISODE, "maml", INNER, local_steps=1),
    "fsl_local, proto": FSLLocal(BODY, EPISODE, "proto", local_steps=2, answer_by="all"),
    "patchwork": Patchwork(BODY, EPISODE, clients=CLIENTS, classes=CLASSES),
}

SECOND_FORMS = {
    "fl_proto, unequal weights",
    "fedfsl_mi, exclusive",
    "fedfsl_mi_adv, first version",
    "fedavg_probe, then prototypes",
    "fedmeta, learned steps",
    "fsl_local, proto",
}
assert METHODS.keys() > SECOND_FORMS

REFERENCE = FleetCase("sequential", lambda home: Sequential(home.host))
FLEETS: tuple[FleetCase, ...] = (
    REFERENCE,
    FleetCase("threads", lambda home: Threads(home.host, 2)),
    FleetCase("threads, five workers", lambda home: Threads(home.host, 5), slow=True),
    FleetCase("by letter", by_letter),
    FleetCase("vectorised", lambda home: Vectorised(home.host, 3), False, 1e-6, 1e-9),
)
