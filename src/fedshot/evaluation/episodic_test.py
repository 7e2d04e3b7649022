"""Episodic tests: fixed episodes, the same for every method, with a score and its interval.

The episodes are drawn once from (dataset, classes, shape, seed) and identified by a hash. A method
gets `EvalEpisode`s without the labels of the queries; `score` compares its predictions to them.

If clients are tested on their own classes, each episode belongs to one client. Its support is the
client's training data, and its queries are examples that the partition held out.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal, NotRequired, TypeAlias, TypeVar

import numpy as np
import torch
from pydantic import AfterValidator, Field
from torch import Tensor
from typing_extensions import TypedDict

from fedshot.core import tree
from fedshot.core.devices import CPU
from fedshot.core.errors import ConfigError, DataError
from fedshot.core.ranges import AtLeast1, Episodes
from fedshot.core.records import Share, Whole
from fedshot.core.seeds import Key
from fedshot.core.text import percent
from fedshot.core.tree import form
from fedshot.data.dataset import Dataset, Ints
from fedshot.data.episodes.episode import Tasks, check_counts, examples
from fedshot.data.episodes.group_sampler import GroupSampler, GroupTasks
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.data.partitions.partition import Partition
from fedshot.learners.feature_cache import EpisodeIndex
from fedshot.learners.learner import EvalEpisode, Held, LazyEpisodes
from fedshot.protocol.method import Prediction

_MIN_CLIENTS = 4  # with fewer clients, `far_below` finds none
_MAX_CONFUSED = 30  # most classes of a confusion matrix


@dataclass(frozen=True)
class TestOptions:
    """Options of the test and of validation.

    Args:
        way: number of classes in an episode, or a pair such as [3, 7] to draw it from this range.
        shot: number of support examples per class, over all clients of a group.
        query: number of queries per class, over all clients of a group.
        episodes: number of test episodes, from the novel classes.
        validation_episodes: number of episodes from the validation classes, by which the round is
            chosen.
        seed: seed of the episodes; separate from the training seed, so that runs with different
            training seeds have the same test.
        group: split of an episode among a group of clients that learn it together.
        pool: where test episodes come from. "shared": every episode is drawn from all novel
            examples. "clients": the partition assigns the novel examples to clients, as it does the
            training data, and the clients provide the episodes in turn, each from its own examples.
            A client that is left out of a run, because it cannot form a training episode, provides
            none. Runs that leave out different clients therefore have different tests.
        first_client_only: if clients predict, use only the first client, as in some published code;
            such a result is not a fair estimate, and is marked NOT HONEST wherever it is shown. It
            has no effect if the server predicts.
    """

    way: int | tuple[int, int] = 5
    shot: AtLeast1 = 1
    query: AtLeast1 = 15
    episodes: Episodes = 1000
    validation_episodes: Episodes = 200
    seed: int = 0
    group: GroupSampler = GroupSampler()
    pool: Literal["shared", "clients"] = "shared"
    first_client_only: bool = False

    def __post_init__(self) -> None:
        if self.pool == "clients" and self.group.clients:
            raise ConfigError(
                f"test.pool is 'clients' and test.group.clients is {self.group.clients}, but an "
                "episode comes from one client or is split among a group. Remove one of them."
            )
        if self.pool == "clients" and self.first_client_only:
            raise ConfigError(
                "test.pool is 'clients' and test.first_client_only is true, but the first client "
                "would predict episodes from the examples of others. Remove one of them."
            )
        if self.spec.min_way < 2:
            raise ConfigError(
                f"test.way is {self.way}; expected at least 2, because with one class every "
                "prediction is right."
            )
        for name in ("episodes", "validation_episodes"):
            if getattr(self, name) < 2:
                raise ConfigError(
                    f"test.{name} is {getattr(self, name)}; an interval needs at least 2 episodes."
                )

    @property
    def spec(self) -> EpisodeSpec:
        """The shape of an episode."""
        return EpisodeSpec(self.way, self.shot, self.query)


class EvalEpisodes(LazyEpisodes):
    """The episodes of a test, without the labels of the queries."""

    def __init__(
        self,
        dataset: Dataset,
        tasks: Tasks,
        device: torch.device = CPU,
        owners: tuple[int, ...] | None = None,
    ) -> None:
        self._dataset, self._tasks, self._device = dataset, tasks, device
        self.owners = owners

    def on(self, device: torch.device) -> EvalEpisodes:
        """Return the same episodes, with their tensors on a device."""
        return EvalEpisodes(self._dataset, self._tasks, device, self.owners)

    def __len__(self) -> int:
        return len(self._tasks)

    def _build(self, u: int) -> EvalEpisode:
        episode = self._tasks.episode(self._dataset, u)
        support_x, support_y, query_x, _, classes = episode
        found = EvalEpisode(support_x, support_y, query_x, classes, self._held(u))
        return found if self._device.type == "cpu" else tree.to(found, self._device)

    def _held(self, u: int) -> Held | tuple[()]:
        """Return which client holds each example of episode u.

        Returns () if the episodes are not split among clients.
        """
        tasks = self._tasks
        if not isinstance(tasks, GroupTasks):
            return ()
        rows = tasks.spare[u]
        holders = (torch.from_numpy(part[u]) for part in
                   (tasks.support_held, tasks.query_held, tasks.spare_held))  # fmt: skip
        labels = _labels(self._dataset, rows, tasks.classes[u])
        parts = (*holders, examples(self._dataset, rows), labels)
        return Held(*parts)

    @cached_property
    def _places(self) -> tuple[Ints, Ints]:
        """(distinct rows of the dataset in all episodes; row -> index among these rows, or -1)."""
        rows = np.unique(np.concatenate([*self._tasks.support, *self._tasks.query]))
        places = np.full(int(rows[-1]) + 1, -1, dtype=np.int64)
        places[rows] = np.arange(len(rows))
        return rows, places

    @property
    def distinct(self) -> int:
        """Number of distinct examples in all episodes."""
        return len(self._places[0])

    def examples(self, first: int, last: int) -> Tensor:
        """Return the distinct examples from index `first` to `last` - 1, [last - first, ...]."""
        return examples(self._dataset, self._places[0][first:last]).to(self._device)

    def episode_index(self, u: int) -> EpisodeIndex:
        """Return episode u as indices into the distinct examples that `examples` returns."""
        tasks, places = self._tasks, self._places[1]
        rows, classes = tasks.support[u], tasks.classes[u]
        support, query = (torch.from_numpy(places[r]) for r in (rows, tasks.query[u]))
        parts = (support, _labels(self._dataset, rows, classes), query)
        support, labels, query = tree.to(parts, self._device)
        return EpisodeIndex(support, labels, query, len(classes))


def _labels(dataset: Dataset, rows: Ints, classes: Ints) -> Tensor:
    """Return the label of each row as an index into `classes`, int64."""
    return torch.from_numpy((dataset.y[rows][:, None] == classes).argmax(axis=1))


class EpisodicTest:
    """A fixed set of episodes: methods get `eval_episodes`, and `score` gets `labels`.

    Args:
        dataset: the dataset.
        tasks: the dataset's rows in each episode.
        owners: the client that each episode belongs to; None if the episodes belong to no client.
    """

    def __init__(
        self, dataset: Dataset, tasks: Tasks, owners: tuple[int, ...] | None = None
    ) -> None:
        self._dataset, self._tasks, self.owners = dataset, tasks, owners
        self.eval_episodes = EvalEpisodes(dataset, tasks, owners=owners)
        self.digest = tasks.digest(dataset)
        if owners is not None:
            self.digest = hashlib.sha256(f"{self.digest} of {owners}".encode()).hexdigest()

    @classmethod
    def draw(
        cls,
        dataset: Dataset,
        classes: Sequence[int],
        spec: EpisodeSpec,
        episodes: int,
        key: Key,
        rows: Ints | None = None,
        group: GroupSampler = GroupSampler(),
    ) -> EpisodicTest:
        """Draw the episodes of a test from classes, or only from their rows `rows` if given.

        If `group` has clients, each episode is split among them. Raises DataError if the classes
        cannot fill an episode.
        """
        if not group.clients:
            return cls(dataset, Tasks.draw(dataset, classes, spec, episodes, key, rows))
        rows = dataset.images_of(classes) if rows is None else rows
        check_counts(dataset, rows, classes, group.needs(spec))
        return cls(dataset, GroupTasks.sample(dataset, rows, spec, group, episodes, key))

    @classmethod
    def own(
        cls,
        dataset: Dataset,
        train: Partition,
        held: Partition,
        clients: Sequence[int],
        key: Key,
    ) -> EpisodicTest:
        """Return a test of clients on their own classes, one episode for each of `clients`.

        Args:
            dataset: the dataset of both partitions.
            train: the training data of the clients, used as support sets.
            held: their held-out data, used as query sets in random order, so that positions do not
                reveal labels.
            clients: the clients to test, in the order of their episodes.
            key: seeds the order of queries.

        Raises DataError for a client without held-out data, or with a query of a class that it does
        not train on.
        """
        support, query, classes = [], [], []
        for c in clients:
            mine, asked = train[c], held[c]
            known = np.unique(dataset.y[mine]).astype(np.int64)
            if not len(asked):
                raise DataError(f"client {c} has no images to test on. Raise `shot`.")
            strange = np.setdiff1d(dataset.y[asked], known)
            if len(strange):
                raise DataError(
                    f"client {c} is tested on class {dataset.class_names[strange[0]]!r}, of which "
                    "it has no training image"
                )
            support.append(mine[np.argsort(dataset.y[mine], kind="stable")])
            query.append(key.at("client", c).numpy().permutation(asked))
            classes.append(known)
        return cls(dataset, Tasks(tuple(support), tuple(query), tuple(classes)), tuple(clients))

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def ways(self) -> tuple[int, int]:
        """The smallest and the largest number of classes of an episode."""
        ways = [len(classes) for classes in self._tasks.classes]
        return min(ways), max(ways)

    def labels(self, u: int) -> Tensor:
        """Return the labels of the queries of episode u, int64 [queries]."""
        return _labels(self._dataset, self._tasks.query[u], self._tasks.classes[u])

    def classes(self, u: int) -> Tensor:
        """Return the classes of episode u as class indices of the dataset, int64 [way]."""
        return torch.from_numpy(self._tasks.classes[u])

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of all classes of the dataset."""
        return self._dataset.class_names


