"""The methods and the fleets, one line each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from conformance.synthetic_method import SyntheticMethod
from conformance.tutorial_method import FLProtoMomentum
from conformance.wire_messages import on_one_node
from fedshot.conformance.checks import REFERENCE, THREADS, VECTORISED
from fedshot.conformance.federation import FleetCase
from fedshot.conformance.small import CLASSES, CLIENTS, SHAPE
from fedshot.core.seeds import Key
from fedshot.data.episodes.episode import ClientData
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.fleets.threads import Threads
from fedshot.learners.local_training import LocalEpisodes, sample_episodes
from fedshot.learners.maml import InnerLoop
from fedshot.methods.base.fedavg_probe import FedAvgProbe
from fedshot.methods.base.fedbabu import FedBABU
from fedshot.methods.base.fedmeta import FedMeta
from fedshot.methods.base.fl_proto import FLProto
from fedshot.methods.base.fsl_local import FSLLocal
from fedshot.methods.f2l.f2l import F2L
from fedshot.methods.f2l.set_transformer import SetTransformer
from fedshot.methods.fedfsl.fedfsl_mi import FedFSLMI
from fedshot.methods.fedfsl.fedfsl_mi_adv import FedFSLMIAdv
from fedshot.methods.fedfsl.fedfsl_naive import FedFSLNaive
from fedshot.methods.fedfsl.fedfsl_prox import FedFSLProx
from fedshot.methods.frl.frl import FRL
from fedshot.methods.frl.frl_fedavg import FRLFedAvg
from fedshot.methods.frl.frl_finetune import FRLFinetune
from fedshot.methods.frl.frl_frozen import FRLFrozen
from fedshot.methods.frl.frl_one_shot import FRLOneShot
from fedshot.methods.frl.frl_personal import FRLPersonal
from fedshot.methods.one_round.fed3r import FED3R
from fedshot.methods.one_round.fedcgs import FedCGS
from fedshot.methods.one_round.fedncm import FedNCM
from fedshot.methods.personal.ditto import Ditto
from fedshot.methods.personal.fedavg import FedAvg
from fedshot.methods.personal.fedfomo import FedFomo
from fedshot.methods.personal.fedproto import FedProto
from fedshot.methods.personal.fedprox import FedProx
from fedshot.methods.personal.fedrep import FedRep
from fedshot.methods.personal.heur_fedamp import HeurFedAMP
from fedshot.methods.personal.per_fedavg import PerFedAvg
from fedshot.methods.personal.pfedfsl import PFedFSL
from fedshot.methods.personal.pfedme import PFedMe
from fedshot.nn.heads import LinearHead
from fedshot.nn.models.backbones import Conv4
from fedshot.nn.models.model import Model
from fedshot.nn.optim import Optimizer
from fedshot.protocol.method import Method

EPISODE = EpisodeSpec(way=3, shot=1, query=2)
BODY = Model(Conv4(width=16, dropout=0.1), None, SHAPE)  # norm_policy "running"
HEADED = Model(Conv4(width=16, dropout=0.1), LinearHead(way=3), SHAPE)
WIDE = Model(Conv4(width=16, dropout=0.1), LinearHead(way=CLASSES), SHAPE)
JOINED = replace(HEADED, norm_policy="group")
HALVES = EpisodeSpec(way=3, shot=1, query=1)  # how a client of few-round learning divides its data
PAIRS = EpisodeSpec(way=3, shot=2, query=1)  # for what compares one shot with the next
SMALL = SetTransformer(heads=2, hidden=8)
OWN = replace(BODY, norm_policy="support")
INNER = InnerLoop(steps=1, test_steps=2)
BASE = tuple(range(CLASSES))


class UnevenProto(FLProto):
    """FL-Proto where larger clients take more episodes, so that the weights differ."""

    def draw(self, data: ClientData, key: Key) -> LocalEpisodes:
        return sample_episodes(data, self.episode, 1 + data.n // 16 % 3, 1, key)


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
    "fedfsl_mi_adv, heads adapt": FedFSLMIAdv(
        HEADED,
        EPISODE,
        reference="exclusive",
        inner=replace(INNER, adapts="head", order="second"),
        local_steps=2,
    ),
    "fedfsl_mi_adv, first version": FedFSLMIAdv(
        HEADED,
        EPISODE,
        mode="v1",
        weigh_by="examples",
        optimizer_state="keep",
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
    "frl": FRL(BODY, HALVES, BASE, inner_rounds=2),
    "frl, linear": FRL(WIDE, HALVES, BASE, variant="linear", inner_rounds=1),
    "frl, official": FRL(BODY, HALVES, BASE, mode="official", inner_rounds=2),
    "frl_finetune": FRLFinetune(JOINED, EPISODE, BASE, test_rounds=1, batch=6),
    "frl_frozen": FRLFrozen(BODY, EPISODE, BASE, batch=6),
    "frl_one_shot": FRLOneShot(JOINED, EPISODE, BASE, test_rounds=1, batch=6, candidates=0, keep=1),
    "frl_personal": FRLPersonal(replace(BODY, norm_policy="group"), HALVES, BASE, test_rounds=1),
    "frl_personal, linear": FRLPersonal(WIDE, HALVES, BASE, variant="linear", test_rounds=1),
    "f2l": F2L(HEADED, EPISODE, BASE, local_steps=2, transformer=SMALL),
    "f2l, official": F2L(
        HEADED, PAIRS, BASE, "official", evaluated="client", local_steps=1, transformer=SMALL
    ),
    "f2l, all averaged": F2L(
        HEADED,
        EPISODE,
        BASE,
        "paper",
        personal=False,
        head_start="prototypes",
        local_steps=1,
        transformer=SMALL,
    ),
    "fsl_local, maml": FSLLocal(HEADED, EPISODE, "maml", INNER, local_steps=1),
    "fsl_local, proto": FSLLocal(BODY, EPISODE, "proto", local_steps=2, test_clients="all"),
    "fedavg": FedAvg(BODY, EPISODE, BASE, local_steps=2),
    "fedprox, batches": FedProx(BODY, EPISODE, BASE, mu=0.1, local_steps=1, batch=10),
    "pfedfsl": PFedFSL(OWN, EPISODE, BASE, clients=CLIENTS, m=2, delay=0, local_steps=2),
    "pfedfsl, literally": PFedFSL(
        BODY,
        EPISODE,
        BASE,
        clients=CLIENTS,
        mode="paper",
        m=2,
        delay=1,
        local_steps=1,
        batch=10,
    ),
    "pfedfsl, without zeros": PFedFSL(
        OWN, EPISODE, BASE, clients=CLIENTS, m=2, delay=0, local_steps=1, l1="proximal", iota=0.3
    ),
    "per_fedavg": PerFedAvg(BODY, EPISODE, BASE, local_steps=1, beta=0.05),
    "per_fedavg, first order": PerFedAvg(
        OWN, EPISODE, BASE, order="first", local_steps=2, batch=6, beta=0.05
    ),
    "pfedme": PFedMe(BODY, EPISODE, BASE, local_steps=1, inner_steps=2, beta=0.5),
    "ditto": Ditto(BODY, EPISODE, BASE, local_steps=1, personal_steps=1),
    "fedrep": FedRep(BODY, EPISODE, BASE, local_steps=1, head_steps=2),
    "fedfomo": FedFomo(BODY, EPISODE, BASE, clients=CLIENTS, m=2, local_steps=1),
    "heur_fedamp": HeurFedAMP(OWN, EPISODE, BASE, local_steps=1),
    "fedproto": FedProto(OWN, EPISODE, BASE, local_steps=1),
    "fedncm": FedNCM(BODY, EPISODE, BASE),
    "fedcgs": FedCGS(BODY, EPISODE, BASE),
    "fed3r": FED3R(BODY, EPISODE, BASE),
    "fl_proto_momentum": FLProtoMomentum(BODY, EPISODE, local_steps=2),
    "synthetic": SyntheticMethod(BODY, EPISODE, clients=CLIENTS, classes=CLASSES),
}

UNTRAINED: dict[type[Any], str] = {
    FRLFedAvg: "its rounds exchange nothing; see tests/methods/frl/test_frl_baselines.py",
}

SECOND_FORMS = {
    "f2l, official",
    "f2l, all averaged",
    "fl_proto, unequal weights",
    "fedfsl_mi, exclusive",
    "fedfsl_mi_adv, first version",
    "fedavg_probe, then prototypes",
    "fedmeta, learned steps",
    "fsl_local, proto",
    "frl, linear",
    "frl, official",
    "frl_personal, linear",
    "fedprox, batches",
    "per_fedavg, first order",
    "pfedfsl, literally",
    "pfedfsl, without zeros",
}
assert METHODS.keys() > SECOND_FORMS

REFUSED = {
    ("pfedfsl, without zeros", "vectorised"): "packed uploads of a stack differ in size; a run is "
    "refused in fedshot.runs.prepare",
}

# One of each kind: averaged, private states, rounds inside a round, a bank of models.
WHOLE = {"fl_proto", "fedfsl_mi_adv", "fsl_local, maml", "f2l", "frl", "pfedfsl", "synthetic"}
assert METHODS.keys() > WHOLE

FLOWER = FleetCase("flower", on_one_node)
FLEETS: tuple[FleetCase, ...] = (
    REFERENCE,
    THREADS,
    FleetCase("threads, five workers", lambda host: Threads(host, 5), slow=True),
    FLOWER,
    VECTORISED,
)
