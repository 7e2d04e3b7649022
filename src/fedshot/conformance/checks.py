"""The conformance checks of a method; each inspects a few short runs on a small dataset.

Client work, or a client function, is a function of the method that `client_work` marks: it runs on
a client. The first line of a check's docstring is the name of the check. The checks compare results
bit by bit, and ignore accuracy. Whether a method learns is for its unit tests to check.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from fedshot.conformance.federation import (
    COHORT,
    OTHERS,
    VICTIM,
    CheckFailedError,
    Execution,
    Federation,
    FleetCase,
    RunTensors,
    Shuffled,
    assert_same,
    require,
    require_close,
    with_trouble,
)
from fedshot.conformance.small import CLIENTS, episodic_test
from fedshot.core import storage, tree
from fedshot.core.tree import Tree
from fedshot.fleets.client_checks import moved_generators
from fedshot.fleets.sequential import Sequential
from fedshot.fleets.threads import Threads
from fedshot.fleets.unreliable import CORRUPT, Trouble
from fedshot.fleets.vectorised import Vectorised
from fedshot.protocol.clients import reduce_replies
from fedshot.protocol.exchange import Exchange, Fleet, Outcome, Reply
from fedshot.protocol.method import Method

T = TypeVar("T")

REFERENCE = FleetCase("sequential", Sequential)
THREADS = FleetCase("threads", lambda host: Threads(host, 2), quick=True)
VECTORISED = FleetCase("vectorised", lambda host: Vectorised(host, 3, 2), False, 1e-6, 1e-9)


class Runs:
    """Runs of one method on one fleet. A shared run starts when a check first needs it.

    Args:
        method: the method.
        where: the fleet on which the method runs.
        folder: returns a new empty folder at each call.
    """

    def __init__(self, method: Method[Any], where: FleetCase, folder: Callable[[], Path]) -> None:
        self.method, self.where, self._folder = method, where, folder

    def begin(self, *, on: FleetCase | None = None, **options: Any) -> Federation:
        """Begin a run on the fleet `on`, by default `self.where`, with options of `Federation`."""
        return Federation(self.method, on or self.where, self._folder(), **options)

    @property
    def folder(self) -> Path:
        """A new empty folder at each access."""
        return self._folder()

    @cached_property
    def undisturbed(self) -> Federation:
        """A run of two rounds, shared by checks that only read it."""
        return self.begin().train(2)

    @cached_property
    def quiet(self) -> Federation:
        """A run of two rounds with the cohort `COHORT`, shared by checks that only read it."""
        return self.begin().train(2, choose=COHORT)

    @cached_property
    def tested(self) -> Federation:
        """A run of two rounds and a test, shared by checks that only read it."""
        run = self.begin().train(2)
        run.predict()
        return run

    @cached_property
    def without(self) -> Federation:
        """A run of one round without the client `VICTIM`, shared by checks that only read it."""
        return self.begin().train(1, choose=OTHERS)


Function: TypeAlias = Callable[[Runs], None]
CHECKS: list[tuple[str, Function]] = []
"""(name, check) of all checks; the name, from the docstring, is printed by `fedshot check`."""


def _listed(function: Function) -> Function:
    name = (function.__doc__ or "").rstrip(".")
    CHECKS.append((name[:1].lower() + name[1:], function))
    return function


class CheckOutcome(NamedTuple):
    """The result of a check: `reason` says why it failed, and is empty if it passed."""

    name: str
    reason: str


def check(
    method: Method[Any], folder: Callable[[], Path], explain: Callable[[BaseException], str]
) -> Iterator[CheckOutcome]:
    """Run all checks on a method and yield their results.

    If two rounds and a test do not run at all, the remaining checks are skipped.

    Args:
        method: the method.
        folder: returns a new empty folder at each call.
        explain: returns a non-empty reason for an error that the method's own code raised.
    """
    runs = Runs(method, REFERENCE, folder)
    for name, function in CHECKS:
        reason = ""
        try:
            function(runs)
        except Exception as error:  # raised by the method's code
            reason = str(error) if isinstance(error, CheckFailedError) else explain(error)
        yield CheckOutcome(name, " ".join(reason.split()))
        if reason and function is runs_through:
            return


@_listed
def runs_through(runs: Runs) -> None:
    """Two rounds and a test run without errors."""
    runs.tested.require_executions()


@_listed
def is_made_of_hyper_parameters(runs: Runs) -> None:
    """The method is a frozen dataclass of hyper-parameters."""
    method = runs.method
    options: Any = vars(type(method)).get("__dataclass_params__")
    require(options is not None and options.frozen, "it is not a frozen dataclass")
    copy = dataclasses.replace(method)
    require(method == copy, "a copy of it with the same options is not equal to it")
    require(bool(inspect.getdoc(type(method))), "its class has no docstring")


# Client work.


def _digest(reply: Reply) -> str:
    tensors, weight = reply.split()
    return f"{tree.digest(tree.detach(tensors))} {weight}"


def two_of_each_work(run: Federation) -> list[Execution]:
    """Return the first and the last execution of each client function in training."""
    by_work: dict[str, list[Execution]] = {}
    for execution in run.executions:
        if execution.exchange.phase == "train":
            by_work.setdefault(execution.name, []).append(execution)
    return [found[i] for found in by_work.values() for i in (0, -1)]


@_listed
def inputs_are_unchanged(runs: Runs) -> None:
    """Client work does not change its inputs."""
    for execution in runs.undisturbed.executions:
        given = execution.inputs
        before = {path: tree.digest(leaf) for path, leaf in tree.items(given)}
        execution.repeat()
        for path, leaf in tree.items(given):
            name = f"{execution.name} changes {path}"
            require(before.get(path) == tree.digest(leaf), f"{name} in place")
            require(not leaf.requires_grad, f"{name}: it requires a gradient afterwards")


@_listed
def same_inputs_give_same_bits(runs: Runs) -> None:
    """Client work gives bit-identical results for the same inputs."""
    executions = two_of_each_work(runs.undisturbed)
    alone = [_digest(execution.repeat()) for execution in executions]
    for execution, expected in reversed(list(zip(executions, alone, strict=True))):
        torch.manual_seed(execution.client)
        same = _digest(execution.repeat()) == expected
        require(same, f"{execution.name} gives different results when it is repeated")


@_listed
def global_generators_are_unused(runs: Runs) -> None:
    """No global random generator is used."""

    def checked(part: str, call: Callable[[], T]) -> T:
        found, moved = moved_generators(call)
        require(not moved, f"{part} uses the global generator of {' and '.join(moved)}")
        return found

    run = checked("init or init_client", lambda: runs.begin(on=REFERENCE))
    checked("a round", lambda: run.train(2))
    checked("evaluate", run.predict)
    for execution in two_of_each_work(run):
        checked(execution.name, execution.repeat)


@_listed
def draws_by_key_and_data(runs: Runs) -> None:
    """Random draws depend only on the key and the data."""
    run = runs.undisturbed
    for execution in reversed(run.executions):
        key = execution.exchange.client_key(execution.client)
        drawn = execution.exchange.work.draw(run.host.data(execution.client), key)
        same = tree.digest(drawn) == tree.digest(execution.drawn)
        name = execution.exchange.work.draw_name
        require(same, f"{name} draws different values when repeated with the same key and data")


@_listed
def replies_own_their_memory(runs: Runs) -> None:
    """Uploads share no memory with inputs."""
    for execution in two_of_each_work(runs.undisturbed):
        mine = {leaf.data_ptr() for leaf in tree.leaves(execution.inputs) if leaf.numel()}
        for path, leaf in tree.items(dict(execution.repeat().up)):
            shared = leaf.numel() and leaf.data_ptr() in mine
            require(not shared, f"{execution.name} uploads {path}, which shares an input's memory")


@_listed
def uploads_are_as_declared(runs: Runs) -> None:
    """Uploads have the form that the exchange declares."""
    runs.undisturbed.require_executions()
    for execution in runs.undisturbed.executions:
        reducers, up = execution.exchange.reduce, execution.reply.up
        name = f"{execution.name} uploads"
        same = up.keys() == reducers.keys()
        require(same, f"{name} {sorted(up)}, but the exchange reduces {sorted(reducers)}")
        for part, reducer in reducers.items():
            like = getattr(reducer, "like", None)
            like = like(execution.client) if callable(like) else like
            if like is not None:
                found = tree.difference(like, up[part])
                require(found is None, f"{name} {part!r} with another structure: {found}")
            fault = reducer.fault(execution.client, up[part], float(execution.reply.weight))
            require(fault is None, f"{name} {part!r}, which is rejected: {fault}")


@_listed
def uploads_are_changes(runs: Runs) -> None:
    """With traits.sends_changes, half of the mean change moves the server half as far."""
    traits = runs.undisturbed.method.traits
    if not traits.sends_changes or traits.subtracts_own or traits.gathers is not None:
        return

    def halved(fleet: Fleet, exchange: Exchange) -> Outcome:
        found = reduce_replies(fleet, exchange)
        return replace(found, parts=tree.map(lambda leaf: leaf / 2, dict(found.parts)))

    whole, half = runs.begin(), runs.begin(combine=halved)
    start = dict(tree.items(whole.server))
    for run in (whole, half):
        run.train_unsealed(COHORT)
    moved, ends = False, dict(tree.items(half.server))
    for path, leaf in tree.items(whole.server):
        if leaf.is_floating_point():
            first = start[path]
            moved |= not torch.equal(leaf, first)
            require_close(ends[path], first + (leaf - first) / 2, 1e-4, 1e-6, path)
    require(moved, "a round does not change the server's state")


@_listed
def private_states_keep_their_form(runs: Runs) -> None:
    """Private states keep their structure, shapes and dtypes."""
    for execution in runs.undisturbed.executions:
        kept = execution.repeat().private
        found = tree.difference(execution.private, kept)
        require(found is None, f"{execution.name} changes the form of its private state: {found}")
        require(
            type(kept) is type(execution.private),
            f"{execution.name} returns a {type(kept).__name__} as private state",
        )


@_listed
def weights_and_metrics_are_numbers(runs: Runs) -> None:
    """Weights are positive, and metrics are finite numbers."""
    for execution in runs.undisturbed.executions:
        name = execution.name
        weight = execution.reply.weight
        require(float(weight) > 0, f"the weight of {name} is {weight}")
        for metric, value in execution.reply.metrics.items():
            sound = value.numel() == 1 and bool(value.isfinite().all())
            require(sound, f"the metric {metric!r} of {name} is {value}")


# Reproducibility.


@_listed
def one_seed_gives_one_result(runs: Runs) -> None:
    """Two runs with the same seed give bit-identical results."""
    assert_same(runs.begin().train(2).everything(), runs.undisturbed.everything())


@_listed
def another_seed_gives_another_result(runs: Runs) -> None:
    """Different seeds give different results."""
    found, expected = runs.begin(seed=1).train(2).everything(), runs.undisturbed.everything()
    changed = any(not torch.equal(found[name], leaf) for name, leaf in expected.items())
    require(changed, "seeds 0 and 1 give the same result")


@_listed
def order_of_the_cohort_does_not_matter(runs: Runs) -> None:
    """The order of the cohort does not change the results."""
    back = runs.begin().train(2, choose=COHORT[::-1])
    assert_same(back.everything(), runs.quiet.everything())
    require(back.sealed == runs.quiet.sealed or not back.where.exact, "private states differ")


@_listed
def order_of_arrival_does_not_matter(runs: Runs) -> None:
    """The order in which replies arrive does not change the results."""
    shuffled = runs.begin(around=lambda fleet: Shuffled(fleet, seed=1)).train(2)
    assert_same(shuffled.everything(), runs.undisturbed.everything())
    same = shuffled.sealed == runs.undisturbed.sealed
    require(same or not shuffled.where.exact, "private states differ")


@_listed
def storage_keeps_everything(runs: Runs) -> None:
    """Messages and states are the same after they are written and read."""
    last = runs.undisturbed.executions[-1]
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
        require(same, f"{name} changes when it is written and read")


def a_fleet_equals_the_reference(runs: Runs, rounds: int = 2) -> None:
    """Training and predictions on the fleet equal those on the sequential fleet."""
    found, expected = (runs.begin(on=fleet).train(rounds) for fleet in (runs.where, REFERENCE))
    assert_same(found.everything(), expected.everything())
    assert_same(found.logits(), expected.logits())


@_listed
def threads_equal_a_loop(runs: Runs) -> None:
    """The results of the threads fleet are bit-identical to those of the sequential fleet."""
    a_fleet_equals_the_reference(Runs(runs.method, THREADS, runs._folder))


@_listed
def stacked_clients_equal_a_loop(runs: Runs) -> None:
    """The results of the vectorised fleet in float64 are close to those of the sequential fleet."""
    method: Any = runs.method
    if not method.model.backbone.vmappable or method.traits.unstackable:
        return  # fedshot refuses to start such a run
    double = dataclasses.replace(method, model=dataclasses.replace(method.model, dtype="float64"))
    a_fleet_equals_the_reference(Runs(double, VECTORISED, runs._folder))


# Testing.


@_listed
def episodes_are_predicted_and_nothing_is_trained(runs: Runs) -> None:
    """Every test episode is predicted, and a test changes nothing."""
    run = runs.undisturbed
    privates, server = run.privates(), tree.digest(run.server)
    predictions = run.predict()
    found = sorted({p.eval_episode for p in predictions})
    require(found == list(range(5)), f"expected predictions of episodes 0 to 4, found {found}")
    for p in predictions:
        shape = tuple(p.logits.shape)
        require(shape == (9, 3), f"the logits of 9 queries and 3 classes have the shape {shape}")
        require(bool(p.logits.isfinite().all()), "some logits are not finite")
    again = {f"{p.eval_episode} by {p.client}": p.logits for p in predictions}
    assert_same(run.logits(), RunTensors(again, run.where))
    require(run.privates() == privates, "a test changes private states")
    require(tree.digest(run.server) == server, "a test changes the server's state")


@_listed
def queries_are_predicted_independently(runs: Runs) -> None:
    """Queries are predicted independently, or the method is transductive."""
    if runs.method.traits.transductive:
        return
    fewer = episodic_test()
    fewer.eval_episodes = [q._replace(query_x=q.query_x[:4]) for q in fewer.eval_episodes]  # type: ignore[assignment]
    whole = runs.undisturbed.logits()
    # Not bitwise equal: a convolution over fewer images may use another kernel.
    for name, logits in runs.undisturbed.logits(test=fewer).items():
        reason = "the logits of 4 of the 9 queries change if the other 5 are left out"
        require_close(logits, whole[name][:4], 1e-4, 1e-5, reason)


# Private states.


def _raw(leaf: Tensor) -> bytes:
    return leaf.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def distinctive_leaves(private: Tree) -> dict[str, bytes]:
    """Return the bytes of leaves whose values could not occur elsewhere by chance.

    Single numbers and constant leaves, such as the zeros of a new optimiser, are left out.
    """
    return {
        name: _raw(leaf)
        for name, leaf in tree.items(private)
        if leaf.numel() > 1 and bool((leaf != leaf.flatten()[0]).any())
    }


def leaks(hidden: dict[str, bytes], sent: Iterable[Tensor]) -> list[str]:
    """Return the names of the leaves in `hidden` whose bytes occur in one of the `sent` tensors."""
    sent_bytes = [_raw(leaf) for leaf in sent]
    return [name for name, leaf in hidden.items() if any(leaf in data for data in sent_bytes)]


def _outcome_tensors(run: Federation) -> list[Tensor]:
    found: list[Tensor] = []
    for outcome in run.outcomes:
        for part in outcome.values():
            gathered = isinstance(part, dict) and all(isinstance(k, int) for k in part)
            for piece in part.values() if gathered else (part,):
                found += tree.leaves(piece)
    return found


@_listed
def private_tensors_stay_with_the_client(runs: Runs) -> None:
    """No upload contains private tensors."""
    n_hidden = 0
    run = runs.tested
    for execution in run.executions:
        after = execution.repeat().private
        for private in (execution.private, after):
            hidden = distinctive_leaves(private)
            n_hidden += len(hidden)
            found = leaks(hidden, tree.leaves(dict(execution.reply.up)))
            require(not found, f"{execution.name} uploads {', '.join(found)}")
        require(execution.reply.private == {}, "the fleet returns a private state to the server")
    has = bool(distinctive_leaves(runs.method.init_client(0, run.key)))
    require(n_hidden > 0 or not has, "private states have no distinctive values after training")


@_listed
def private_tensors_reach_no_server(runs: Runs) -> None:
    """Neither the server's state nor a reduced upload contains private tensors."""
    run = runs.tested
    sent = _outcome_tensors(run) + tree.leaves(run.server)
    for client in range(CLIENTS):
        given = [execution.down for execution in run.executions if execution.client == client]
        received = [_raw(leaf) for down in given for leaf in tree.leaves(down)]
        held = [execution.private for execution in run.executions if execution.client == client]
        for private in (run.private(client), *held):
            own = distinctive_leaves(private).items()
            found = leaks({k: secret for k, secret in own if secret not in received}, sent)
            require(not found, f"the server has {', '.join(found)} of client {client}")


