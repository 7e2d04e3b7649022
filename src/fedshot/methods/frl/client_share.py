"""A client's share of an episode: its supports and queries, with labels common to all clients."""

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
    """A client's share of an episode.

    A label is the index of a class in the episode, the same for all clients of the episode. At test
    queries have no labels, and there is no seed. Images or texts that an exchange does not need are
    empty, [0, ...].
    """

    support_x: Tensor  # uint8 [supports, H, W, C], or int32 [supports, L]
    support_y: Tensor  # int64 [supports]
    query_x: Tensor
    query_y: Tensor  # int64 [queries]; [0] at test
    open: Tensor  # bool [slots]: the labels that the episode uses
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
        data: data of the client; under partition "resampled" they change with each episode.
        spec: shape of an episode; clients that keep their images only use its shot and query, as
            the ratio in which they divide them.
        known: the base classes, as class indices of the dataset. If clients keep their images, all
            of them are the classes of every episode.
        slots: number of possible labels; the episode's classes have labels 0 to way - 1.
        key: key of one client in one exchange. The last two entries of its path name the client.
            The path before its entry "step" is the key of the episode. It and the client decide
            what is drawn, so between the exchanges of an episode only the dropout seed differs.
        needed: the parts whose images or texts are read: "support", "query" or both. Labels are
            always read.

    Raises DataError for a class without a label.
    """
    episode = key.above("step").at("episode")
    whose = key.path[-2:]
    classes, own = data.share(spec, episode, whose)
    named = classes if len(classes) else sorted(known)
    dataset = data.dataset

    def labels(rows: Ints) -> Tensor:
        at = torch.from_numpy(dataset.y[rows])[:, None] == torch.as_tensor(named)
        if not bool(at.any(1).all()):
            raise DataError(
                "the client has an example of a class that is not a base class; an episode has no "
                "label for it."
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
        support_x=read("support", own.support),
        support_y=labels(own.support),
        query_x=read("query", own.query),
        query_y=labels(own.query),
        open=used,
        seed=key.at("noise").tensor(),
    )


def shares_of(eval_episode: EvalEpisode, slots: int | None = None) -> list[EpisodeShare]:
    """Return each client's share of a test episode; one share if the episode is not split.

    `slots` is the number of possible labels; the episode's classes have labels 0 to way - 1. None
    means that there are no other labels.
    """
    e, way = eval_episode, len(eval_episode.classes)
    used = torch.arange(way if slots is None else slots, device=e.support_y.device) < way
    none = e.support_y[:0]
    if not e.held:
        return [EpisodeShare(e.support_x, e.support_y, e.query_x, none, used, ())]
    x, y = _by_client(e.held.support, e.support_x, e.support_y)
    (query_x,) = _by_client(e.held.query, e.query_x, clients=len(y))
    return [EpisodeShare(*mine, none, used, ()) for mine in zip(x, y, query_x, strict=True)]


def _by_client(holders: Tensor, *parts: Tensor, clients: int = 0) -> list[Sequence[Tensor]]:
    """Split each part into one tensor per client; row i belongs to client `holders[i]`.

    Returns tensors for at least `clients` clients; a client without rows gets an empty one.
    """
    sizes = holders.bincount(minlength=clients).tolist()  # a GPU waits here, not for each client
    rows = holders.argsort(stable=True)
    return [torch.split(part[rows], sizes) for part in parts]


def spare_shares(eval_episode: EvalEpisode, slots: int) -> list[EpisodeShare]:
    """Return the shares of a test episode's spare clients, which have supports but no queries.

    Spare clients are additional ones, for methods that choose among more clients than a group has.
    """
    held = eval_episode.held
    if not held or not len(held.spare):
        return []
    used = torch.arange(slots, device=held.spare.device) < len(eval_episode.classes)
    no_x, no_y = eval_episode.query_x[:0], held.spare_y[:0]
    x, y = _by_client(held.spare - held.spare.min(), held.spare_x, held.spare_y)
    return [EpisodeShare(*mine, no_x, no_y, used, ()) for mine in zip(x, y, strict=True)]


def in_order(eval_episode: EvalEpisode, parts: Sequence[Tensor]) -> Tensor:
    """Concatenate the clients' results, one row per query, in the episode's order of queries."""
    rows = torch.cat(list(parts))
    if not eval_episode.held:
        return rows
    return rows[torch.argsort(torch.argsort(eval_episode.held.query, stable=True))]
