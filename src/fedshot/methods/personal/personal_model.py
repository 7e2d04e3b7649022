"""Personal models, which either the client keeps or the server stores on its disk."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.learners.learner import EvalEpisode
from fedshot.methods.personal.base_class_method import AmongBaseClasses
from fedshot.protocol.clients import Clients
from fedshot.protocol.method import ClientModels, Traits

S = TypeVar("S", bound=Tree)


class PersonalModels(ClientModels[S], AmongBaseClasses[S]):
    """A method in which each client keeps a model with a classifier, and predicts with it."""

    def init_client(self, client: int, key: Key) -> Tree:
        """Return a private state with a placeholder for the client's model (see `first_own`)."""
        del client
        return first_own(self.learner.init(key)[0])

    def message(self, server: S, clients: Clients, client: int) -> dict[str, Tree]:
        """Return the server's state, with which the client predicts at test."""
        del clients, client
        found: dict[str, Tree] = server._asdict()
        return found

    def own_model(self, down: Tree, private: Tree) -> tuple[Tree, Tree]:
        """Return the client's model (theta, stats), where stats are the server's.

        Before the client's first local update, theta is the server's, too.
        """
        return own_or_sent(private, down["theta"]), down["stats"]

    def predictor(self, down: Tree, private: Tree) -> Callable[[EvalEpisode], Tensor]:
        """Return the function that predicts with the client's model."""
        return partial(self.logits, *self.own_model(down, private))


class BankedModels(PersonalModels[S]):
    """A method in which the server stores each client's last model on its disk.

    The server's state contains the initial model, `start`. Clients upload "model" in `train`.
    """

    @property
    def traits(self) -> Traits:
        """What the method can do and what it needs."""
        return replace(super().traits, gathers=("train", "model"), sends_changes=False)

    def init_client(self, client: int, key: Key) -> Tree:
        """Return `{}`: the server, not the client, stores the client's model."""
        del client, key
        return {}

    def message(self, server: S, clients: Clients, client: int) -> dict[str, Tree]:
        """Return the client's own model, with which it predicts at test."""
        return {"model": clients.recall(client, server.start)}

    def own_model(self, down: Tree, private: Tree) -> tuple[Tree, Tree]:
        """Return the client's model (theta, stats), which the server has sent."""
        del private
        return down["model"]["theta"], down["model"]["stats"]


def into_bank(
    clients: Clients, unpacked: Callable[[Tree], Tree] = lambda model: model
) -> Callable[[int, Tree], Tree]:
    """Return a function (client, uploaded model) that stores the model on the server's disk.

    The function decodes the model with `unpacked` before, and returns `{}` in place of the upload.
    """

    def put_away(client: int, model: Tree) -> Tree:
        clients.remember(client, unpacked(model))
        return {}

    return put_away


def first_own(model: Tree) -> Tree:
    """Return the private state of a client before its first local update.

    It has the placeholder `model`, which the first local update replaces.
    """
    return {"model": model, "visits": torch.tensor(0)}


def own_or_sent(private: Tree, sent: Tree) -> Tree:
    """Return the client's own model, or in its first local update the model `sent` to it."""
    begun = private["visits"] > 0
    return tree.map(lambda mine, new: torch.where(begun, mine, new), private["model"], sent)


def next_own(private: Tree, model: Tree) -> Tree:
    """Return the private state after a local update that ends at `model`."""
    return {"model": model, "visits": private["visits"] + 1}
