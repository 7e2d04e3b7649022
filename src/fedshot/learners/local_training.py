"""The local training loop shared by federated methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import ClientData, Episode
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.learners.learner import EpisodeLoss
from fedshot.nn.gradients import value_and_grad
from fedshot.nn.models.mode import Mode, grid
from fedshot.nn.optim import OptState, Steps, clip_grad_norm
from fedshot.nn.stacks import memory

E = TypeVar("E")


class LocalSteps(NamedTuple, Generic[E]):
    """What a client trains on in one local update: the episodes or batches of each step."""

    steps: tuple[tuple[E, ...], ...]
    seed: Tensor  # of the dropout masks
    n: Tensor  # int64 scalar: the client's number of examples, n_k

    @property
    def n_episodes(self) -> int:
        """The number of episodes in all steps together, |B_k|."""
        return sum(len(step) for step in self.steps)


LocalEpisodes: TypeAlias = LocalSteps[Episode]


def sample_episodes(
    data: ClientData, spec: EpisodeSpec, steps: int, episodes_per_step: int, key: Key
) -> LocalEpisodes:
    """Draw the episodes of `steps` local steps from a client's data.

    Raises DataError when the client cannot form an episode.
    """
    drawn = data.episodes(spec, key.at("episodes").numpy(), steps * episodes_per_step)
    each = (drawn[s * episodes_per_step : (s + 1) * episodes_per_step] for s in range(steps))
    return LocalEpisodes(tuple(map(tuple, each)), key.at("noise").tensor(), torch.tensor(data.n))


class Trained(NamedTuple):
    """The result of local training."""

    params: Tree
    stats: Tree
    state: OptState
    metrics: Mapping[str, Tensor]  # loss (nats), accuracy ([0, 1]), extras: means over the episodes


class GradientResult(NamedTuple):
    """The mean gradient over the episodes of one step."""

    grads: Tree
    stats: Tree  # running statistics, updated by one episode after another
    metrics: list[dict[str, Tensor]]  # of each episode: loss (nats), accuracy ([0, 1]), extras


def mean_gradient(
    episode_loss: Callable[[Tree, Tree, E, Tensor], EpisodeLoss],
    params: Tree,
    stats: Tree,
    step: tuple[E, ...],
    noise: Mode,
) -> GradientResult:
    """Return the gradient of the mean loss over a step's episodes.

    The seed of `noise` seeds the dropout masks.
    """
    seeds = [noise.layer(e).seed for e in range(len(step))]
    return _mean_gradient(episode_loss, params, stats, step, seeds)


def _mean_gradient(
    episode_loss: Callable[[Tree, Tree, E, Tensor], EpisodeLoss],
    params: Tree,
    stats: Tree,
    step: tuple[E, ...],
    seeds: Sequence[Tensor | None],
) -> GradientResult:
    metrics: list[dict[str, Tensor]] = []
    grads = None
    for episode, seed in zip(step, seeds, strict=True):
        assert seed is not None

        def fn(
            w: Tree, episode: E = episode, stats: Tree = stats, seed: Tensor = seed
        ) -> tuple[Tensor, EpisodeLoss]:
            result = episode_loss(w, stats, episode, seed)
            return result.loss, result

        loss, result, grad = value_and_grad(fn, params)
        stats = tree.detach(result.stats)
        grads = grad if grads is None else tree.add(grads, grad)
        metrics.append(tree.detach({"loss": loss, "accuracy": result.accuracy, **result.extra}))
        del result  # and its graph, before the next graph is built
    if len(step) > 1:
        grads = tree.map(partial(torch.mul, other=1 / len(step)), grads)
    return GradientResult(grads, stats, metrics)


def mean_metrics(metrics: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of every metric over the episodes, as scalars."""
    return {name: torch.stack([one[name] for one in metrics]).mean() for name in metrics[0]}


def local_sgd(
    episode_loss: Callable[[Tree, Tree, E, Tensor], EpisodeLoss],
    optimizer: Steps,
    params: Tree,
    stats: Tree,
    local_episodes: LocalSteps[E],
    state: OptState | None = None,
    *,
    max_grad_norm: float = 0.0,
) -> Trained:
    """Train on each local step in turn: one optimiser step on the mean loss of its episodes.

    Args:
        episode_loss: `episode_loss(params, stats, episode, seed)`, a learner's method or another
            function with its signature. It may return tensors of `params`, but must not keep
            references to them: the next step may overwrite their memory.
        optimizer: turns a gradient into a step.
        params: initial parameters.
        stats: running statistics, updated by one episode after another.
        local_episodes: the episodes or batches of each step.
        state: saved optimiser state, or None to start fresh.
        max_grad_norm: gradients with a larger norm are scaled down to it; 0 turns clipping off.
    """
    state = optimizer.init(params) if state is None else state
    own = False  # whether this function made `params` and may overwrite them
    metrics: list[dict[str, Tensor]] = []
    steps = local_episodes.steps
    seeds = grid(local_episodes.seed, len(steps), max(map(len, steps), default=0))
    for step, noise in zip(steps, seeds, strict=True):
        grads, stats, found = _mean_gradient(episode_loss, params, stats, step, noise[: len(step)])
        metrics += found
        if max_grad_norm:
            grads = clip_grad_norm(grads, max_grad_norm)
        reuse = own and not _share_memory(params, (stats, *found))
        params, state = optimizer.update(grads, state, params, reuse=reuse)
        own = True
    return Trained(params, stats, state, mean_metrics(metrics))


def _share_memory(a: Tree, b: Tree) -> bool:
    places = {memory(leaf) for leaf in tree.leaves(a)}
    return any(memory(leaf) in places for leaf in tree.leaves(b))
