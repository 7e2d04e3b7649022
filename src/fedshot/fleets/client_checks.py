"""What client functions are held to while they run, whoever wrote them.

That a call leaves its inputs as they were and returns a `Reply` is checked every time, which takes
microseconds. Reading the states of the global generators takes longer, and a library's thread may
use them at any time: that no function draws from them is checked at its first call alone. Writes
that torch does not count (through `.data` or numpy) are for `fedshot check` to find.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.errors import MethodError
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import ClientWork, Reply
from fedshot.protocol.method import Method

T = TypeVar("T")


class WorkChecks:
    """Runs client functions and checks each call; `seen` names those that have run."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def draw(self, work: ClientWork, data: Any, key: Key) -> Tree:
        """Draw what the work needs. Raises MethodError where a global generator is used."""
        name = work.draw_name
        if name is None:
            return {}
        return self._first_checked(f"{_owner(work)}.{name}", lambda: work.draw(data, key))

    def run(self, work: ClientWork, down: Tree, private: Tree, drawn: Tree) -> Reply:
        """Run the work.

        Raises MethodError where it changes its inputs, returns no `Reply`, or uses a global
        generator.
        """
        name = f"{_owner(work)}.{work.name}"
        given = {"down": down, "private": private, "drawn": drawn}
        try:
            leaves = tree.leaves(given)
        except TypeError as error:
            raise MethodError(f"{name} is given what is no tree: {error}") from None
        before = [(leaf, _version(leaf), leaf.requires_grad) for leaf in leaves]
        reply = self._first_checked(name, lambda: work(down, private, drawn))
        after = tree.leaves(given)
        if len(after) != len(before) or any(
            leaf is not was or _version(leaf) != version or leaf.requires_grad != asked
            for leaf, (was, version, asked) in zip(after, before, strict=True)
        ):
            raise MethodError(f"{name} changes its inputs in place{_place(given, before)}. {_FIX}")
        check_reply(name, reply)
        return reply

    def _first_checked(self, name: str, call: Callable[[], T]) -> T:
        """Call a function; at its first call raise MethodError if a global generator moved."""
        if name in self._seen:
            return call()
        done, moved = moved_generators(call)
        if moved:  # again, since another thread may have drawn meanwhile
            _, moved = moved_generators(call)
        if moved:
            raise MethodError(
                f"{name} draws from the global generator of {' and '.join(moved)}, so that its "
                "results depend on whatever else ran. Draw in the function that client_work(draw="
                "...) names, from its key: key.numpy() or key.torch()."
            )
        self._seen.add(name)
        return done


_FIX = "Client work returns new tensors: write x = x + d for x += d, or take a clone first."


def check_reply(name: str, reply: Any) -> None:
    """Raise MethodError unless what a client function returned is a reply made of trees."""
    if not isinstance(reply, Reply):
        raise MethodError(
            f"{name} returned a {type(reply).__name__}; expected a Reply. Return Reply(up, "
            "private, weight, metrics) of fedshot.protocol, where up names the uploaded parts."
        )
    if not isinstance(reply.up, Mapping):
        raise MethodError(
            f"{name} returned a Reply whose up is a {type(reply.up).__name__}; expected the "
            "uploaded parts by name, such as {'theta': ...}."
        )
    try:
        tree.leaves(dict(reply.up))
    except TypeError as error:
        raise MethodError(f"{name} returned a Reply with an up that is no tree: {error}") from None
    metrics = reply.metrics if isinstance(reply.metrics, Mapping) else {"metrics": reply.metrics}
    for metric, value in metrics.items():
        if not isinstance(value, Tensor):
            raise MethodError(
                f"{name} returned the metric {metric!r} as a {type(value).__name__}; expected a "
                "tensor of one number. Write torch.tensor(...) around it."
            )


def checked_round(
    method: Method[Any], server: Tree, clients: Clients, key: Key
) -> tuple[Tree, dict[str, float]]:
    """Return what a round of a method comes to: the server's new state, and its numbers.

    Raises MethodError where it returns anything else, such as the state alone.
    """
    found: Any = method.round(server, clients, key)
    if type(found) is tuple and len(found) == 2 and isinstance(found[1], Mapping):
        if type(found[0]) is type(server):
            return found[0], dict(found[1])
        found = found[0]
    raise MethodError(
        f"{type(method).__name__}.round returned a {type(found).__name__}; expected the server's "
        f"new state, a {type(server).__name__} as init gives, and the numbers of the round: return "
        "server, got.metrics."
    )


def moved_generators(call: Callable[[], T]) -> tuple[T, list[str]]:
    """Return what a call returns, and the libraries whose global generator it moved."""
    before = generators()
    done = call()
    after = generators()
    return done, [name for name, state in before.items() if after[name] != state]


def generators() -> dict[str, Any]:
    """Return the states of the global random generators by library."""
    words = np.random.get_state(legacy=False)
    assert isinstance(words, dict)
    state = words["state"]
    found: dict[str, Any] = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": (state["key"].tobytes(), state["pos"], words["has_gauss"]),
        "random": random.getstate(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["torch.cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    return found


def _version(leaf: Tensor) -> int:
    """Return how often torch counted a write; it counts none to a tensor of inference mode."""
    return -1 if leaf.is_inference() else leaf._version


def _owner(work: ClientWork) -> str:
    return type(work.method).__name__


def _place(given: Tree, before: list[tuple[Tensor, int, bool]]) -> str:
    """Return the path of the first input that changed; "" where parts came or went."""
    for (path, leaf), (was, version, asked) in zip(tree.items(given), before, strict=False):
        if leaf is not was or _version(leaf) != version or leaf.requires_grad != asked:
            return f": {path}"
    return ""