@dataclass(frozen=True)
class Score:
    """The result of a test. An episode whose client's reply was lost has no prediction."""

    accuracy: float  # mean over the predicted episodes, in [0, 1]
    interval: float  # half-width of the 95 % interval over episodes; 0 if all are equal
    episodes: int  # number of predicted episodes
    unanswered: int  # number of episodes that were not predicted
    diverged: int  # number of predictions with infinite or NaN logits, which count as wrong
    tasks: str  # hash of the episodes
    transductive: bool  # whether predictions may depend on other queries
    # Client id -> mean accuracy over the episodes that it predicted or owns; empty if the server
    # predicted episodes that belong to no client.
    clients: dict[int, float]
    worst_tenth: float | None  # mean over the lowest tenth of the clients
    per_episode: tuple[float, ...]  # accuracies of the predicted episodes, in order
    # Class name -> predicted name -> number of queries; empty for more than 30 classes.
    confusion: dict[str, dict[str, int]] = field(default_factory=dict)
    spread: float | None = None  # standard deviation over clients; None for fewer than 2
    missing: tuple[int, ...] = ()  # numbers of the episodes that were not predicted

    def to_json(self) -> dict[str, Any]:
        """Return the score as JSON values."""
        clients = {str(c): a for c, a in self.clients.items()}
        return asdict(self) | {"clients": clients, "missing": list(self.missing)}

    def __str__(self) -> str:
        if not self.interval:
            accuracy = f"{100 * self.accuracy:.2f}"
            return f"{accuracy} % (no interval: all {self.episodes} accuracies are equal)"
        return f"{percent(self.accuracy, self.interval)} %"


