"""The checks of a method: each is a function of a few short runs of it, on a small data set.

They compare bits and bytes, not accuracies: whether a method learns is for its own tests to say.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fedshot.conformance.federation import (
    COHORT,
    OTHERS,
    VICTIM,
    CheckFailedError,
    Everything,
    Federation,
    FleetCase,
    Shuffled,
    Visit,
    assert_same,
    require,
    require_close,
    strike,
)
from fedshot.conformance.small import CLIENTS, episodic_test
from fedshot.core import storage, tree
from fedshot.core.tree import Tree
from fedshot.fleets.client_checks import generators
from fedshot.fleets.sequential import Sequential
from fedshot.fleets.threads import Threads
from fedshot.fleets.unreliable import CORRUPT, Trouble
from fedshot.fleets.vectorised import Vectorised
from fedshot.protocol.exchange import Reply
from fedshot.protocol.method import Method

REFERENCE = FleetCase("sequential", lambda home: Sequential(home.host))
THREADS = FleetCase("threads", lambda home: Threads(home.host, 2), quick=True)
VECTORISED = FleetCase("vectorised", lambda home: Vectorised(home.host, 3, 2), False, 1e-6, 1e-9)


class Runs:
    """Runs of one method on one fleet, made when a check first asks for them.

    Args:
        method: the method.
        where: the fleet.
        folder: returns an empty folder each time.
    """

    def __init__(self, method: Method[Any], where: FleetCase, folder: Callable[[], Path]) -> None:
        self.method, self.where, self._folder = method, where, folder

    def begin(self, *, on: FleetCase | None = None, **options: Any) -> Federation:
        """Begin a run on the fleet, or on another one."""
        return Federation(self.method, on or self.where, self._folder(), **options)

    @property
    def folder(self) -> Path:
        """An empty folder."""
        return self._folder()

    @cached_property
    def undisturbed(self) -> Federation:
        """Two rounds; for reading only."""
        return self.begin().play(2)

    @cached_property
    def quiet(self) -> Federation:
        """Two rounds of one cohort, nothing going wrong; for reading only."""
        return self.begin().play(2, choose=COHORT)

    @cached_property
    def examined(self) -> Federation:
        """Two rounds and a test; for reading only."""
        run = self.begin().play(2)
        run.answer()
        return run

    @cached_property
    def without(self) -> Federation:
        """One round in which the victim was not asked; for reading only."""
        return self.begin().play(1, choose=OTHERS)


Function: TypeAlias = Callable[[Runs], None]


class CheckOutcome(NamedTuple):
    """What a check came to: `reason` says why it failed, and is empty where it passed."""

    name: str
    reason: str


def check(
    method: Method[Any], folder: Callable[[], Path], explain: Callable[[BaseException], str]
) -> Iterator[CheckOutcome]:
    """Run all checks on a method and yield what each came to.

    Where two rounds and a test do not run through, that is the only outcome.

    Args:
        method: the method.
        folder: returns an empty folder each time.
        explain: says in words, at least one, what a method's own code raised.
    """
    runs = Runs(method, REFERENCE, folder)
    for name, function in CHECKS:
        reason = ""
        try:
            function(runs)
        except Exception as error:  # whatever the method's author has written
            reason = str(error) if isinstance(error, CheckFailedError) else explain(error)
        yield CheckOutcome(name, " ".join(reason.split()))
        if reason and function is runs_through:
            return


def runs_through(runs: Runs) -> None:
    """Train two rounds and answer a test."""
    runs.examined.require_visits()


def is_made_of_hyper_parameters(runs: Runs) -> None:
    """Frozen and comparable, so that a run cannot leave anything behind in it."""
    method = runs.method
    options: Any = vars(type(method)).get("__dataclass_params__")
    require(options is not None and options.frozen, "it is no frozen dataclass")
    copy = dataclasses.replace(method)
    require(method == copy, "a copy of it with the same options is not equal to it")
    require(bool(inspect.getdoc(type(method))), "its class has no docstring")


# What a client does.


def work(visit: Visit) -> Reply:
    """Run a visit's work again."""
    return visit.exchange.work(visit.down, visit.private, visit.drawn)


def _digest(reply: Reply) -> str:
    return tree.digest(tree.detach({
        "up": dict(reply.up),
        "private": reply.private,
        "weight": torch.as_tensor(reply.weight),
        "metrics": dict(reply.metrics),
    }))  # fmt: skip


def given_to(visit: Visit) -> Tree:
    """Return all that a visit started from."""
    return {"down": visit.down, "private": visit.private, "drawn": visit.drawn}


