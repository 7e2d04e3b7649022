"""What a method is, and how test questions reach the models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from fedshot.core.errors import check_word
from fedshot.core.machine import give_back_memory
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.learners.feature_cache import FeatureCache, features_of
from fedshot.learners.learner import EvalEpisode
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import PerClient, Reply
from fedshot.protocol.reducers import Gather

S = TypeVar("S", bound=Tree)
DIAGNOSTIC = "diagnostic"  # in the metadata of an option that `diagnostic` makes
_TIDY = 32  # questions after which memory is given back


def diagnostic(default: Any) -> Any:
    """Return a dataclass's field that tells more of a training and changes nothing of it.

    Two configurations that differ in it alone are those of one training.
    """
    return field(default=default, metadata={DIAGNOSTIC: True})


class Prediction(NamedTuple):
    """The logits of one model for the queries of one question."""

    eval_episode: int
    client: int | None  # None: the server's model
    logits: Tensor  # [queries, way]


class Method(Protocol[S]):
    """A federated method: a frozen dataclass of hyper-parameters with these functions.

    `S` is what the server remembers: a tree, usually a named tuple. What a client remembers is a
    tree that stays with the client. `name` is the method's in configurations and tables.
    """

    name: ClassVar[str]

    @property
    def transductive(self) -> bool:
        """Whether predictions for one query may depend on the other queries."""
        ...

    @property
    def max_way(self) -> int | None:
        """The most classes an episode may have, in training and at test; None for any number.

        A method that trains a head and tests without it may have a `max_test_way` beside it.
        """
        ...

    def init(self, key: Key) -> S:
        """Return the server's state before round 1."""
        ...

    def init_client(self, client: int, key: Key) -> Tree:
        """Return a client's private state before its first round; `{}` for none."""
        ...

    def round(self, server: S, clients: Clients, key: Key) -> tuple[S, Mapping[str, float]]:
        """Return the server's state one round later, and what there is to report of the round."""
        ...

    def evaluate(
        self, server: S, clients: Clients, eval_episodes: Sequence[EvalEpisode], key: Key
    ) -> list[Prediction]:
        """Answer test questions. Nothing that is learnt here is kept."""
        ...


def widest_test(method: Method[Any]) -> int | None:
    """Return the most classes that a test of the method may ask about; None for any number."""
    widest: int | None = getattr(method, "max_test_way", method.max_way)
    return widest


def warnings_of(method: Method[Any]) -> tuple[str, ...]:
    """Return what a person should know of a method's options before round 1; () for nothing.

    A method that has something to say says it in its `warnings`.
    """
    said: tuple[str, ...] = getattr(method, "warnings", ())
    return said


def predict_at_server(
    answer: Callable[[EvalEpisode], Tensor],
    eval_episodes: Sequence[EvalEpisode],
    clients: Clients | None = None,
) -> list[Prediction]:
    """Let the server's model answer every question, on as many cores as the clients' fleet has."""

    def one(u: int) -> Prediction:
        found = Prediction(u, None, answer(eval_episodes[u]).detach().cpu())
        if u % _TIDY == _TIDY - 1:
            give_back_memory()  # else the answers, which stay, leave holes between what is freed
        return found

    asked = range(len(eval_episodes))
    return [one(u) for u in asked] if clients is None else clients.parallel_map(one, asked)


def predict_from_features(
    embed: Callable[[Tensor], Tensor],
    compare: Callable[[Tensor, Tensor, Tensor, int], Tensor],
    cache: FeatureCache,
    clients: Clients,
) -> list[Prediction]:
    """Let the server's model answer every question, embedding each example once.

    Args:
        embed: from examples to features; a row must not depend on the others.
        compare: from support features, their labels, query features and the way to logits.
        gallery: questions that `worth_caching` approves of.
        clients: their fleet spreads the work over its cores.
    """
    h = features_of(cache, embed, clients.parallel_map)

    def one(u: int) -> Prediction:
        sheet = cache.episode_index(u)
        with torch.no_grad():
            logits = compare(h[sheet.support], sheet.support_y, h[sheet.query], sheet.way)
        return Prediction(u, None, logits.cpu())

    return [one(u) for u in range(len(cache))]


def predict_at_clients(
    work: Callable[..., Reply],
    clients: Clients,
    eval_episodes: Sequence[EvalEpisode],
    key: Key,
    *,
    by: str = "turns",
    down: Callable[[int], Mapping[str, Tree]] = lambda _: {},
) -> list[Prediction]:
    """Send the questions to where the models are.

    Args:
        work: client work that takes `{"eval_episodes": {"17": EvalEpisode, ...}}` and uploads
        "logits",
            `{"17": logits, ...}`, float32 [queries, way].
        clients: the population.
        questions: the questions, without answers.
        key: of this evaluation.
        by: "turns" gives question u to client u mod K; "all" gives every question to every client.
            Questions that have owners go to their owners.
        down: what a client is sent beside its questions.
    """
    check_word("by", by, ("turns", "all"))
    n = len(eval_episodes)
    everyone = list(clients.ids)
    owners: tuple[int, ...] | None = getattr(eval_episodes, "owners", None)
    if owners is not None:
        asked = {c: [u for u in range(n) if owners[u] == c] for c in dict.fromkeys(owners)}
    elif by == "all":
        asked = {client: list(range(n)) for client in everyone}
    else:
        asked = {c: list(range(i, n, len(everyone))) for i, c in enumerate(everyone[:n])}

    sizes: dict[int, tuple[int, int]] = {}

    def message(client: int) -> Tree:
        sent = {str(u): eval_episodes[u] for u in asked[client]}
        sizes.update({int(u): (len(q.query_x), len(q.classes)) for u, q in sent.items()})
        return {"questions": sent, **down(client)}

    def logits_of(client: int) -> Tree:
        return {str(u): torch.empty(sizes[u], device="meta") for u in asked[client]}

    # Values are for the examiner to judge: logits that are not finite are wrong answers.
    got = clients.exchange(
        work,
        PerClient(message),
        to=list(asked),
        reduce={"logits": Gather(logits_of, limit=None)},
        key=key,
    )
    return [
        Prediction(int(u), client, logits)
        for client, part in got["logits"].items()
        for u, logits in sorted(part.items(), key=lambda item: int(item[0]))
    ]


def predict_all(
    answer: Callable[[EvalEpisode], Tensor], eval_episodes: Mapping[str, EvalEpisode]
) -> dict[str, Tensor]:
    """Answer each of the named questions, with float32 logits."""
    return {u: answer(eval_episode).detach().float() for u, eval_episode in eval_episodes.items()}