HalfWidth: TypeAlias = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]
"""Half-width of the confidence interval of a mean accuracy.

It may exceed 1: for two episodes with accuracies 0 and 1 it is 6.4.
"""


class ScoreFields(TypedDict):
    """The JSON of a score; results of recipes store counts in place of `per_episode`."""

    accuracy: Share
    interval: HalfWidth
    episodes: Annotated[int, Field(ge=1, lt=2**63)]
    unanswered: Whole
    diverged: Whole
    tasks: str
    transductive: bool
    clients: dict[str, Share]
    worst_tenth: Share | None
    per_episode: NotRequired[Annotated[list[Share], Field(min_length=1)]]
    confusion: Annotated[
        dict[str, Annotated[dict[str, Whole], Field(max_length=_MAX_CONFUSED)]],
        Field(max_length=_MAX_CONFUSED),
    ]
    spread: Share | None
    missing: list[Whole]


T = TypeVar("T", bound=Mapping[str, Any])


def checked_episodes(held: T) -> T:
    """Return a score's JSON unchanged, after checking its lists of episodes.

    Raises ValueError unless `missing` lists distinct indices of the episodes without a prediction,
    which `per_episode` leaves out.
    """
    marks, missing = held.get("per_episode", ()), held["missing"]
    if marks and len({u for u in missing if u < len(marks) + len(missing)}) != len(missing):
        raise ValueError("`missing` does not name the episodes that `per_episode` lacks")
    return held