def of_each_work(run: Federation) -> list[Visit]:
    """Return two visits for each kind of exchange."""
    by_work: dict[str, list[Visit]] = {}
    for visit in run.visits:
        if visit.exchange.phase == "train":
            by_work.setdefault(visit.exchange.work.name, []).append(visit)
    return [visit for visits in by_work.values() for visit in (visits[0], visits[-1])]


def inputs_stay(runs: Runs) -> None:
    """Work leaves its inputs as they were, also where torch counts no write."""
    for visit in runs.undisturbed.visits:
        given = given_to(visit)
        before = {path: tree.digest(leaf) for path, leaf in tree.items(given)}
        work(visit)
        for path, leaf in tree.items(given):
            name = f"{visit.exchange.work.name} changes {path}"
            require(before.get(path) == tree.digest(leaf), f"{name} in place")
            require(not leaf.requires_grad, f"{name}, which requires a gradient afterwards")


def same_inputs_give_same_bits(runs: Runs) -> None:
    """Whatever ran before, and wherever the global generators stand."""
    visits = of_each_work(runs.undisturbed)
    alone = [_digest(work(visit)) for visit in visits]
    for seed, (visit, expected) in enumerate(reversed(list(zip(visits, alone, strict=True)))):
        torch.manual_seed(seed)
        require(
            _digest(work(visit)) == expected,
            f"{visit.exchange.work.name} gives other results the second time",
        )


def global_generators_stay(runs: Runs) -> None:
    """No part of a round or a test draws from them or seeds them."""
    before = generators()

    def still(what: str) -> None:
        after = generators()
        moved = [name for name, state in before.items() if after[name] != state]
        require(not moved, f"{what} uses the global generator of {' and '.join(moved)}")

    run = runs.begin(on=REFERENCE)
    still("init or init_client")
    run.play(2)
    still("a round")
    run.answer()
    still("evaluate")
    for visit in of_each_work(run):
        work(visit)
        still(visit.exchange.work.name)


def draws_by_key_and_data(runs: Runs) -> None:
    """Whoever drew before."""
    run = runs.undisturbed
    for visit in reversed(run.visits):
        key = visit.exchange.client_key(visit.client)
        drawn = visit.exchange.work.draw(run.home.host.data(visit.client), key)
        require(
            tree.digest(drawn) == tree.digest(visit.drawn),
            f"{visit.exchange.work.draw_name} draws other things for the same key and data",
        )


def replies_own_their_memory(runs: Runs) -> None:
    """A worker may reuse its buffers; a reply that points into them would change afterwards."""
    for visit in of_each_work(runs.undisturbed):
        mine = {leaf.data_ptr() for leaf in tree.leaves(given_to(visit)) if leaf.numel()}
        for path, leaf in tree.items(dict(work(visit).up)):
            shared = leaf.numel() and leaf.data_ptr() in mine
            require(not shared, f"{visit.exchange.work.name} uploads {path} as it was given it")


def uploads_are_as_declared(runs: Runs) -> None:
    """Names, shapes and types are those of the reducers."""
    runs.undisturbed.require_visits()
    for visit in runs.undisturbed.visits:
        reducers, up = visit.exchange.reduce, visit.reply.up
        name = f"{visit.exchange.work.name} uploads"
        same = up.keys() == reducers.keys()
        require(same, f"{name} {sorted(up)}, and the exchange reduces {sorted(reducers)}")
        for part, reducer in reducers.items():
            like = getattr(reducer, "like", None)
            like = like(visit.client) if callable(like) else like
            if like is not None:
                found = tree.difference(like, up[part])
                require(found is None, f"{name} {part!r} in another form: {found}")
            fault = reducer.fault(visit.client, up[part], float(visit.reply.weight))
            require(fault is None, f"{name} {part!r}, which is refused: {fault}")


def private_states_keep_their_form(runs: Runs) -> None:
    """Else the next visit could not read it."""
    for visit in runs.undisturbed.visits:
        kept = work(visit).private
        found = tree.difference(visit.private, kept)
        require(found is None, f"{visit.exchange.work.name} changes the form: {found}")
        require(type(kept) is type(visit.private), f"it becomes a {type(kept).__name__}")


def weights_and_metrics_are_numbers(runs: Runs) -> None:
    """Positive, and finite."""
    for visit in runs.undisturbed.visits:
        name = visit.exchange.work.name
        require(float(visit.reply.weight) > 0, f"the weight of {name} is {visit.reply.weight}")
        for metric, value in visit.reply.metrics.items():
            sound = value.numel() == 1 and bool(value.isfinite().all())
            require(sound, f"the metric {metric!r} of {name} is {value}")


