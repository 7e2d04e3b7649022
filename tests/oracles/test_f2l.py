"""F2L against its equations written out, and what its two models may not do to each other."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedshot import tree
from fedshot.data import EpisodeSpec
from fedshot.errors import ConfigError
from fedshot.keys import Key
from fedshot.methods import F2L
from fedshot.nn import (
    CosineHead,
    InnerChoice,
    Optimizer,
    OptimizerChoice,
    Question,
    Readout,
    SetTransformer,
    distillation_loss,
    temperatures,
    transfer_loss,
    value_and_grad,
)
from fedshot.nn.transfer import confidences, log_likelihoods
from fedshot.protocol import Clients
from oracles.classifying import SPEC, Run, Twin, assert_readout, unequal_clients
from oracles.f2l import WAY, Client, Oracle, assert_client, begin, beside, close, method
from oracles.fedfsl import assert_slopes

SGD = OptimizerChoice("sgd", 0.02, 0.9, 0.01)
OPTIONS: dict[str, dict[str, Any]] = {
    "strict": {},
    "paper": {"mode": "paper"},
    "official": {"mode": "official"},
    "official, episodes of two": {"mode": "official", "episodes_per_step": 2},
    "transfer from psi": {"mi_from": "psi"},
    "transfer from psi of prototypes": {"mi_from": "psi", "head_start": "prototypes"},
    "gradients through both": {"mi_gradient": "both"},
    "through both, from psi": {"mi_gradient": "both", "mi_from": "psi"},
    "new phi": {"client_phi": "new"},
    "new phi, second order": {"client_phi": "new", "inner": InnerChoice(0.3, 2, order="second")},
    "T squared": {"kd_squared": True},
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
    "classifier of three layers, added": {"weights": "added", "lambda_mi": 2.0, "mi_tau": 0.1},
}  # fmt: skip


@pytest.mark.parametrize("backbone", ["mlp", "conv4"])
@pytest.mark.parametrize("name", OPTIONS)
def test_local_steps_are_the_equations_in_torch(name: str, backbone: str, tmp_path: Path) -> None:
    options = OPTIONS[name]
    if options.get("mode") == "official":  # whose classifier has other names than torch's
        options = options | {"classifier": "linear"}
    elif backbone == "conv4":  # Adam makes steps of the rounding of a bias before batch norm
        options = {"optimizer": SGD} | options
    m = method(backbone, **options)
    at, drawn = begin(m, tmp_path)
    oracle = Oracle(m, at.phi, at.psi, at.stats)
    for _ in range(2):  # psi and its optimiser go on, phi's optimiser begins afresh
        at, _ = m.local(at, drawn.lessons)
        oracle.visit(drawn.lessons.steps)
        oracle.twin.assert_is(at.phi["body"], at.phi["classifier"], at.stats)
        assert_client(oracle.client, at.psi)
        oracle.receive(at.phi, at.stats)
