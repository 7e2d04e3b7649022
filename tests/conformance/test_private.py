"""Private stays private, and stays right: versions by round, on the host where the client lives."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from conformance.cases import BODY, EPISODE, REFERENCE
from conformance.conftest import KEEP_STATES
from fedshot.config.registry import kind_options
from fedshot.conformance import checks
from fedshot.conformance.checks import Runs
from fedshot.conformance.federation import LATE, Federation
from fedshot.core import tree
from fedshot.core.seeds import Key
from fedshot.fleets.unreliable import Trouble
from fedshot.methods.base.fl_proto import FLProto
from fedshot.methods.base.fsl_local import FSLLocal
from fedshot.methods.registry import METHODS as REGISTRY
from fedshot.protocol.exchange import client_work
from fedshot.protocol.method import Method

CHECKS = (
    checks.private_tensors_stay_with_the_client,
    checks.private_tensors_reach_no_server,
    checks.unsampled_clients_keep_their_state,
    checks.initial_private_states_are_reproducible,
    checks.rewound_runs_equal_uninterrupted_ones,
)

PAGES = Path(__file__).parents[2] / "docs" / "methods"
NOT_UP = ("| server", "| client", "| down |", "| down, R")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_private_states_stay_private_and_right(check: checks.Function, runs: Runs) -> None:
    check(runs)


def test_training_changes_the_states_that_clients_keep(undisturbed: Federation) -> None:
    """Those of all methods here; a method of one's own may keep a constant."""
    for client in {e.client for e in undisturbed.executions if e.exchange.phase == "train"}:
        first, last = (undisturbed.host.private(client, upto) for upto in ((-1, 0), LATE))
        assert not tree.leaves(first) or tree.digest(first) != tree.digest(last)


COUNTED: list[int] = []


class Keeping(FLProto):
    """FL-Proto whose clients keep a state: `first` makes it, and `then` gives the next."""

    first: ClassVar[Callable[[Key], Tensor]]
    then: ClassVar[Callable[[Tensor], Tensor]]

    def init_client(self, client: int, key: Key) -> Any:
        return {"kept": type(self).first(key)}

    @client_work(draw="draw")
    def train(self, down: Any, private: Any, drawn: Any) -> Any:
        reply = super().train(down, private, drawn)
        return reply._replace(private={"kept": type(self).then(private["kept"])})


def keeping(first: Callable[[Key], Tensor], then: Callable[[Tensor], Tensor]) -> Method[Any]:
    members = {"first": staticmethod(first), "then": staticmethod(then)}
    return type("Kept", (Keeping,), members)(BODY, EPISODE, local_steps=1)


def counted(key: Key) -> Tensor:
    COUNTED.append(1)
    return torch.tensor(len(COUNTED))


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (lambda _: torch.zeros(()), lambda kept: kept + 1),
        (lambda key: torch.randn(4, 4, generator=key.torch()), lambda kept: kept),
        (lambda _: torch.zeros(4), lambda kept: kept + torch.arange(4)),
    ],
    ids=["a counter", "a random projection", "zeros at first"],
)
def test_a_method_of_ones_own_may_keep_what_is_alike_or_constant(
    first: Callable[[Key], Tensor], then: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    folders = (tmp_path / str(i) for i in count())
    runs = Runs(keeping(first, then), REFERENCE, lambda: next(folders))
    for check in (*CHECKS, checks.a_refused_client_keeps_its_old_state):
        check(runs)


def test_a_first_state_that_depends_on_the_order_of_the_clients_is_refused(tmp_path: Path) -> None:
    folders = (tmp_path / str(i) for i in count())
    runs = Runs(keeping(counted, lambda kept: kept), REFERENCE, lambda: next(folders))
    with pytest.raises(checks.CheckFailedError, match="depends on the order of access"):
        checks.initial_private_states_are_reproducible(runs)


@pytest.mark.parametrize("trouble", ["drop", "nan", "negative_weight"])
def test_a_client_that_is_not_accepted_goes_back_to_its_last_state(
    runs: Runs, trouble: Trouble
) -> None:
    checks.refused_clients_keep_their_old_state(runs, trouble)


def test_all_that_clients_upload_stands_on_the_methods_page(
    undisturbed: Federation, method: Method[Any]
) -> None:
    """In the rows of its table that are not the server's, the client's own, or the way down."""
    page = PAGES / f"{method.name}.md"
    if not page.exists():
        pytest.skip("a method of one's own")
    table = page.read_text(encoding="utf-8").partition("| where | what |")[2].partition("\n\n")[0]
    rows = [row for row in table.splitlines() if not row.startswith(NOT_UP)]
    for execution in undisturbed.executions:
        if execution.exchange.phase != "train":
            continue
        told = {word for row in rows for word in re.findall(r"\w+", row)}
        assert execution.reply.up.keys() <= told, sorted(execution.reply.up)


def test_nothing_is_uploaded_to_watch_a_training_unless_it_is_asked_for() -> None:
    """An option that changes nothing of a training is off by default, so that it sends nothing."""
    diagnostics = [
        (name, option.path, option.default)
        for name in REGISTRY for option in kind_options("method", name) if option.is_diagnostic
    ]  # fmt: skip
    assert diagnostics
    assert [one for one in diagnostics if one[-1]] == []


def test_a_leak_would_be_found() -> None:
    """The detector detects: whole, as a piece of something larger, and not what was never sent."""
    secret = torch.randn(5, generator=torch.Generator().manual_seed(0))
    hidden = checks.distinctive_leaves(
        {"w": secret, "fresh": torch.zeros(5), "step": torch.tensor(3)}
    )
    assert list(hidden) == ["w"]
    assert checks.leaks(hidden, [torch.zeros(2), secret.clone()]) == ["w"]
    assert checks.leaks(
        hidden, [torch.cat([torch.ones(3), secret, torch.ones(1)]).reshape(3, 3)]
    ) == ["w"]
    assert checks.leaks(hidden, [secret + 1e-6, secret.flip(0)]) == []


def test_the_list_of_methods_has_some_that_keep_a_private_state() -> None:
    assert len(KEEP_STATES) >= 3


def test_training_alone_costs_no_bytes(undisturbed: Federation, method: Method[Any]) -> None:
    if not isinstance(method, FSLLocal):
        assert undisturbed.meter.total("train", "down") > 0
        assert undisturbed.meter.total("train", "up") > 0
        return
    assert undisturbed.meter.total("train", "down") == 0
    assert undisturbed.meter.total("train", "up") == 0
    train = [
        execution for execution in undisturbed.executions if execution.exchange.phase == "train"
    ]
    assert train
    assert all(execution.reply.up == {} for execution in train)