# The same answer anywhere.


def one_seed_gives_one_result(runs: Runs) -> None:
    """To the bit."""
    assert_same(runs.begin().play(2).everything(), runs.undisturbed.everything())


def another_seed_gives_another_result(runs: Runs) -> None:
    """Else the key is not used."""
    found, expected = runs.begin(seed=1).play(2).everything(), runs.undisturbed.everything()
    changed = any(not torch.equal(found[name], leaf) for name, leaf in expected.items())
    require(changed, "seeds 0 and 1 come to the same")


def order_of_the_cohort_does_not_matter(runs: Runs) -> None:
    """Whom the server asks first."""
    back = runs.begin().play(2, choose=COHORT[::-1])
    assert_same(back.everything(), runs.quiet.everything())
    require(back.sealed == runs.quiet.sealed or not back.where.exact, "private states differ")


def order_of_arrival_does_not_matter(runs: Runs) -> None:
    """Who answers first."""
    shuffled = runs.begin(around=lambda fleet: Shuffled(fleet, seed=1)).play(2)
    assert_same(shuffled.everything(), runs.undisturbed.everything())
    same = shuffled.sealed == runs.undisturbed.sealed
    require(same or not shuffled.where.exact, "private states differ")


def storage_keeps_everything(runs: Runs) -> None:
    """A codec that names leaves by path loses neither bits nor structure."""
    last = runs.undisturbed.visits[-1]
    parts = {
        "the server's state": runs.undisturbed.server, "a message": last.down,
        "an upload": last.reply.up, "a private state": last.private,
    }  # fmt: skip
    folder = runs.folder
    for name, content in parts.items():
        storage.write(folder / "content", content, sync=False)
        flat, _, _ = storage.read(folder / "content")
        again = tree.rebuild(content, flat)
        same = type(again) is type(content) and tree.digest(again) == tree.digest(content)
        require(same, f"{name} is another one after it was written and read")


def a_fleet_equals_the_reference(runs: Runs, rounds: int = 2) -> None:
    """In what is trained, and what is answered."""
    found, expected = (runs.begin(on=fleet).play(rounds) for fleet in (runs.where, REFERENCE))
    assert_same(found.everything(), expected.everything())
    assert_same(found.logits(), expected.logits())


def threads_equal_a_loop(runs: Runs) -> None:
    """To the bit."""
    threads = Runs(runs.method, THREADS, runs._folder)
    a_fleet_equals_the_reference(threads)


def stacked_clients_equal_a_loop(runs: Runs) -> None:
    """In float64: in float32 what is regrouped drifts apart."""
    method: Any = runs.method
    if not method.model.backbone.vmappable or method.traits.unstackable:
        return  # a run on that fleet is refused at its start
    double = dataclasses.replace(method, model=dataclasses.replace(method.model, dtype="float64"))
    stacked = Runs(double, VECTORISED, runs._folder)
    a_fleet_equals_the_reference(stacked)


# A test.


def questions_are_answered_and_nothing_is_learnt(runs: Runs) -> None:
    """Each question, with finite logits, and the same ones the next time."""
    run = runs.undisturbed
    privates, server = run.privates(), tree.digest(run.server)
    answers = run.answer()
    found = sorted({a.eval_episode for a in answers})
    require(found == list(range(5)), f"of questions 0 to 4 these are answered: {found}")
    for a in answers:
        shape = tuple(a.logits.shape)
        require(shape == (9, 3), f"the logits of 9 queries and 3 classes are of shape {shape}")
        require(bool(a.logits.isfinite().all()), "some logits are not finite")
    again = {f"{a.eval_episode} by {a.client}": a.logits for a in answers}
    assert_same(run.logits(), Everything(again, run.where))
    require(run.privates() == privates, "a test changes private states")
    require(tree.digest(run.server) == server, "a test changes the server's state")


def queries_are_answered_one_by_one(runs: Runs) -> None:
    """Unless the method is marked transductive."""
    if runs.method.traits.transductive:
        return
    fewer = episodic_test()
    fewer.eval_episodes = [q._replace(query_x=q.query_x[:4]) for q in fewer.eval_episodes]  # type: ignore[assignment]
    whole = runs.undisturbed.logits()
    # Not to the bit: a convolution over fewer images may be computed by another kernel.
    for name, logits in runs.undisturbed.logits(asked=fewer).items():
        told = "4 of 9 queries get other logits when they are asked alone"
        require_close(logits, whole[name][:4], 1e-4, 1e-5, told)


