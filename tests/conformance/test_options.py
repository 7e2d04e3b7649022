"""No option is without effect: each, changed alone, changes what a run comes to.

Of all methods but `frl_fedavg`, whose rounds of training do nothing.

What a value means is for the oracles to say; here it is that it arrives. Of words each gives a
result of its own, and null that of one of them.
"""

from __future__ import annotations

import hashlib
import typing
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from conformance.cases import METHODS, OWN, PAIRS, REFERENCE, WIDE
from fedshot.conformance.federation import Federation
from fedshot.conformance.small import CLASSES, DATASET
from fedshot.core import tree
from fedshot.core.seeds import Key
from fedshot.data.episodes.augment import Augment
from fedshot.data.episodes.group_sampler import GroupSampler
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.evaluation.episodic_test import EpisodicTest
from fedshot.methods.f2l.readings import OptimizerChoice
from fedshot.methods.f2l.set_transformer import SetTransformer
from fedshot.nn.models.backbones import MLP, Conv4
from fedshot.nn.optim import Optimizer
from fedshot.protocol.method import Method

METHOD_TESTS = Path(__file__).parents[1] / "methods"
PERCEPTRON = MLP((6,))

NOT_ASKED = {"model", "classes", "clients", "transformer.dropout"}
"""What a setting gives a method, and what acts on its own."""

OTHER: dict[str, Any] = {
    "episode.augment": Augment(flip=True),
    "local_steps": 3,
    "episodes_per_step": 2,
    "batch": 5,
    "optimizer": Optimizer("sgd", 0.2),
    "inner.lr": 0.3,
    "inner.steps": 3,
    "inner.test_steps": 4,
    "inner_lr": 0.3,
    "inner_batch": 3,
    "inner_rounds": 3,
    "test_rounds": 3,
    "common_questions": 3,
    "decay": 0.5,
    "decay_round": 1,
    "prepare_steps": 2,
    "lambda_prox": 3.0,
}
"""Values that no case has, by the name of the option."""

OF: dict[str, dict[str, Any]] = {
    "f2l": {
        "optimizer": OptimizerChoice("sgd", 0.2),
        "client_optimizer": OptimizerChoice("sgd", 0.2),
        "lambda_mi": 0.9,
        "lambda_kd": 0.9,
        "mi_tau": 5.0,
        "transformer": SetTransformer(heads=1, hidden=8),
    },
    "fedavg_probe": {
        "logistic_c": 0.01,
        "ridge_lambda": 100.0,
        "scale": 2.0,
        "decay_rounds": 2,
        "classify_rounds": 1,
        "meta_optimizer": Optimizer("sgd", 0.2),
    },
    "fedbabu": {
        "logistic_c": 0.01, "ridge_lambda": 100.0, "finetune_lr": 0.5, "finetune_steps": 2,
    },
    "fedfomo": {"m": 3, "validation_share": 0.4, "epsilon": 0.9, "epsilon_decay": 0.3},
    "fedfsl_mi": {"gamma": 0.7, "epsilon": 0.01},
    "fedfsl_mi_adv": {
        "gamma": 0.7, "epsilon": 0.01, "eta": 0.7, "lambda_adv": 0.7, "min_prob": 0.2,
        "max_grad_norm": 0.1,
    },
    "fedfsl_prox": {"mu": 3.0},
    "fedmeta": {"episodes": 3},
    "fedproto": {"lambda_proto": 3.0},
    "fedprox": {"mu": 3.0},
    "fedrep": {"head_steps": 3},
    "ditto": {"personal_steps": 2},
    "fedcgs": {"shrinkage": 0.9},
    "fed3r": {"ridge_lambda": 100.0},
    "frl": {"gamma": 0.5},
    "frl_one_shot": {"candidates": 8, "keep": 2, "holdout": 0.6},
    "heur_fedamp": {"sigma": 0.1, "self_weight": 0.1},
    "per_fedavg": {"beta": 0.5, "delta": 0.1, "test_steps": 3},
    "pfedfsl": {"m": 3, "iota": 0.3, "delay": 5, "temperature": 9.0},
    "pfedme": {"inner_steps": 3, "eta": 0.002, "beta": 0.9},
}  # fmt: skip
"""Values of a method's own options."""

FAST = {"optimizer": Optimizer("sgd", 0.5), "local_steps": 3}  # so that a model leaves the others
HEAD = {"model": replace(WIDE, backbone=PERCEPTRON)}

WHERE: dict[tuple[str, str], dict[str, Any]] = {
    ("f2l", "mode"): {"episode": PAIRS},
    ("f2l", "mi_loss"): {"episode": PAIRS},
    ("f2l", "mi_from"): {"mode": "strict"},  # if the head alone adapts, features stay
    ("f2l", "probe"): {"evaluated": "server"},
    ("fedavg_probe", "episodes_per_step"): {"classify_rounds": 1},
    ("fedavg_probe", "logistic_c"): {"probe": "logistic"},
    ("fedavg_probe", "meta_optimizer"): {"classify_rounds": 1},
    ("fedavg_probe", "scale"): {"classifier": "cosine"},
    ("fedbabu", "logistic_c"): {"probe": "logistic"},
    ("fedbabu", "ridge_lambda"): {"probe": "ridge"},
    ("fedfsl_mi", "epsilon"): FAST,
    ("fedfsl_mi", "mode"): FAST,
    ("frl", "decay"): {"decay_round": 1},
    ("frl", "uploaded"): {"local_steps": 3},
    ("frl", "variant"): HEAD,
    ("frl_finetune", "decay"): {"decay_round": 1},
    ("frl_finetune", "prepare_steps"): {"prepare_by": "clients"},
    ("frl_frozen", "decay"): {"decay_round": 1},
    ("frl_frozen", "prepare_steps"): {"prepare_by": "clients"},
    ("frl_one_shot", "decay"): {"decay_round": 1},
    ("frl_one_shot", "last"): {"keep": 2},
    ("frl_one_shot", "prepare_steps"): {"prepare_by": "clients"},
    ("frl_personal", "decay"): {"decay_round": 1},
    ("frl_personal", "variant"): HEAD,
    ("pfedfsl", "penalise_norms"): {"model": replace(OWN, backbone=Conv4(width=4))},
}
"""What else an option needs to act, by method and option."""

