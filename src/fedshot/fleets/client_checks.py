"""Checks of a method's client functions at each call.

Every call is checked for unchanged inputs and for returning a `Reply`; this takes microseconds.
Only the first call of a function is checked for use of global random generators, since reading
the generators' states takes longer and other threads may use the generators. In-place writes that
torch does not count (through `.data` or numpy) are missed here; `fedshot check` finds them.
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
from fedshot.protocol.method import Method, checked_server_model

T = TypeVar("T")


class WorkChecks:
    """Runs client functions (functions of a method that run on a client) and checks each call."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def draw(self, work: ClientWork, data: Any, key: Key) -> Tree:
        """Draw a client function's inputs. Raises MethodError if a global generator is used."""
        name = work.draw_name
        if name is None:
            return {}
        return self._first_checked(f"{_owner(work)}.{name}", lambda: work.draw(data, key))

    def run(self, work: ClientWork, down: Tree, private: Tree, drawn: Tree) -> Reply:
        """Run a client function with a message, a private state and the random inputs `drawn`.

        Raises MethodError if it changes its inputs, returns no `Reply`, or uses a global generator.
        """
        name = f"{_owner(work)}.{work.name}"
        given = {"down": down, "private": private, "drawn": drawn}
        try:
            leaves = tree.leaves(given)
        except TypeError as error:
            raise MethodError(f"the input of {name} is not a tree: {error}") from None
        before = [(leaf, _version(leaf), leaf.requires_grad) for leaf in leaves]
        reply = self._first_checked(name, lambda: work(down, private, drawn))
        changed = [
            f": {path}"
            for (path, leaf), (was, version, asked) in zip(tree.items(given), before, strict=False)
            if leaf is not was or _version(leaf) != version or leaf.requires_grad != asked
        ]
        if changed or len(tree.leaves(given)) != len(before):
            raise MethodError(
                f"{name} changes its inputs in place{changed[0] if changed else ''}. Return new "
                "tensors: write x = x + d instead of x += d, or clone the input first."
            )
        check_reply(name, reply)
        return reply

    def _first_checked(self, name: str, call: Callable[[], T]) -> T:
        """Call a function; raise MethodError if its first call advances a global generator."""
        if name in self._seen:
            return call()
        done, moved = moved_generators(call)
        if moved:  # repeat the call: another thread may have advanced the generator
            _, moved = moved_generators(call)
        if moved:
            raise MethodError(
                f"{name} draws from the global generator of {' and '.join(moved)}, so its results "
                "depend on what ran before. Draw in the function named in client_work(draw=...), "
                "from its key: key.numpy() or key.torch()."
            )
        self._seen.add(name)
        return done


def check_reply(name: str, reply: Any) -> None:
    """Raise MethodError unless a client function returned a `Reply` of trees and tensors."""
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
        raise MethodError(f"{name} returned a Reply whose up is not a tree: {error}") from None
    metrics = reply.metrics if isinstance(reply.metrics, Mapping) else {"metrics": reply.metrics}
    for metric, value in metrics.items():
        if not isinstance(value, Tensor):
            raise MethodError(
                f"{name} returned the metric {metric!r} as a {type(value).__name__}; expected a "
                "tensor of one number. Write torch.tensor(...) around it."
            )


def checked_init(method: Method[Any], key: Key) -> Tree:
    """Return the server's first state.

    Raises MethodError if it is not a tree, or if `server_model` is needed and fails for it or makes
    no model of it.
    """
    server = _checked_state(f"{type(method).__name__}.init", method.init(key))
    if type(method).evaluate is Method.evaluate:
        try:
            checked_server_model(method, server)
        except (ArithmeticError, RuntimeError) as error:
            raise MethodError(
                f"{type(method).__name__}.server_model fails for the state that init returned: "
                f"{error}. It must make a model of it, which is evaluated before training."
            ) from error
    return server


def checked_init_client(method: Method[Any], client: int, key: Key) -> Tree:
    """Return a client's first private state. Raises MethodError if it is not a tree."""
    return _checked_state(f"{type(method).__name__}.init_client", method.init_client(client, key))


def _checked_state(name: str, state: Tree) -> Tree:
    try:
        tree.leaves(state)
    except TypeError as error:
        raise MethodError(f"{name} returned a state that is not a tree: {error}") from None
    return state


def checked_round(
    method: Method[Any], server: Tree, clients: Clients, key: Key
) -> tuple[Tree, dict[str, float]]:
    """Run a round of a method; return the server's new state and the metrics.

    Raises MethodError if the method does not return both, if the form of the state changes, or if a
    metric is not a number.
    """
    name = type(method).__name__
    found: Any = method.round(server, clients, key)
    if type(found) is tuple and len(found) == 2 and isinstance(found[1], Mapping):
        for metric, value in found[1].items():
            if not isinstance(value, int | float):
                raise MethodError(
                    f"{name}.round returned the metric {metric!r} as a "
                    f"{type(value).__name__}; expected a number. Write float(...) around it."
                )
        if type(found[0]) is type(server):
            changed = tree.difference(server, found[0])
            if changed is None:
                return found[0], dict(found[1])
            raise MethodError(
                f"{name}.round returned a state in another form: {changed}. A state keeps the "
                "parts, shapes and types that init returned; let init return zeros for later parts."
            )
        found = found[0]
    raise MethodError(
        f"{name}.round returned a {type(found).__name__}; expected the server's "
        f"new state, a {type(server).__name__} as returned by init, and the metrics of the round: "
        "return server, got.metrics."
    )


def moved_generators(call: Callable[[], T]) -> tuple[T, list[str]]:
    """Return the result of a call, and the libraries whose global generator it advanced."""
    before = generators()
    done = call()
    after = generators()
    return done, [name for name, state in before.items() if after[name] != state]


def generators() -> dict[str, Any]:
    """Return the states of the global random generators, by library."""
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
    """Return torch's count of in-place writes; -1 for inference tensors, which have no count."""
    return -1 if leaf.is_inference() else leaf._version


def _owner(work: ClientWork) -> str:
    return type(work.method).__name__