# Private stays private.


def _raw(leaf: Tensor) -> bytes:
    return leaf.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def secrets(private: Tree) -> dict[str, bytes]:
    """Return the leaves worth hiding.

    One number is found anywhere by chance, and zeros (a fresh optimiser's) are nobody's secret.
    """
    return {
        name: _raw(leaf)
        for name, leaf in tree.items(private)
        if leaf.numel() > 1 and bool((leaf != leaf.flatten()[0]).any())
    }


def leaks(hidden: dict[str, bytes], sent: Iterable[Tensor]) -> list[str]:
    """Return the names of secrets that occur in what was sent, whole or as a piece of it."""
    heap = [_raw(leaf) for leaf in sent]
    return [name for name, secret in hidden.items() if any(secret in item for item in heap)]


def _outcome_tensors(run: Federation) -> list[Tensor]:
    found: list[Tensor] = []
    for outcome in run.outcomes:
        for part in outcome.values():
            senders = isinstance(part, dict) and all(isinstance(k, int) for k in part)
            for piece in part.values() if senders else (part,):
                found += tree.leaves(piece)
    return found


def private_tensors_stay_with_the_client(runs: Runs) -> None:
    """No upload holds one, whole or as a piece."""
    looked_for = 0
    run = runs.examined
    for visit in run.visits:
        after = work(visit).private
        for private in (visit.private, after):
            hidden = secrets(private)
            looked_for += len(hidden)
            found = leaks(hidden, tree.leaves(dict(visit.reply.up)))
            require(not found, f"{visit.exchange.work.name} uploads {', '.join(found)}")
        require(visit.reply.private == {}, "a fleet passes a private state on")
    has = bool(secrets(runs.method.init_client(0, run.key)))
    require(bool(looked_for) == has, "private states have nothing to hide after the first visit")


def private_tensors_reach_no_server(runs: Runs) -> None:
    """But for what a client keeps as it was sent it: that is the server's own."""
    run = runs.examined
    sent = _outcome_tensors(run) + tree.leaves(run.server)
    for client in range(CLIENTS):
        given = [visit.down for visit in run.visits if visit.client == client]
        received = [_raw(leaf) for down in given for leaf in tree.leaves(down)]
        held = [visit.private for visit in run.visits if visit.client == client]
        for private in (run.private(client), *held):
            own = {k: secret for k, secret in secrets(private).items() if secret not in received}
            found = leaks(own, sent)
            require(not found, f"the server has {', '.join(found)} of client {client}")


def who_is_not_asked_keeps_its_state(runs: Runs) -> None:
    """And who is asked has a new one, if it has any."""
    run = runs.begin().play(1, choose=(1, 3, 4))
    before = run.privates()
    run.play(1, choose=(1, 2))
    after = run.privates()
    for client in (0, 3, 4, 5):
        require(after[client] == before[client], f"the state of client {client} changes unasked")
    for client in (1, 2):
        changes = bool(tree.leaves(run.private(client)))
        same = (after[client] != before[client]) == changes
        require(same, "a client that trains keeps an old state, or has one that comes from nowhere")


def private_states_are_the_clients_own(runs: Runs) -> None:
    """Two clients start from states of their own, whichever is asked first."""
    forth, back = runs.begin(), runs.begin()
    seen = {c: tree.digest(forth.private(c)) for c in range(CLIENTS)}
    again = {c: tree.digest(back.private(c)) for c in reversed(range(CLIENTS))}
    require(seen == again, "the first state depends on who is asked before")
    apart = CLIENTS if tree.leaves(forth.private(0)) else 1
    require(len(set(seen.values())) == apart, "several clients start from one state")


def rewound_runs_go_on_as_never_stopped(runs: Runs) -> None:
    """From the last checkpoint, where a process died in the middle of a round."""
    run = runs.begin().play(1)
    server, digest, first = run.server, run.sealed, run.privates()
    run.play(1)
    run.play_unsealed()  # the process dies before the seal of round 3
    changed = run.privates() != first or not tree.leaves(run.private(0))
    require(changed, "private states do not change in a round")
    run.fleet.rewind(1, digest)
    require(run.privates() == first, "private states are not those of the checkpoint")
    run.server, run.round = server, 1
    run.play(1)
    found, expected = run.everything(), runs.undisturbed.everything()
    assert_same(found.only("server", "private"), expected.only("server", "private"))
    require(run.sealed == runs.undisturbed.sealed, "sealed private states differ")


# No silent poison.