ScoreJson: TypeAlias = Annotated[ScoreFields, AfterValidator(checked_episodes)]


@dataclass(frozen=True)
class ValidationResult:
    """The validation accuracies of a round, which decide whether the round is chosen."""

    per_episode: tuple[float, ...]  # accuracy of each predicted episode, in order
    missing: tuple[int, ...] = ()  # numbers of the episodes that were not predicted

    @classmethod
    def of(cls, score: Score) -> ValidationResult:
        """Return the accuracies and missing episodes of a score."""
        return cls(score.per_episode, score.missing)

    @classmethod
    def from_json(cls, held: Mapping[str, Any]) -> ValidationResult:
        """Return the accuracies and missing episodes in the JSON of a score."""
        return cls(tuple(held["per_episode"]), tuple(held["missing"]))

    @property
    def accuracy(self) -> float:
        """Mean over the predicted episodes."""
        return statistics.fmean(self.per_episode)

    def beats(self, best: ValidationResult | None) -> bool:
        """Whether this round is better than the best so far, on the episodes predicted in both.

        Episodes are missing if a client's reply was lost, and accuracies on different episodes are
        not comparable. If the best round lacks more than half of this round's episodes, the round
        with more predicted episodes is better.
        """
        if best is None:
            return True
        mine, theirs = self._by_episode(), best._by_episode()
        common = [u for u in mine if u in theirs]
        if 2 * len(common) < len(mine):
            return len(mine) > len(theirs)
        new, old = (statistics.fmean(held[u] for u in common) for held in (mine, theirs))
        return new > old

    def _by_episode(self) -> dict[int, float]:
        missing = set(self.missing)
        numbers = (u for u in range(len(self.per_episode) + len(missing)) if u not in missing)
        return dict(zip(numbers, self.per_episode, strict=True))


def half_width(values: Sequence[float]) -> float:
    """Return the half-width of the 95 % interval of a mean, t s / sqrt(n).

    t is Student's t with n - 1 degrees of freedom: 1.962 for 1000 values, 2.262 for 10. Raises
    `statistics.StatisticsError` for fewer than two values.
    """
    return quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def quantile(freedom: float) -> float:
    """Return the 97.5 % quantile of Student's t with `freedom` degrees of freedom."""
    from scipy.special import stdtrit  # importing takes 0.25 s

    return float(stdtrit(freedom, 0.975))


