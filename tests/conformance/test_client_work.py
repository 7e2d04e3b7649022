"""Client work is a function: tensors in, tensors out, nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fedshot.conformance import checks
from fedshot.conformance.checks import REFERENCE, Runs
from fedshot.conformance.federation import CheckFailedError
from fedshot.core import tree
from fedshot.methods.base.fl_proto import FLProto
from fedshot.protocol.exchange import Reply, client_work

from .cases import METHODS

CHECKS = (
    checks.inputs_are_unchanged,
    checks.same_inputs_give_same_bits,
    checks.global_generators_are_unused,
    checks.draws_by_key_and_data,
    checks.replies_own_their_memory,
    checks.uploads_are_as_declared,
    checks.uploads_are_changes,
    checks.private_states_keep_their_form,
    checks.weights_and_metrics_are_numbers,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_client_work_is_a_function(check: checks.Function, runs: Runs) -> None:
    check(runs)


@dataclass(frozen=True)
class SendsWeights(FLProto):
    """Clients send weights, not changes, and the server subtracts its own."""

    @client_work(draw="draw")
    def train(self, down: Any, private: Any, drawn: Any) -> Reply:
        reply = super().train(down, private, drawn)
        return reply._replace(
            up={name: tree.add(part, down[name]) for name, part in reply.up.items()}
        )

    def round(self, server: Any, clients: Any, key: Any) -> Any:
        new, metrics = super().round(server, clients, key)
        return type(server)(*map(tree.sub, new, server)), metrics


def test_weights_in_place_of_changes_are_found(tmp_path: Path) -> None:
    plain = METHODS["fl_proto"]
    method = SendsWeights(plain.model, plain.episode, local_steps=1)
    with pytest.raises(CheckFailedError, match=r"theta/.*not close"):
        checks.uploads_are_changes(Runs(method, REFERENCE, lambda: tmp_path))