@_listed
def unsampled_clients_keep_their_state(runs: Runs) -> None:
    """A client that is not sampled keeps its state."""
    run = runs.begin().train(1, choose=(1, 3, 4))
    before = run.privates()
    run.train(1, choose=(1, 2))
    after = run.privates()
    for client in set(range(CLIENTS)) - {1, 2}:
        same = after[client] == before[client]
        require(same, f"client {client} changes its state without training")


@_listed
def initial_private_states_are_reproducible(runs: Runs) -> None:
    """Initial private states depend only on the client and the key."""
    forth, back = runs.begin(), runs.begin()
    seen = {c: tree.digest(forth.private(c)) for c in range(CLIENTS)}
    again = {c: tree.digest(back.private(c)) for c in reversed(range(CLIENTS))}
    require(seen == again, "the initial state depends on the order of access")


@_listed
def rewound_runs_equal_uninterrupted_ones(runs: Runs) -> None:
    """A resumed run equals an uninterrupted one."""
    run = runs.begin().train(1)
    server, digest, first = run.server, run.sealed, run.privates()
    run.train(1)
    run.train_unsealed()  # as if the process ended before round 3 is committed
    run.fleet.rewind(1, digest)
    require(run.privates() == first, "private states are not those of the checkpoint")
    run.server, run.round = server, 1
    run.train(1)
    found, expected = run.everything(), runs.undisturbed.everything()
    assert_same(found.only("server", "private"), expected.only("server", "private"))
    require(run.sealed == runs.undisturbed.sealed, "committed private states differ")


