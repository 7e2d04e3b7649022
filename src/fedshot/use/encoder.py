"""The encoder inside a run's state, whatever its method calls it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fedshot.core import tree
from fedshot.core.errors import ConfigError
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.nn.models.model import Model
from fedshot.nn.optim import OptState
from fedshot.use.trained import TrainedRun

# Trees of a model's shape that are none: step sizes, sums, others' models, states of optimisers.
_NOT_MODELS = frozenset({"alpha", "pool", "outer", "optimizer", "bank", "moments"})


def encoder_of(run: TrainedRun, client: int | None = None) -> tuple[Tree, Tree]:
    """Return (parameters of the backbone, running statistics) of the round that answers.

    Args:
        run: the run.
        client: whose, where clients keep encoders of their own.

    Raises ConfigError when there is none, or several and no way to tell which is meant.
    """
    states: list[Tree] = [] if run.banked else [run.server]
    if client is not None:
        run.check_client(client)
        # Who uploads a model answers with that; what it keeps beside may be where it began.
        states = [run.remembered(client), run.private(client), *states]
    for state in states:
        found = _find(run.model, state)
        if found is not None:
            return found
    hint = " Choose one with --client." if run.keeps_private and client is None else ""
    raise ConfigError(
        f"the state of {run.method.name} holds no single encoder that could be exported.{hint}"
    )


def _find(model: Model, state: Tree) -> tuple[Tree, Tree] | None:
    like, stats_like = model.init(Key(0))
    bodies = _alike(state, like["body"], "body")
    if len(bodies) != 1:
        return None
    if not tree.leaves(stats_like):
        return bodies[0], {}
    stats = _alike(state, stats_like, "stats")
    return (bodies[0], stats[0]) if len(stats) == 1 else None


def _alike(state: Tree, like: Tree, name: str) -> list[Tree]:
    """Return the trees of one form in a state; those called `name`, where there are several."""
    found = [(path, node) for path, node in _nodes(state, ()) if not tree.difference(like, node)]
    if len(found) > 1:
        found = [(path, node) for path, node in found if path and path[-1] == name]
    return [node for _, node in found]


def _nodes(node: Tree, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Tree]]:
    if isinstance(node, OptState) or (path and path[-1] in _NOT_MODELS):
        return
    if isinstance(node, Mapping | tuple):
        yield path, node
        names = getattr(node, "_fields", None) or (
            list(node) if isinstance(node, Mapping) else [str(i) for i in range(len(node))]
        )
        for i, name in enumerate(names):
            child = node[name] if isinstance(node, Mapping) else node[i]
            yield from _nodes(child, (*path, str(name)))
