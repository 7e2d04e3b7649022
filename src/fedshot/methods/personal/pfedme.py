"""pFedMe: personal models are proximal points of the server's model (Moreau envelopes).

Source: T. Dinh et al. 2020, Personalized Federated Learning with Moreau Envelopes, algorithm 1:
min_w sum_i F_i(w), F_i(w) = min_theta f_i(theta) + (lambda/2) ||theta - w||^2.
In each of R local rounds, K gradient steps find theta~_i(w_i); then line 8 of the algorithm sets
w_i <- w_i - eta lambda (w_i - theta~_i(w_i)). The server sets
w <- (1 - beta) w + beta sum_i w_i / S.
Symbols: lambda `lambda_prox`; K `inner_steps`; R `local_steps`; eta, beta as in the paper.
Departures from the paper: the K steps start at w_i, and use all samples by default; the default eta
is the inner step size. All models use the server's running statistics. A client's model at test is
theta~_i of its last local update, and predictions are limited to the episode's classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from fedshot.core import tree
from fedshot.core.ranges import AtLeast1, NotNegative
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.learners.classification import Batches
from fedshot.learners.local_training import local_sgd
from fedshot.methods.personal.personal_model import PersonalModels, next_own
from fedshot.nn.models.mode import Mode
from fedshot.protocol.averaging import changes
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Reply, client_work
from fedshot.protocol.method import ModelState


@dataclass(frozen=True)
class PFedMe(PersonalModels[ModelState]):
    """Personal models that stay near the server's model, which in turn moves towards them.

    Args:
        lambda_prox: weight of the distance between a personal model and w_i.
        inner_steps: gradient steps that find a personal model, K.
        eta: step size of w_i; null for the learning rate of `optimizer`.
        beta: step size of the server towards the average; 1 takes the average. Batch-norm
            statistics take the same step, but never go beyond the average.
        local_steps: passes over a client's samples, R in the paper; each batch is one step of w_i.
        batch: samples per step of w_i; null for all of a client's samples.
        optimizer: the optimiser of the inner steps.
    """

    name: ClassVar[str] = "pfedme"
    max_weight: ClassVar[int | None] = 1

    lambda_prox: NotNegative = 15.0
    inner_steps: AtLeast1 = 5
    eta: NotNegative | None = None
    beta: NotNegative = 1.0

    @client_work(draw="draw")
    def train(self, down: Tree, private: Tree, drawn: Batches) -> Reply:
        """Find personal models and move w_i towards them; send the change of w_i."""
        w, stats, noise = down["theta"], down["stats"], Mode(seed=drawn.seed)
        pull = self.lambda_prox * (self.optimizer.lr if self.eta is None else self.eta)
        for r, step in enumerate(drawn.steps):
            seed = noise.layer(r).seed
            assert seed is not None
            again = Batches((step,) * self.inner_steps, seed, drawn.n)
            loss = partial(self.proximal_loss, self.lambda_prox, w)
            new = local_sgd(loss, self.optimizer, w, stats, again)
            w = tree.map(lambda a, theta: a - pull * (a - theta), w, new.params)
            stats = new.stats
        up = changes({"theta": w, "stats": stats}, down)
        return Reply(up, next_own(private, new.params), 1.0, new.metrics)

    def round(
        self, server: ModelState, clients: Clients, key: Key
    ) -> tuple[ModelState, Mapping[str, float]]:
        """Run one round; w <- w + beta sum_i (w_i - w) / S, with S the size of the cohort.

        Batch-norm statistics take the same step, but never go beyond the mean.
        """
        new, metrics = super().round(server, clients, key)
        if self.beta == 1:
            return new, metrics

        def move(old: Tree, to: Tree, far: float) -> Tree:
            return tree.map(lambda a, b: a + far * (b - a), old, to)

        theta = move(server.theta, new.theta, self.beta)
        # Beyond the average, variances can be negative.
        return ModelState(theta, move(server.stats, new.stats, min(self.beta, 1.0))), metrics
