"""The interface of a federated method, and functions that predict test episodes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from threading import Lock
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from fedshot.core.errors import MethodError, check_word
from fedshot.core.graphs import Graphs, Result
from fedshot.core.machine import give_back_memory
from fedshot.core.ranges import AtLeast1, check_options
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import ClientData
from fedshot.data.episodes.group_sampler import GroupSampler
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.learners.feature_cache import FeatureCache, features_of, worth_caching
from fedshot.learners.learner import EvalEpisode, Learner
from fedshot.learners.local_training import sample_episodes
from fedshot.learners.proto import Proto
from fedshot.nn.models.model import Model
from fedshot.nn.prototypes import nearest_prototypes
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import PerClient, Reply, client_work
from fedshot.protocol.reducers import Gather

S = TypeVar("S", bound=Tree)
DIAGNOSTIC = "diagnostic"  # key in the metadata of an option that `diagnostic` makes
_TIDY = 32  # episodes between two returns of freed memory to the system

# Option names, each with one meaning in all methods.
BATCH_OPTIONS = ("batch", "inner_batch")  # examples of a local step; null for all
STEP_OPTIONS = ("local_steps", "prepare_steps")  # local steps between two uploads
PHASE_OPTIONS = ("classify_rounds",)  # rounds after which training changes to another phase
TEST_ROUNDS = "test_rounds"  # rounds that a group of clients trains at test


def diagnostic(default: Any) -> Any:
    """Return a dataclass field for a diagnostic option, which does not affect training.

    A run may be resumed with another value of this option.
    """
    return field(default=default, metadata={DIAGNOSTIC: True})


@dataclass(frozen=True)
class Traits:
    """What a method can do and what it requires, given its options.

    Args:
        max_way: largest number of classes of a training episode; None for any number.
        any_test_way: test episodes may have any number of classes, whatever `max_way` says.
        transductive: the prediction for a query may depend on the other queries.
        adapts: gradient steps adapt the model to the support set at test.
        adds_examples: predictions are built from the support examples one at a time, so that more
            examples can be added later.
        base_classes_only: the method only predicts base classes, and cannot be tested on others.
        resampled: the method trains on episodes whose images the partition "resampled" divides
            among all clients.
        trains_on_pool: with partition "resampled", clients draw batches from all training images,
            not from the images that the partition assigns to them.
        stores_client_models: `stored_model(server, clients, i)` returns the model that the server
            stores for client i.
        gathers: a client function and a part of its replies that the server needs from each client
            separately, not only as a sum, such as ("train", "model"); None if there is none. Secure
            sums then cannot be used.
        sends_changes: a round is one exchange, in which clients upload changes of the trees that
            they receive, and the server adds their mean. Asynchronous rounds need it.
        subtracts_own: a client subtracts its own upload from the mean that it receives, so the mean
            must be weighted by the clients' actual weights.
        unstackable: why the fleet "vectorised", which stacks clients, cannot run the method; "" if
            it can.
        warnings: messages that a run prints before round 1.
    """

    max_way: int | None = None
    any_test_way: bool = False
    transductive: bool = False
    adapts: bool = False
    adds_examples: bool = False
    base_classes_only: bool = False
    resampled: bool = False
    trains_on_pool: bool = False
    stores_client_models: bool = False
    gathers: tuple[str, str] | None = None
    sends_changes: bool = False
    subtracts_own: bool = False
    unstackable: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def max_test_way(self) -> int | None:
        """Largest number of classes of a test episode; None for any number."""
        return None if self.any_test_way else self.max_way


class Prediction(NamedTuple):
    """The logits of one model for the queries of one test episode."""

    eval_episode: int
    client: int | None  # None for the server's model
    logits: Tensor  # [queries, way]


class ModelState(NamedTuple):
    """The state of a server that trains one model and remembers nothing else."""

    theta: Tree  # the learner's parameters
    stats: Tree  # running statistics of batch norm


class ServerModel(NamedTuple):
    """A model that the server predicts with."""

    learner: Learner
    params: Tree
    stats: Tree  # running statistics of batch norm


@dataclass(frozen=True)
class Method(ABC, Generic[S]):
    """Base of a federated method: a frozen dataclass of options, with the functions below.

    `S` is the server's state: a tree, usually a named tuple. A client's private state is a tree
    that stays with the client. A subclass defines `server_model` or `evaluate`.
    """

    name: ClassVar[str] = ""  # in configurations and tables
    test_norm: ClassVar[str] = "running"  # what model.norm_policy "method" stands for
    trains_on_episodes: ClassVar[bool] = True  # if not, any client with an example takes part

    model: Model
    episode: EpisodeSpec

    @classmethod
    def norm_policy(cls, options: Mapping[str, Any]) -> str:
        """Return the batch-norm policy that model.norm_policy "method" selects."""
        del options
        return cls.test_norm

    @property
    def traits(self) -> Traits:
        """What the method can do and needs; a subclass changes a copy of `super().traits`."""
        return Traits(transductive=self.model.norm_policy == "transductive")

    @property
    def training(self) -> object:
        """All options that training depends on; None if training cannot be shared.

        Runs that differ only in other options, such as those of the test, can share one training.
        """
        return None

    @property
    def example_sensitivity(self) -> float | None:
        """The most (L2) that one example can change the sums of a run; None if there is no bound.

        It is for methods that upload sums over examples, each example once in a run.
        """
        return None

    def check_group(self, group: GroupSampler) -> None:
        """Raise ConfigError if the method cannot be tested on groups of clients as in `group`."""

    @abstractmethod
    def init(self, key: Key) -> S:
        """Return the server's state before round 1."""

    def init_client(self, client: int, key: Key) -> Tree:
        """Return a client's private state before its first round."""
        del client, key
        return {}

    @abstractmethod
    def round(self, server: S, clients: Clients, key: Key) -> tuple[S, Mapping[str, float]]:
        """Return the server's state after one more round, and the metrics of the round."""

    def server_model(self, server: S) -> ServerModel | None:
        """Return the model that the server predicts with; None if the clients' models predict."""
        del server
        return None

    def evaluate(
        self, server: S, clients: Clients, eval_episodes: Sequence[EvalEpisode], key: Key
    ) -> list[Prediction]:
        """Predict the queries of test episodes. Models adapted to the episodes are not kept."""
        del key
        return predict_by_model(checked_server_model(self, server), eval_episodes, clients)


