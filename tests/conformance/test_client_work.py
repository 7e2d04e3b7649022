"""Client work is a function: tensors in, tensors out, nothing else."""

from __future__ import annotations

import pytest

from fedshot.conformance import checks
from fedshot.conformance.checks import Runs

CHECKS = (
    checks.inputs_are_unchanged,
    checks.same_inputs_give_same_bits,
    checks.global_generators_are_unused,
    checks.draws_by_key_and_data,
    checks.replies_own_their_memory,
    checks.uploads_are_as_declared,
    checks.private_states_keep_their_form,
    checks.weights_and_metrics_are_numbers,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_client_work_is_a_function(check: checks.Function, runs: Runs) -> None:
    check(runs)