def score(
    predictions: Sequence[Prediction], episodic_test: EpisodicTest, *, transductive: bool = False
) -> Score:
    """Compare predictions to the labels of a test, and return the score.

    An episode that several clients predicted counts once, with the mean of their accuracies.

    Raises:
        ValueError: logits do not fit the queries, or fewer than two episodes have a prediction.
    """
    by_episode: dict[int, list[float]] = defaultdict(list)
    by_client: dict[int, list[float]] = defaultdict(list)
    truth: dict[int, Tensor] = {}
    diverged, pairs = 0, []
    for u, client, logits in predictions:
        if u not in truth:
            truth[u] = episodic_test.labels(u)
        if logits.ndim != 2 or len(logits) != len(truth[u]):
            raise ValueError(
                f"episode {u} has {len(truth[u])} queries, but its logits are {form(logits)}"
            )
        # A query with NaN among its logits counts as wrong, although argmax returns a class.
        finite = torch.isfinite(logits).all(-1)
        diverged += not bool(finite.all())
        chosen = logits.argmax(-1)
        accuracy = float(((chosen == truth[u]) & finite).double().mean())
        pairs.append(episodic_test.classes(u)[torch.stack([truth[u], chosen])[:, finite]])
        by_episode[u].append(accuracy)
        owner = client if episodic_test.owners is None else episodic_test.owners[u]
        if owner is not None:
            by_client[owner].append(accuracy)
    per_episode = [statistics.fmean(by_episode[u]) for u in sorted(by_episode)]
    if len(per_episode) < 2:
        raise ValueError(
            f"{len(per_episode)} episodes have a prediction; an interval needs at least 2"
        )
    clients = {c: statistics.fmean(by_client[c]) for c in sorted(by_client)}
    return Score(
        accuracy=statistics.fmean(per_episode),
        interval=half_width(per_episode),
        episodes=len(per_episode),
        unanswered=len(episodic_test) - len(per_episode),
        diverged=diverged,
        tasks=episodic_test.digest,
        transductive=transductive,
        clients=clients,
        worst_tenth=worst_tenth(list(clients.values())) if clients else None,
        per_episode=tuple(per_episode),
        confusion=_confusion(pairs, episodic_test.class_names),
        spread=statistics.stdev(clients.values()) if len(clients) > 1 else None,
        missing=tuple(u for u in range(len(episodic_test)) if u not in by_episode),
    )


def _confusion(pairs: Sequence[Tensor], names: Sequence[str]) -> dict[str, dict[str, int]]:
    """Return class name -> predicted name -> number of queries; empty for more than 30 classes.

    Each tensor in `pairs` is int64 [2, queries]: the true and the predicted class, as indices
    into `names`.
    """
    every = torch.cat(list(pairs), dim=1).numpy()
    distinct, counts = np.unique(every, axis=1, return_counts=True)
    if len(np.unique(distinct)) > _MAX_CONFUSED:
        return {}
    found: dict[str, dict[str, int]] = {}
    for (y, predicted), count in zip(distinct.T.tolist(), counts.tolist(), strict=True):
        found.setdefault(names[y], {})[names[predicted]] = count
    return found


def total_confusion(tests: Iterable[Mapping[str, Any]]) -> dict[str, Counter[str]]:
    """Return the sum of the confusion matrices of several scores in JSON form, by class name.

    It is empty if no score has a confusion matrix.
    """
    total: dict[str, Counter[str]] = {}
    for test in tests:
        for true, row in (test.get("confusion") or {}).items():
            total.setdefault(true, Counter()).update(row)
    return total


def worst_tenth(accuracies: Sequence[float]) -> float:
    """Return the mean of the lowest n // 10 of n accuracies, or the lowest accuracy if n < 10."""
    return statistics.fmean(sorted(accuracies)[: max(1, len(accuracies) // 10)])


def far_below(accuracies: Mapping[int, float]) -> dict[int, float]:
    """Return the clients whose accuracy is far below the others', with their accuracies.

    Far below is more than 0.2, and more than five standard deviations, below the median; the
    standard deviation is estimated from the median absolute deviation. The result is empty for
    fewer than four clients.
    """
    if len(accuracies) < _MIN_CLIENTS:
        return {}
    median = statistics.median(accuracies.values())
    deviation = 1.4826 * statistics.median(abs(a - median) for a in accuracies.values())
    least = median - max(0.2, 5 * deviation)
    return {client: a for client, a in sorted(accuracies.items()) if a < least}