# Faults.


def a_faulty_client_has_no_effect(runs: Runs, trouble: Trouble) -> None:
    """A client with a lost or invalid reply is reported, and the round continues without it."""
    run = runs.begin(around=with_trouble(trouble)).train(1, choose=COHORT)
    assert_same(run.everything(), runs.without.everything())
    kind = "lost" if trouble == "drop" else "refused"
    faults = {(client, fault.kind) for client, fault in run.faults}
    require(faults == {(VICTIM, kind)}, f"{trouble}: the faults are {sorted(faults)}")
    require(len(run.faults) == len(run.outcomes), f"{trouble}: expected one fault in each exchange")
    require(all(fault.reason for _, fault in run.faults), f"{trouble}: a fault has no reason")
    # Only values that are infinite in the initial state, such as a diagonal, may be infinite.
    firsts = tree.leaves(runs.begin().server)
    for leaf, first in zip(tree.leaves(run.server), firsts, strict=True):
        sound = bool((leaf.isfinite() | (leaf == first)).all())
        require(sound, f"{trouble}: the server's state is not finite")


@_listed
def faulty_replies_have_no_effect(runs: Runs) -> None:
    """Lost and invalid replies are reported and have no effect."""
    for trouble in ("drop", *CORRUPT):
        a_faulty_client_has_no_effect(runs, trouble)


