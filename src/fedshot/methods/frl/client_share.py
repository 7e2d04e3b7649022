"""What a client of an episode works on: its own supports and queries, labelled as all agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fedshot.core.errors import DataError
from fedshot.core.seeds import Key
from fedshot.data.dataset import Ints
from fedshot.data.episodes.episode import ClientData, examples
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.learners.learner import EvalEpisode

Part: TypeAlias = Literal["support", "query"]
PARTS: tuple[Part, ...] = ("support", "query")


class EpisodeShare(NamedTuple):
    """A client's part in an episode.

    Labels count the classes of the episode, which all its clients number alike; `open` says which
    of the numbers the episode uses. At test there are no labels of queries, and no seed. Where an
    exchange does not work on a part, its images or texts are [0, ...].
    """

    support_x: Tensor  # uint8 [supports, H, W, C], or int32 [supports, L]
    support_y: Tensor  # int64 [supports]
    query_x: Tensor
    query_y: Tensor  # int64 [queries]; [0] at test
    open: Tensor  # bool [numbers]
    seed: Tensor | tuple[()]  # of dropout masks; () for none


def draw_share(
    data: ClientData,
    spec: EpisodeSpec,
    known: Sequence[int],
    slots: int,
    key: Key,
    needed: Sequence[Part] = PARTS,
) -> EpisodeShare:
    """Draw a client's share of an episode.

    Args:
        data: the client's. its share of an episode, or all that it holds.
        spec: of an episode; the proportion of shots and queries, where clients hold what they hold.
        known: numbers of the base classes, by which those clients label.
        slots: numbers that there are for classes.
        key: of one client, whom its last two parts name, in one exchange, below a "step". What lies
            above the step is the episode's: in each of its exchanges a client has the same share,
            the noise apart.
        needed: whose images or texts to read; the others' are [0, ...], while labels are all there.

    Raises DataError for a class without a number.
    """
    episode = key.above("step").at("episode")
    whose = key.path[-2:]
    classes, share = data.share(spec, episode, whose)
    named = classes if len(classes) else sorted(known)
    dataset = data.dataset

    def labels(rows: Ints) -> Tensor:
        at = torch.from_numpy(dataset.y[rows])[:, None] == torch.as_tensor(named)
        if not bool(at.any(1).all()):
            raise DataError(
                "the client has an example of a class that is none of the base classes; an episode "
                "has no number for it."
            )
        return at.long().argmax(1)

    def read(part: Part, rows: Ints) -> Tensor:
        if part not in needed:
            return examples(dataset, rows[:0])
        x = examples(dataset, rows)
        if not spec.augment.active:
            return x
        spec.augment.check(dataset)
        return spec.augment.apply(x, key.above("step").at("augment", *whose, part))

    used = torch.arange(slots) < len(named)
    return EpisodeShare(
        support_x=read("support", share.support),
        support_y=labels(share.support),
        query_x=read("query", share.query),
        query_y=labels(share.query),
        open=used,
        seed=key.at("noise").tensor(),
    )


def shares_of(eval_episode: EvalEpisode, slots: int | None = None) -> list[EpisodeShare]:
    """Return the shares of the clients that hold a question; one of all of it where nobody does.

    `slots` is how many numbers there are for classes; None for as many as there are classes.
    """
    way, held = len(eval_episode.classes), eval_episode.held
    device = eval_episode.support_y.device
    used = torch.arange(way if slots is None else slots, device=device) < way
    none = eval_episode.support_y[:0]
    if not held:
        return [
            EpisodeShare(
                eval_episode.support_x, eval_episode.support_y, eval_episode.query_x, none, used, ()
            )
        ]
    return [
        EpisodeShare(
            eval_episode.support_x[held.support == k],
            eval_episode.support_y[held.support == k],
            eval_episode.query_x[held.query == k],
            none,
            used,
            (),
        )
        for k in range(int(held.support.max()) + 1)
    ]


def spare_shares(eval_episode: EvalEpisode, slots: int) -> list[EpisodeShare]:
    """Return the shares of the spare clients of a question, which have no queries."""
    held = eval_episode.held
    if not held or not len(held.spare):
        return []
    used = torch.arange(slots, device=held.spare.device) < len(eval_episode.classes)
    first, last = int(held.spare.min()), int(held.spare.max())
    no_x, no_y = eval_episode.query_x[:0], held.spare_y[:0]
    return [
        EpisodeShare(
            held.spare_x[held.spare == k], held.spare_y[held.spare == k], no_x, no_y, used, ()
        )
        for k in range(first, last + 1)
    ]


def in_order(eval_episode: EvalEpisode, parts: Sequence[Tensor]) -> Tensor:
    """Put what clients made of their queries, client by client, in the question's order."""
    rows = torch.cat(list(parts))
    held = eval_episode.held
    if not held:
        return rows
    place = torch.argsort(held.query, stable=True)
    back = torch.empty_like(place)
    back[place] = torch.arange(len(place), device=place.device)
    return rows[back]