def the_victim_has_no_part(runs: Runs, trouble: Trouble) -> None:
    """A client that is lost or sends what is unsound is named, and the rest goes on without it."""
    run = runs.begin(around=strike(trouble)).play(1, choose=COHORT)
    assert_same(run.everything(), runs.without.everything())
    kind = "lost" if trouble == "drop" else "refused"
    faults = {(client, fault.kind) for client, fault in run.faults}
    require(faults == {(VICTIM, kind)}, f"{trouble}: the faults are {sorted(faults)}")
    require(len(run.faults) == len(run.outcomes), f"{trouble}: not one fault an exchange")
    require(all(fault.reason for _, fault in run.faults), f"{trouble}: a fault has no reason")
    # A diagonal of minus infinity is there from the start; nothing else may be infinite.
    firsts = tree.leaves(runs.begin().server)
    for leaf, first in zip(tree.leaves(run.server), firsts, strict=True):
        sound = bool((leaf.isfinite() | (leaf == first)).all())
        require(sound, f"{trouble}: the server's state is not finite")


def lost_and_unsound_replies_have_no_part(runs: Runs) -> None:
    """All kinds of trouble."""
    for trouble in ("drop", *CORRUPT):
        the_victim_has_no_part(runs, trouble)


def refused_clients_go_back(runs: Runs, trouble: Trouble) -> None:
    """To the state of the exchange before, where it is refused in the last one of a round."""
    last = runs.quiet.visits[-1].exchange.version
    run = runs.begin(around=strike(trouble, when=lambda exchange: exchange.version == last))
    run.play(2, choose=COHORT)
    given = [v.private for v in run.visits if v.client == VICTIM and v.exchange.version == last]
    back = run.privates()[VICTIM] == tree.digest(given[0])
    require(back, f"{trouble}: a refused client keeps its new state")
    for client in set(COHORT) - {VICTIM}:
        same = run.privates()[client] == runs.quiet.privates()[client]
        require(same, f"{trouble}: client {client} has another state")


def a_refused_client_goes_back(runs: Runs) -> None:
    """Lost or refused."""
    for trouble in ("drop", "nan", "negative_weight"):
        refused_clients_go_back(runs, trouble)


def a_delayed_reply_counts(runs: Runs) -> None:
    """As any other."""
    run = runs.begin(around=strike("delay")).play(2, choose=COHORT)
    assert_same(run.everything(), runs.quiet.everything())
    require(not run.faults, "a delayed reply is a fault")


CHECKS: tuple[tuple[str, Function], ...] = (
    ("two rounds and a test run through", runs_through),
    ("the method is a frozen dataclass of hyper-parameters", is_made_of_hyper_parameters),
    ("client work leaves its inputs as they were", inputs_stay),
    ("client work gives the same bits for the same inputs", same_inputs_give_same_bits),
    ("no global generator is used", global_generators_stay),
    ("what is drawn depends on the key and the data alone", draws_by_key_and_data),
    ("uploads share no memory with inputs", replies_own_their_memory),
    ("uploads have the form that the exchange asks for", uploads_are_as_declared),
    ("private states keep their form", private_states_keep_their_form),
    ("weights are positive and metrics finite numbers", weights_and_metrics_are_numbers),
    ("one seed gives the same bits twice", one_seed_gives_one_result),
    ("another seed gives another result", another_seed_gives_another_result),
    ("the order of the cohort does not matter", order_of_the_cohort_does_not_matter),
    ("the order of arrival does not matter", order_of_arrival_does_not_matter),
    ("what is sent and kept survives storage", storage_keeps_everything),
    ("threads give the bits of a loop", threads_equal_a_loop),
    ("stacked clients give the numbers of a loop in float64", stacked_clients_equal_a_loop),
    ("every question is answered, and a test changes nothing",
     questions_are_answered_and_nothing_is_learnt),
    ("each query is answered by itself, or the method is transductive",
     queries_are_answered_one_by_one),
    ("private tensors are in no upload", private_tensors_stay_with_the_client),
    ("private tensors reach no outcome and no server", private_tensors_reach_no_server),
    ("a client that is not asked keeps its state", who_is_not_asked_keeps_its_state),
    ("private states are each client's own", private_states_are_the_clients_own),
    ("a run goes on from a checkpoint as if never stopped", rewound_runs_go_on_as_never_stopped),
    ("lost and unsound replies are named and have no part", lost_and_unsound_replies_have_no_part),
    ("a client that is refused goes back to its last state", a_refused_client_goes_back),
    ("a delayed reply counts as any other", a_delayed_reply_counts),
)  # fmt: skip
"""What is checked, in the words of the command's lines."""