def refused_clients_keep_their_old_state(runs: Runs, trouble: Trouble) -> None:
    """A client whose reply is rejected in a round's last exchange keeps its previous state."""
    last = runs.quiet.executions[-1].exchange.version
    run = runs.begin(around=with_trouble(trouble, when=lambda exchange: exchange.version == last))
    run.train(2, choose=COHORT)
    given = [v.private for v in run.executions if v.client == VICTIM and v.exchange.version == last]
    back = run.privates()[VICTIM] == tree.digest(given[0])
    require(back, f"{trouble}: a client whose reply is rejected keeps its new state")
    for client in set(COHORT) - {VICTIM}:
        same = run.privates()[client] == runs.quiet.privates()[client]
        require(same, f"{trouble}: the state of client {client}, whose reply is valid, differs")


@_listed
def a_refused_client_keeps_its_old_state(runs: Runs) -> None:
    """A client whose reply is rejected keeps its previous state."""
    for trouble in ("drop", "nan", "negative_weight"):
        refused_clients_keep_their_old_state(runs, trouble)


@_listed
def a_delayed_reply_counts(runs: Runs) -> None:
    """A delayed reply counts like any other."""
    run = runs.begin(around=with_trouble("delay")).train(2, choose=COHORT)
    assert_same(run.everything(), runs.quiet.everything())
    require(not run.faults, "a delayed reply is reported as a fault")