def checked_server_model(method: Method[Any], server: Tree) -> ServerModel:
    """Return the model that the server predicts with. Raises MethodError if there is none."""
    model = method.server_model(server)
    if not isinstance(model, ServerModel):
        raise MethodError(
            f"{type(method).__name__}.server_model returned a {type(model).__name__}; expected "
            "ServerModel(learner, params, stats). To test another way, define evaluate."
        )
    return model


class EpisodicMethod(Method[S]):
    """A method whose clients take local steps on episodes that they draw from their data."""

    local_steps: AtLeast1
    episodes_per_step: AtLeast1

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def n_episodes(self) -> int:
        """Number of episodes of one local update, |B_k|."""
        return self.local_steps * self.episodes_per_step

    def draw(self, data: ClientData, key: Key) -> Tree:
        """Draw the episodes of a local update."""
        return sample_episodes(data, self.episode, self.local_steps, self.episodes_per_step, key)


class ClientModels(Method[S]):
    """A method whose clients each predict with their own model.

    `test_clients` is the argument `by` of `predict_at_clients`.
    """

    test_clients: Literal["round_robin", "all"] = "round_robin"

    @abstractmethod
    def predictor(self, down: Tree, private: Tree) -> Callable[[EvalEpisode], Tensor]:
        """Return a function from an episode to logits [queries, way].

        Args:
            down: the message to the client, with the entries that `message` returned.
            private: the client's private state.
        """

    def message(self, server: S, clients: Clients, client: int) -> dict[str, Tree]:
        """Return the named trees that the server sends a client in addition to the episodes."""
        del server, clients, client
        return {}

    @client_work()
    def answer(self, down: Tree, private: Tree, drawn: Tree) -> Reply:
        """Predict the received episodes with the client's own model."""
        del drawn
        logits = predict_all(self.predictor(down, private), down["questions"])
        return Reply({"logits": logits}, private, len(logits))

    def evaluate(
        self, server: S, clients: Clients, eval_episodes: Sequence[EvalEpisode], key: Key
    ) -> list[Prediction]:
        """Send the test episodes to the clients and return their predictions."""
        down = partial(self.message, server, clients)
        return predict_at_clients(
            self.answer, clients, eval_episodes, key, by=self.test_clients, down=down
        )


