"""The local training loop that federated methods share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.errors import ConfigError
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import ClientData, Episode
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.learners.learner import EpisodeLoss
from fedshot.nn.gradients import value_and_grad
from fedshot.nn.models.mode import Mode, grid
from fedshot.nn.optim import OptState, Steps, shortened
from fedshot.nn.stacks import memory

E = TypeVar("E")
E_co = TypeVar("E_co", covariant=True)


class LocalSteps(Protocol[E_co]):
    """What a visit learns from: for each step some episodes or batches, and the seed of noise."""

    @property
    def steps(self) -> tuple[tuple[E_co, ...], ...]:
        """The episodes or batches of each step."""
        ...

    @property
    def seed(self) -> Tensor:
        """Makes the dropout masks."""
        ...


class LocalEpisodes(NamedTuple):
    """The episodes of one visit to a client: for each step some episodes, and the seed of noise."""

    steps: tuple[tuple[Episode, ...], ...]
    seed: Tensor
    n: Tensor  # examples that the client holds, n_k

    @property
    def n_episodes(self) -> int:
        """How many episodes there are in all steps together, |B_k|."""
        return sum(len(step) for step in self.steps)


def sample_episodes(
    data: ClientData, spec: EpisodeSpec, steps: int, episodes_per_step: int, key: Key
) -> LocalEpisodes:
    """Draw the episodes of `steps` local steps from a client's data.

    Raises DataError when the client cannot form an episode.
    """
    drawn = data.episodes(spec, key.at("episodes").numpy(), steps * episodes_per_step)
    each = (drawn[s * episodes_per_step : (s + 1) * episodes_per_step] for s in range(steps))
    return LocalEpisodes(
        tuple(tuple(step) for step in each),
        key.at("noise").tensor(),
        torch.tensor(data.n),
    )


class Trained(NamedTuple):
    """Where local training ended."""

    params: Tree
    stats: Tree
    state: OptState
    metrics: Mapping[str, Tensor]  # loss (nats), accuracy ([0, 1]), extras: means over the episodes


class GradientResult(NamedTuple):
    """What the episodes of one step taught together."""

    grads: Tree  # mean over the episodes
    stats: Tree  # running statistics, moved by one episode after another
    told: list[dict[str, Tensor]]  # of each episode: loss (nats), accuracy ([0, 1]), extras


def mean_gradient(
    episode_loss: Callable[[Tree, Tree, E, Tensor], EpisodeLoss],
    params: Tree,
    stats: Tree,
    step: tuple[E, ...],
    noise: Mode,
) -> GradientResult:
    """Return the gradient of the mean loss of some episodes; `noise` seeds their dropout masks."""
    seeds = [noise.layer(e).seed for e in range(len(step))]
    return _mean_gradient(episode_loss, params, stats, step, seeds)


def _mean_gradient(
    episode_loss: Callable[[Tree, Tree, E, Tensor], EpisodeLoss],
    params: Tree,
    stats: Tree,
    step: tuple[E, ...],
    seeds: Sequence[Tensor | None],
) -> GradientResult:
    told: list[dict[str, Tensor]] = []
    grads = None
    for episode, seed in zip(step, seeds, strict=True):
        assert seed is not None

        def fn(
            w: Tree, episode: E = episode, stats: Tree = stats, seed: Tensor = seed
        ) -> tuple[Tensor, EpisodeLoss]:
            gradients = episode_loss(w, stats, episode, seed)
            return gradients.loss, gradients

        loss, gradients, grad = value_and_grad(fn, params)
        stats = tree.detach(gradients.stats)
        grads = grad if grads is None else tree.add(grads, grad)
        scalars = {"loss": loss, "accuracy": gradients.accuracy, **gradients.extra}
        told.append(tree.detach(scalars))
        del gradients  # with its graph, before the next one is made
    if len(step) > 1:
        grads = tree.map(partial(torch.mul, other=1 / len(step)), grads)
    return GradientResult(grads, stats, told)


def mean_metrics(told: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of every scalar over the episodes."""
    return {name: torch.stack([one[name] for one in told]).mean() for name in told[0]}


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
    """Minimise the mean loss of the episodes of each step, one optimiser step for each.

    Args:
        lesson: `episode_loss(params, stats, episode, seed)`; a learner's, or one with terms added.
        It may
            return parameters; of what it keeps beside that it keeps a copy, as the next step may
            write over their memory.
        optimizer: what makes a step of a gradient.
        params: where to start.
        stats: running statistics, moved by one episode after another.
        lessons: the episodes, or batches.
        state: the optimiser's; None starts afresh.
        max_grad_norm: a longer gradient is shortened to this norm; 0 takes any.
    """
    state = optimizer.init(params) if state is None else state
    own = False  # after a step they are nobody else's
    told: list[dict[str, Tensor]] = []
    most = max(map(len, local_episodes.steps), default=0)
    for step, seeds in zip(
        local_episodes.steps,
        grid(local_episodes.seed, len(local_episodes.steps), most),
        strict=True,
    ):
        grads, stats, found = _mean_gradient(episode_loss, params, stats, step, seeds[: len(step)])
        told += found
        if max_grad_norm:
            grads = shortened(grads, max_grad_norm)
        reuse = own and not _kept(params, (stats, *found))
        params, state = optimizer.update(grads, state, params, reuse=reuse)
        own = True
    return Trained(params, stats, state, mean_metrics(told))


def _kept(params: Tree, reported: Tree) -> bool:
    """Whether something that a lesson told is a parameter, or a part of one."""
    places = {memory(leaf) for leaf in tree.leaves(params)}
    return any(memory(leaf) in places for leaf in tree.leaves(reported))


def check_not_negative(**options: float) -> None:
    """Refuse a weight, or a number of things, below 0."""
    for name, value in options.items():
        if not 0 <= value < float("inf"):
            raise ConfigError(f"{name} is {value}; expected a finite number from 0.")


def check_positive(**options: int) -> None:
    """Refuse a number of things below 1."""
    for name, value in options.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}; expected a whole number from 1.")


def check_budget(local_steps: int, episodes_per_step: int) -> None:
    """Refuse a budget of local work that is not at least one step of one episode."""
    if local_steps < 1 or episodes_per_step < 1:
        raise ConfigError(
            f"local_steps is {local_steps} and episodes_per_step is {episodes_per_step}; expected "
            "whole numbers from 1."
        )
