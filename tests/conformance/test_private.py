"""Private stays private, and stays right: versions by round, on the host where the client lives."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.cases import METHODS
from conformance.conftest import Begin
from conformance.federation import COHORT, VICTIM, Federation, assert_same, strike
from conformance.small import CLIENTS
from fedshot import tree
from fedshot.fleets import Trouble
from fedshot.keys import Key
from fedshot.kinds import kind_options
from fedshot.methods import METHODS as REGISTRY
from fedshot.methods import FSLLocal
from fedshot.protocol import Method
from fedshot.tree import Tree

PAGES = Path(__file__).parents[2] / "docs" / "methods"
NOT_UP = ("| server", "| client", "| down |", "| down, R")


def raw(leaf: Tensor) -> bytes:
    return leaf.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def secrets(private: Tree) -> dict[str, bytes]:
    """Return the leaves worth hiding.

    One number is found anywhere by chance, and zeros (a fresh optimiser's) are nobody's secret.
    """
    return {
        name: raw(leaf)
        for name, leaf in tree.items(private)
        if leaf.numel() > 1 and bool((leaf != leaf.flatten()[0]).any())
    }


def leaks(hidden: dict[str, bytes], sent: Iterable[Tensor]) -> list[str]:
    """Return the names of secrets that occur in what was sent, whole or as a piece of it."""
    heap = [raw(leaf) for leaf in sent]
    return [name for name, secret in hidden.items() if any(secret in item for item in heap)]


def outcome_tensors(run: Federation) -> list[Tensor]:
    found: list[Tensor] = []
    for outcome in run.outcomes:
        for part in outcome.values():
            senders = isinstance(part, dict) and all(isinstance(k, int) for k in part)
            for piece in part.values() if senders else (part,):
                found += tree.leaves(piece)
    return found


@pytest.fixture(scope="module")
def examined(begin: Begin) -> Federation:
    """Two rounds and an exam."""
    run = begin().play(2)
    run.answer()
    return run


def test_private_tensors_never_leave_the_client(examined: Federation, method: Method[Any]) -> None:
    looked_for = 0
    for visit in examined.visits:
        after = visit.exchange.work(visit.down, visit.private, visit.drawn).private
        for private in (visit.private, after):
            hidden = secrets(private)
            looked_for += len(hidden)
            assert not leaks(hidden, tree.leaves(dict(visit.reply.up)))
        assert visit.reply.private == {}  # the server's side has no way to reach it
    assert bool(looked_for) == bool(secrets(method.init_client(0, examined.key)))


def test_private_tensors_never_appear_in_an_outcome_or_on_the_server(
    examined: Federation,
) -> None:
    """But for what a client keeps as it was sent it: that is the server's own."""
    sent = outcome_tensors(examined) + tree.leaves(examined.server)
    for client in range(CLIENTS):
        given = [visit.down for visit in examined.visits if visit.client == client]
        received = [raw(leaf) for down in given for leaf in tree.leaves(down)]
        held = [visit.private for visit in examined.visits if visit.client == client]
        for private in (examined.private(client), *held):
            own = {k: secret for k, secret in secrets(private).items() if secret not in received}
            assert not leaks(own, sent)


def test_all_that_clients_upload_stands_on_the_methods_page(
    undisturbed: Federation, method: Method[Any]
) -> None:
    """In the rows of its table that are not the server's, the client's own, or the way down."""
    page = PAGES / f"{method.name}.md"
    if not page.exists():
        pytest.skip("a method of one's own")
    table = page.read_text(encoding="utf-8").partition("| where | what |")[2].partition("\n\n")[0]
    rows = [row for row in table.splitlines() if not row.startswith(NOT_UP)]
    for visit in undisturbed.visits:
        told = {word for row in rows for word in re.findall(r"\w+", row)}
        assert visit.reply.up.keys() <= told, sorted(visit.reply.up)


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_nothing_is_uploaded_to_watch_a_training_unless_it_is_asked_for(name: str) -> None:
    """An option that changes nothing of a training is off by default, so that it sends nothing."""
    for option in kind_options("method", name):
        assert not option.watches or not option.default, option.place


def test_a_leak_would_be_found() -> None:
    """The detector detects: whole, as a piece of something larger, and not what was never sent."""
    secret = torch.randn(5, generator=torch.Generator().manual_seed(0))
    hidden = secrets({"w": secret, "fresh": torch.zeros(5), "step": torch.tensor(3)})
    assert list(hidden) == ["w"]
    assert leaks(hidden, [torch.zeros(2), secret.clone()]) == ["w"]
    assert leaks(hidden, [torch.cat([torch.ones(3), secret, torch.ones(1)]).reshape(3, 3)]) == ["w"]
    assert leaks(hidden, [secret + 1e-6, secret.flip(0)]) == []


def test_the_list_of_methods_has_some_that_keep_a_private_state() -> None:
    assert sum(bool(tree.leaves(m.init_client(0, Key(0)))) for m in METHODS.values()) >= 3


def test_training_alone_costs_no_bytes(undisturbed: Federation, method: Method[Any]) -> None:
    if not isinstance(method, FSLLocal):
        assert undisturbed.meter.total("train", "down") > 0
        assert undisturbed.meter.total("train", "up") > 0
        return
    assert undisturbed.meter.total("train", "down") == 0
    assert undisturbed.meter.total("train", "up") == 0
    train = [visit for visit in undisturbed.visits if visit.exchange.phase == "train"]
    assert train
    assert all(visit.reply.up == {} for visit in train)


def test_a_client_that_is_not_sampled_keeps_its_state(begin: Begin, method: Method[Any]) -> None:
    run = begin().play(1, choose=(1, 3, 4))
    before = run.privates()
    run.play(1, choose=(1, 2))
    after = run.privates()
    for client in (0, 3, 4, 5):
        assert after[client] == before[client]
    for client in (1, 2):
        changes = bool(tree.leaves(run.private(client)))
        assert (after[client] != before[client]) == changes


@pytest.mark.parametrize("trouble", ["drop", "nan", "negative_weight"])
def test_a_client_that_is_not_accepted_goes_back_to_its_last_state(
    begin: Begin, quiet: Federation, trouble: Trouble
) -> None:
    """To that of the exchange before, where it is refused in the last exchange of a round."""
    last = quiet.visits[-1].exchange.version
    run = begin(around=strike(trouble, when=lambda exchange: exchange.version == last))
    run.play(2, choose=COHORT)
    given = [v.private for v in run.visits if v.client == VICTIM and v.exchange.version == last]
    assert run.privates()[VICTIM] == tree.digest(given[0])
    for client in set(COHORT) - {VICTIM}:
        assert run.privates()[client] == quiet.privates()[client]


def test_rewinding_and_playing_on_equals_a_run_never_disturbed(
    begin: Begin, undisturbed: Federation
) -> None:
    run = begin().play(1)
    server, digest, first = run.server, run.sealed, run.privates()
    run.play(1)
    run.play_unsealed()  # the process dies before the seal of round 3
    assert run.privates() != first or not tree.leaves(run.private(0))

    run.fleet.rewind(1, digest)
    assert run.privates() == first
    run.server, run.round = server, 1
    run.play(1)
    found, expected = run.everything(), undisturbed.everything()
    assert_same(found.only("server", "private"), expected.only("server", "private"))
    assert run.sealed == undisturbed.sealed


def test_a_private_state_is_a_clients_own(begin: Begin, method: Method[Any]) -> None:
    """Two clients start from states of their own, whichever is asked first."""
    forth, back = begin(), begin()
    seen = {c: tree.digest(forth.private(c)) for c in range(CLIENTS)}
    assert seen == {c: tree.digest(back.private(c)) for c in reversed(range(CLIENTS))}
    assert len(set(seen.values())) == (CLIENTS if tree.leaves(forth.private(0)) else 1)
