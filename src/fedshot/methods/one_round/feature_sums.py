"""The base class of the one-round methods: each client uploads sums over its features once.

With a fixed encoder, closed-form classifiers depend on the training data only through sums over
examples. The sum over all clients is exact, so the federated classifier equals that of the pooled
data, however the examples are distributed over the clients. The server never needs the sums of a
single client.

A client's examples are counted once: after an accepted upload its private state says so, and later
uploads are zero. If only some clients take part in a round, the sums are complete after several
rounds.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedshot.core.errors import ConfigError
from fedshot.core.ranges import check_options
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import ClientData
from fedshot.learners.classification import Batch, base_numbers
from fedshot.learners.feature_cache import BLOCK
from fedshot.learners.learner import EvalEpisode, episode_features
from fedshot.nn.masking import mask_logits
from fedshot.nn.models.mode import Mode
from fedshot.nn.models.module_backbone import ModuleBackbone
from fedshot.nn.prototypes import members, unit_rows
from fedshot.protocol.averaging import OF_EXAMPLES, OF_FEATURES
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Reply, client_work
from fedshot.protocol.method import Method, Prediction, Traits, predict_at_server
from fedshot.protocol.reducers import Sum

_ROUNDING = 1e-8  # eigenvalues below this share of the largest entry are rounding


class FeatureSums(NamedTuple):
    """Sums over the features h of training examples, in float64; C base classes, d features."""

    counts: Tensor  # int64 [C]: examples of each class
    sums: Tensor  # [C, d]: sum of h over the examples of each class
    products: Tensor  # [d (d + 1) / 2]: upper triangle of the sum of h h^T; [0] if not needed

    def moment(self) -> Tensor:
        """Return the sum of h h^T over all examples, [d, d]."""
        d = self.sums.shape[1]
        row, column = torch.triu_indices(d, d, device=self.products.device)
        full = self.products.new_zeros(d, d)
        full[row, column] = self.products
        full[column, row] = self.products
        return without_negative(full)


def without_negative(a: Tensor) -> Tensor:
    """Return a symmetric matrix [d, d] with its negative eigenvalues set to 0.

    The result is the nearest positive semi-definite matrix, for sums to which noise was added. A
    matrix whose negative eigenvalues are only rounding errors is returned unchanged.
    """
    slack = (
        _ROUNDING
        * a.diagonal().abs().max().clamp_min(1e-200)
        * torch.eye(len(a), dtype=a.dtype, device=a.device)
    )
    if not torch.linalg.cholesky_ex(a + slack)[1]:
        return a
    values, vectors = torch.linalg.eigh(a)
    found: Tensor = (vectors * values.clamp_min(0)) @ vectors.T
    return found


class OneRoundState(NamedTuple):
    """The server's state."""

    theta: Tree  # the encoder, which is not trained
    stats: Tree  # running statistics of batch norm
    total: FeatureSums


class Labelled(NamedTuple):
    """What an episode is classified from: its support features, and sums over training examples.

    Features are in float64.
    """

    h: Tensor  # [n, d]
    y: Tensor  # int64 [n], 0..way-1
    classes: Tensor  # int64 [way]: class numbers of the dataset
    base: Tensor  # int64 [way]: positions among the base classes; -1 for a new class
    total: FeatureSums

    @property
    def known(self) -> Tensor:
        """Whether each class of the episode has training examples, bool [way]."""
        return (self.base >= 0) & (self.total.counts[self.base.clamp_min(0)] > 0)

    def sums(self) -> tuple[Tensor, Tensor]:
        """Return the sum of features [way, d] and the number of examples [way] of each class.

        They are those of the training examples, or for a class without any, of the support set.
        """
        member = members(self.y, len(self.classes)).to(self.h.dtype)
        at, known = self.base.clamp_min(0), self.known
        sums = torch.where(known[:, None], self.total.sums[at], member @ self.h)
        counts = torch.where(known, self.total.counts[at].to(self.h.dtype), member.sum(1))
        return sums, counts

    def new(self) -> Tensor:
        """Return the support features [m, d] of classes without training examples."""
        return self.h[~self.known[self.y]]

    def means(self) -> Tensor:
        """Return the mean feature of each class, [way, d]; zeros for a class without examples."""
        sums, counts = self.sums()
        return sums / counts.clamp_min(1.0)[:, None]


