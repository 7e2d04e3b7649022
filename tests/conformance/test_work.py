"""Client work is a function: tensors in, tensors out, nothing else."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from conformance.federation import Federation, Visit
from fedshot import tree
from fedshot.protocol import Reply
from fedshot.tree import Tree


def work(visit: Visit) -> Reply:
    return visit.exchange.work(visit.down, visit.private, visit.drawn)


def digest(reply: Reply) -> str:
    whole = {
        "up": dict(reply.up),
        "private": reply.private,
        "weight": torch.as_tensor(reply.weight),
        "metrics": dict(reply.metrics),
    }
    return tree.digest(tree.detach(whole))


def given_to(visit: Visit) -> Tree:
    return {"down": visit.down, "private": visit.private, "drawn": visit.drawn}


def chance() -> list[Any]:
    """Return the states of the global generators."""
    name, words, *rest = np.random.get_state(legacy=True)
    return [torch.get_rng_state().tolist(), random.getstate(), name, words.tolist(), *rest]


def of_each_work(undisturbed: Federation) -> list[Visit]:
    """Two visits for each kind of exchange."""
    by_work: dict[str, list[Visit]] = {}
    for visit in undisturbed.visits:
        if visit.exchange.phase == "train":
            by_work.setdefault(visit.exchange.work.name, []).append(visit)
    return [visit for visits in by_work.values() for visit in (visits[0], visits[-1])]


def test_inputs_are_left_as_they_were(undisturbed: Federation) -> None:
    for visit in undisturbed.visits:
        before = tree.digest(given_to(visit))
        work(visit)
        assert tree.digest(given_to(visit)) == before
        assert not any(leaf.requires_grad for leaf in tree.leaves(given_to(visit)))


def test_the_same_inputs_give_the_same_bits_whatever_ran_before(undisturbed: Federation) -> None:
    visits = of_each_work(undisturbed)
    alone = [digest(work(visit)) for visit in visits]
    for visit, expected in reversed(list(zip(visits, alone, strict=True))):
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)
        assert digest(work(visit)) == expected


def test_global_generators_are_neither_used_nor_moved(undisturbed: Federation) -> None:
    before = chance()
    for visit in of_each_work(undisturbed):
        work(visit)
    assert chance() == before


def test_drawing_depends_on_the_key_and_the_data_alone(undisturbed: Federation) -> None:
    before = chance()
    host = undisturbed.home.host
    for visit in reversed(undisturbed.visits):
        key = visit.exchange.client_key(visit.client)
        drawn = visit.exchange.work.draw(host.data(visit.client), key)
        assert tree.digest(drawn) == tree.digest(visit.drawn)
    assert chance() == before


def test_a_reply_does_not_share_memory_with_what_was_given(undisturbed: Federation) -> None:
    """A worker may reuse its buffers; a reply that points into them would change afterwards."""
    for visit in of_each_work(undisturbed):
        mine = {leaf.data_ptr() for leaf in tree.leaves(given_to(visit)) if leaf.numel()}
        sent = tree.leaves(dict(work(visit).up))
        assert not mine & {leaf.data_ptr() for leaf in sent if leaf.numel()}


def test_uploads_are_named_and_shaped_as_their_reducers_say(undisturbed: Federation) -> None:
    assert undisturbed.visits
    for visit in undisturbed.visits:
        reducers = visit.exchange.reduce
        assert visit.reply.up.keys() == reducers.keys()
        for name, reducer in reducers.items():
            like = getattr(reducer, "like", None)
            like = like(visit.client) if callable(like) else like
            if like is not None:
                assert tree.difference(like, visit.reply.up[name]) is None
            assert (
                reducer.fault(visit.client, visit.reply.up[name], float(visit.reply.weight)) is None
            )


def test_the_private_state_keeps_its_form(undisturbed: Federation) -> None:
    """Else the next visit could not read it."""
    for visit in undisturbed.visits:
        kept = work(visit).private
        assert tree.difference(visit.private, kept) is None
        assert type(kept) is type(visit.private)


def test_weights_are_positive_and_metrics_are_finite_numbers(undisturbed: Federation) -> None:
    for visit in undisturbed.visits:
        assert float(visit.reply.weight) > 0
        for value in visit.reply.metrics.values():
            assert value.numel() == 1
            assert value.isfinite().all()