ELSEWHERE = {
    ("frl", "positions"): "frl/test_frl.py",  # a map of several places
    ("frl", "query_classes"): "frl/test_frl_options.py",  # clients that lack classes
    ("frl", "resampled"): "frl/test_frl.py",  # another kind of client
    ("frl_personal", "resampled"): "frl/test_frl_baselines.py",
    (
        "pfedfsl",
        "alone",
    ): "personal/test_pfedfsl.py",  # an example that is the only one of its class
}
"""The oracle of what needs other clients than these."""


def first_cases() -> dict[str, Method[Any]]:
    """Return the first case of every method of the package, with a small encoder."""
    found: dict[str, Method[Any]] = {}
    for method in METHODS.values():
        if type(method).__module__.startswith("fedshot."):
            small = replace(method, model=replace(method.model, backbone=PERCEPTRON))
            found.setdefault(method.name, small)
    return found


CASES = first_cases()


def paths(method: Method[Any]) -> Iterator[str]:
    """Yield the options of a method: fields, and those of its inner loop and its episodes."""
    for field in fields(method):  # type: ignore[arg-type]
        if field.name == "episode":
            yield "episode.augment"
        elif field.name == "inner":
            yield from (f"inner.{inner.name}" for inner in fields(method.inner))
        elif field.name not in NOT_ASKED:
            yield field.name


OPTIONS = [(name, path) for name, method in CASES.items() for path in paths(method)]
ASKED = [
    (name, path)
    for name, path in OPTIONS
    if (name, path) not in ELSEWHERE
    # Refused: see one_round/test_one_round.py.
    and (CASES[name].trains_on_episodes or path != "episode.augment")
]


def put(method: Any, **changes: Any) -> Any:
    """Return a method with other values at these paths."""
    whole: dict[str, Any] = {}
    for path, value in changes.items():
        first, _, rest = path.partition(".")
        held = whole.get(first, getattr(method, first))
        whole[first] = put(held, **{rest: value}) if rest else value
    return replace(method, **whole)


def words(method: Any, path: str) -> tuple[Any, ...]:
    """Return the words that an option may be, and whether they are true or false of a switch."""
    first, _, rest = path.partition(".")
    if rest:
        return words(getattr(method, first), rest)
    kind = typing.get_type_hints(type(method))[first]
    kinds = [kind] if typing.get_origin(kind) is typing.Literal else typing.get_args(kind) or [kind]
    for one in kinds:
        if typing.get_origin(one) is typing.Literal:
            return typing.get_args(one)
        if one is bool:
            return (False, True)
    return ()


def another(value: Any) -> Any:
    """Return a number near another one; None for what is no number."""
    if isinstance(value, float):
        return value / 2 if value else 0.5
    return value + 1 if type(value) is int else None


def groups() -> EpisodicTest:
    """Return questions whose support three clients share, with a fourth beside them."""
    spec, group = EpisodeSpec(way=3, shot=6, query=3), GroupSampler(3, "iid", spare=1)
    return EpisodicTest.draw(DATASET, range(CLASSES), spec, 3, Key(0).at("exam"), None, group)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], str]:
    """Return what gives a hash of two rounds, and of the answers after them."""

    @cache
    def of(method: Any) -> str:
        run = Federation(method, REFERENCE, tmp_path_factory.mktemp("run")).train(2)
        asked = groups() if method.name.startswith("frl") else None
        found = dict(run.logits(4, asked)) | dict(run.everything())
        text = "\n".join(f"{name} {tree.digest(leaf)}" for name, leaf in sorted(found.items()))
        return hashlib.sha256(text.encode()).hexdigest()

    return of


def test_the_lists_name_options_that_there_are() -> None:
    assert {*WHERE, *ELSEWHERE} <= set(OPTIONS)
    assert {(name, path) for name, own in OF.items() for path in own} <= set(OPTIONS)
    assert set(OTHER) <= {path for _, path in OPTIONS}
    for (_, option), file in ELSEWHERE.items():
        assert f"{option}=" in (METHOD_TESTS / file).read_text(encoding="utf-8"), (option, file)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "path"), ASKED, ids=[" ".join(pair) for pair in ASKED])
def test_an_option_acts(name: str, path: str, outcome: Callable[[Any], str]) -> None:
    method = put(CASES[name], **WHERE.get((name, path), {}))
    here = attrgetter(path)(method)
    known = words(method, path)
    values = known or (here, OF.get(name, {}).get(path, OTHER.get(path, another(here))))
    assert values[-1] is not None, f"give {path} of {name} another value in OF"
    found = [outcome(put(method, **{path: value})) for value in values]
    assert len(set(found)) == len(found), f"{path} of {name}: {values}"
    if known and here is None:
        assert outcome(method) in found