@dataclass(frozen=True)
class OneRoundMethod(Method[OneRoundState]):
    """A classifier in closed form on the features of an encoder that is not trained.

    A class with training examples is predicted from the sums of all clients; a new class from the
    support set of its episode. A class without any example is never predicted.

    Args:
        model: the encoder, which keeps its initial weights; its head, if it has one, is not used.
        episode: not used.
        classes: the base classes, as class indices of the dataset.
        normalize: whether features are scaled to length 1 before they are summed. If not, the
            server rejects a client's sums beyond 2^26.
    """

    trains_on_episodes: ClassVar[bool] = False
    needs_products: ClassVar[bool] = True  # whether clients upload the sum of h h^T

    classes: tuple[int, ...]
    normalize: bool = True

    def __post_init__(self) -> None:
        check_options(self)
        if self.episode.augment.active:
            raise ConfigError(
                f"episode.augment is set, but {self.name} does not augment the examples whose "
                "features it sums. Remove it."
            )
        if len(self.model.backbone.norm_policies) > 1 and self.model.norm_policy != "running":
            raise ConfigError(
                f"model.norm_policy is {self.model.norm_policy!r}, so the features of an example "
                f"depend on other examples; {self.name} needs 'running'."
            )

    @property
    def traits(self) -> Traits:
        """What the method can do and what it needs."""
        warnings = super().traits.warnings
        if isinstance(self.model.backbone, ModuleBackbone):
            if self.model.trains_backbone:
                text = f"{self.name} does not train, and model.backbone.tune sends weights"
                warnings += (f"{text}. Set it to 'none'.",)
        elif self.model.trains_backbone:
            text = f"{self.name} does not train: the backbone keeps its random initial weights"
            hint = "If the data are features already, set model.backbone to mlp with hidden []"
            warnings += (f"{text}. {hint}.",)
        return replace(super().traits, adds_examples=True, warnings=warnings)

    @property
    def example_sensitivity(self) -> float | None:
        """The most (L2) that one example changes the sums; None if `normalize` is not set.

        The norms of its count, features and products are at most 1 each.
        """
        return math.sqrt(2 + self.needs_products) if self.normalize else None

    @abstractmethod
    def classifier(self, total: FeatureSums) -> Callable[[Labelled, Tensor], Tensor]:
        """Return a function that maps (labelled features, queries [n, d]) to logits [n, way]."""

    def init(self, key: Key) -> OneRoundState:
        """Return a random encoder, and sums that are zero."""
        params, stats = self.model.init(key)
        n, d = len(self.classes), self.model.out_features
        size = d * (d + 1) // 2 if self.needs_products else 0
        zeros = partial(torch.zeros, dtype=torch.float64)
        total = FeatureSums(torch.zeros(n, dtype=torch.int64), zeros(n, d), zeros(size))
        return OneRoundState({"body": params["body"]}, stats, total)

    def init_client(self, client: int, key: Key) -> Tree:
        """Return the private state of a client that has not uploaded yet."""
        del key
        return {"client": torch.tensor(client), "uploads": torch.tensor(0)}

    def draw(self, data: ClientData, key: Key) -> Batch:
        """Return all examples of the client."""
        del key
        x, labels = data.all()
        return Batch(x, base_numbers(labels, self.classes))

    @client_work(draw="draw")
    def sum_features(self, down: Tree, private: Tree, drawn: Batch) -> Reply:
        """Upload the sums over the client's features, or zeros if they were uploaded before."""
        blocks = [
            self._features(down["theta"], down["stats"], x) for x in torch.split(drawn.x, BLOCK)
        ]
        h = torch.cat(blocks)
        n, d = len(self.classes), h.shape[1]
        new = private["uploads"] == 0
        member = members(drawn.y, n) & new
        up = {"counts": member.sum(1), "sums": member.to(h.dtype) @ h}
        if self.needs_products:
            row, column = torch.triu_indices(d, d, device=h.device)
            up["products"] = (h.T @ h)[row, column] * new
        return Reply(up, {**private, "uploads": private["uploads"] + 1}, len(h))

    def _features(self, params: Tree, stats: Tree, x: Tensor) -> Tensor:
        """Return the features [n, d] of examples x in float64, scaled if `normalize` is set."""
        h, _ = self.model.features(params, stats, x, Mode(norm="given" if stats else "batch"))
        return self._scaled(h)

    def _scaled(self, h: Tensor) -> Tensor:
        h = h.detach().double()
        return unit_rows(h) if self.normalize else h

    def round(
        self, server: OneRoundState, clients: Clients, key: Key
    ) -> tuple[OneRoundState, Mapping[str, float]]:
        """Run one round: add the sums of the sampled clients that have not been counted yet."""
        total, limit = server.total, OF_FEATURES if self.normalize else OF_EXAMPLES
        parts = {"counts": total.counts, "sums": total.sums}
        if self.needs_products:
            parts["products"] = total.products
        got = clients.exchange(
            self.sum_features,
            {"theta": server.theta, "stats": server.stats},
            to=clients.sample(key),
            reduce={name: Sum(like, limit) for name, like in parts.items()},
            key=key,
        )
        total = total._replace(**{name: part + got[name] for name, part in parts.items()})
        return server._replace(total=total), {"examples": float(total.counts.sum())}

    def evaluate(
        self,
        server: OneRoundState,
        clients: Clients,
        eval_episodes: Sequence[EvalEpisode],
        key: Key,
    ) -> list[Prediction]:
        """Predict every episode with the closed-form classifier, at the server."""
        del key
        logits_of = self.classifier(server.total)
        known = torch.tensor(sorted(self.classes), device=server.total.counts.device)

        def predict(episode: EvalEpisode) -> Tensor:
            with torch.no_grad():
                support, query = episode_features(self.model, server.theta, server.stats, episode)
                at = torch.searchsorted(known, episode.classes).clamp_max(len(known) - 1)
                base = torch.where(known[at] == episode.classes, at, -1)
                labelled = Labelled(
                    self._scaled(support), episode.support_y, episode.classes, base, server.total
                )
                logits = logits_of(labelled, self._scaled(query))
                return mask_logits(logits, labelled.sums()[1] > 0).to(query.dtype)

        return predict_at_server(predict, eval_episodes, clients)