def predict_by_model(
    model: ServerModel, eval_episodes: Sequence[EvalEpisode], clients: Clients
) -> list[Prediction]:
    """Predict every episode with one model.

    Under running statistics, a prototypical network embeds each distinct example once.
    """
    learner, params, stats = model
    if (
        isinstance(learner, Proto)
        and learner.model.norm_policy == "running"
        and worth_caching(eval_episodes)
    ):
        embed = partial(learner.embed, params, stats)
        return predict_from_features(embed, nearest_prototypes, eval_episodes, clients)
    if len(eval_episodes) and (device := eval_episodes[0].support_x.device).type == "cuda":
        return _predict_on_gpu(model, eval_episodes, device)
    return predict_at_server(partial(learner.answer, params, stats), eval_episodes, clients)


def predict_at_server(
    predict: Callable[[EvalEpisode], Tensor],
    eval_episodes: Sequence[EvalEpisode],
    clients: Clients | None = None,
) -> list[Prediction]:
    """Predict every episode at the server, on as many cores as the fleet of `clients` uses."""

    def one(u: int) -> Prediction:
        found = Prediction(u, None, predict(eval_episodes[u]).detach().cpu())
        if u % _TIDY == _TIDY - 1:
            give_back_memory()  # the logits, which stay, leave holes between freed memory
        return found

    every = range(len(eval_episodes))
    return [one(u) for u in every] if clients is None else clients.parallel_map(one, every)


_GPU = Lock()  # several runs of one process may predict


@cache
def _graphs(device: torch.device) -> Graphs:
    return Graphs(device, most=4)


def _predict_on_gpu(
    model: ServerModel, eval_episodes: Sequence[EvalEpisode], device: torch.device
) -> list[Prediction]:
    """Predict every episode at the server, several at a time: see `Graphs`."""
    learner, graphs = model.learner, _graphs(device)
    name = learner, id(learner.model.table)  # equal models may have other word vectors

    def run(inputs: Tree) -> Result:
        return learner.answer(*inputs).detach(), None

    with _GPU:
        results: list[Callable[[], Result]] = []
        try:
            for eval_episode in eval_episodes:
                inputs = model.params, model.stats, eval_episode
                results.append(graphs.start(name, run, inputs))
            return [Prediction(u, None, result()[0]) for u, result in enumerate(results)]
        finally:
            torch.cuda.synchronize(device)


def predict_from_features(
    embed: Callable[[Tensor], Tensor],
    compare: Callable[[Tensor, Tensor, Tensor, int], Tensor],
    cache: FeatureCache,
    clients: Clients,
) -> list[Prediction]:
    """Predict every episode at the server, embedding each example once.

    Args:
        embed: maps examples to features; a row must not depend on the other rows.
        compare: maps support features, support labels, query features and the way to logits.
        cache: test episodes that share examples: `worth_caching` is true for them.
        clients: the clients, whose fleet spreads the episodes over its cores.
    """
    h = features_of(cache, embed, clients.parallel_map)

    def one(u: int) -> Prediction:
        index = cache.episode_index(u)
        with torch.no_grad():
            logits = compare(h[index.support], index.support_y, h[index.query], index.way)
        return Prediction(u, None, logits.cpu())

    return [one(u) for u in range(len(cache))]


def predict_at_clients(
    work: Callable[..., Reply],
    clients: Clients,
    eval_episodes: Sequence[EvalEpisode],
    key: Key,
    *,
    by: str = "round_robin",
    down: Callable[[int], Mapping[str, Tree]] = lambda _: {},
) -> list[Prediction]:
    """Send test episodes to the clients, which hold the models, and return their predictions.

    Args:
        work: client function that takes `{"questions": {"17": EvalEpisode, ...}}` and uploads
            `{"logits": {"17": logits, ...}}`, float32 [queries, way].
        clients: the population.
        eval_episodes: the test episodes. If they have owners, each goes to the client that owns it.
        key: key of this evaluation.
        by: which of the K clients get an episode without an owner: "round_robin", the client at
            position u mod K for episode u; "all", every client.
        down: returns what a client receives in addition to its episodes.
    """
    check_word("by", by, ("round_robin", "all"))
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

    # The reducer does not bound the values: logits that are not finite count as wrong predictions.
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
    predict: Callable[[EvalEpisode], Tensor], eval_episodes: Mapping[str, EvalEpisode]
) -> dict[str, Tensor]:
    """Return the logits of each episode, float32 [queries, way], by its key in `eval_episodes`."""
    return {u: predict(eval_episode).detach().float() for u, eval_episode in eval_episodes.items()}
