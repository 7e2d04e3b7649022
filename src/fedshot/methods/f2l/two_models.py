"""The losses of F2L's two models on an episode.

Source: Wang et al., Federated Few-shot Learning, KDD 2023, eqs. (3) to (5), (14) and (20); symbols
as in `fedshot.methods.f2l.f2l`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.tree import Tree
from fedshot.data.episodes.episode import Episode
from fedshot.learners.classification import Classifier
from fedshot.learners.learner import EpisodeLoss
from fedshot.methods.f2l.client_model import ClientModel, Task, View
from fedshot.methods.f2l.readings import F2LReading
from fedshot.methods.f2l.transfer import (
    contrastive_term,
    distillation_loss,
    share_targets_loss,
    temperatures,
    transfer_loss,
)
from fedshot.nn.losses import accuracy, cross_entropy
from fedshot.nn.models.mode import Mode


@dataclass(frozen=True)
class TwoModels:
    """A server-model and a client-model on one episode of base classes.

    Args:
        learner: the server-model, with parameters phi = {"body", "classifier"}.
        client: the client-model, with parameters psi.
        reading: the chosen interpretation of the paper.
    """

    learner: Classifier
    client: ClientModel
    reading: F2LReading

    def episode_loss(
        self, params: Tree, stats: Tree, episode: Episode, seed: Tensor
    ) -> EpisodeLoss:
        """Return L_phi + L_psi, eqs. (14) and (20), of one episode; `params` is {"phi", "psi"}.

        L_psi treats phi as a constant and L_phi treats psi as one. So the gradient of the sum is
        that of L_phi with respect to phi, and that of L_psi with respect to psi. (Under kd_targets
        "sum", L_psi also trains phi.)
        """
        phi, noise = params["phi"], Mode(True, "batch", seed=seed)
        task, stats = self._features(phi, stats, episode, noise.layer(0))
        plain = task.detached()
        tuned = self.client.tune(params["psi"], plain, noise.layer(1))
        view = self.client.view(tuned, plain, noise.layer(2))
        teacher = self._teacher(params["psi"], tuned, task, view, noise)
        z_q = self._logits(phi, task.q)
        server, extra = self._server_loss(phi, task, teacher, episode, z_q)
        client, more = self._client_loss(z_q, view, episode)
        found = accuracy(view.z_q.detach(), episode.query_y)
        return EpisodeLoss(server + client, stats, found, extra | more)

    def client_loss_after(
        self, old: Tree, new: Tree, psi: Tree, stats: Tree, episode: Episode, seed: Tensor
    ) -> EpisodeLoss:
        """Return L_psi, with psi~ fine-tuned under the old phi and then used under the new phi."""
        noise = Mode(True, "batch", seed=seed)
        before, _ = self._features(old, stats, episode, noise.layer(0))
        tuned = self.client.tune(psi, before, noise.layer(1))
        after, _ = self._features(new, stats, episode, noise.layer(0))
        view = self.client.view(tuned, after, noise.layer(2))
        loss, extra = self._client_loss(self._logits(new, after.q), view, episode)
        return EpisodeLoss(loss, stats, accuracy(view.z_q.detach(), episode.query_y), extra)

    def _features(self, phi: Tree, stats: Tree, episode: Episode, noise: Mode) -> tuple[Task, Tree]:
        """Return an episode's features, and the running statistics after the forward pass."""
        n, y, way = len(episode.support_y), episode.support_y, len(episode.classes)
        normless = self.learner.model.norm_policy == "running" and not tree.leaves(stats)
        constant = self.reading.server_rows == "support" and self.reading.kd_targets == "softmax"
        if normless and constant:
            s, _ = self.learner.model.features(phi, stats, episode.support_x, noise.layer(0))
            fixed = tree.detach(phi)
            q, _ = self.learner.model.features(fixed, stats, episode.query_x, noise.layer(1))
            return Task(s, q, y, way), stats
        x = torch.cat([episode.support_x, episode.query_x])
        h, stats = self.learner.model.features(phi, stats, x, noise)
        return Task(h[:n], h[n:], y, way), stats

    def _logits(self, phi: Tree, h: Tensor) -> Tensor:
        """Return the server-model's logits over all base classes, [n, base classes]."""
        return self.learner.head.logits(phi["classifier"], h)

    def _teacher(self, psi: Tree, tuned: Tree, task: Task, view: View, noise: Mode) -> View:
        """Return the client-model's view of the support, from which the server-model learns."""
        if self.reading.mi_from == "psi":
            tuned = self.client.start(psi, task.detached(), noise.layer(1).layer(-1))
        if self.reading.mi_gradient == "both":
            return self.client.view(tree.detach(tuned), task, noise.layer(2))
        if self.reading.mi_from == "psi":
            view = self.client.view(tuned, task.detached(), noise.layer(2))
        return view._replace(s=view.s.detach(), z_s=view.z_s.detach())

    def _server_loss(
        self, phi: Tree, task: Task, teacher: View, episode: Episode, z_q: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (L_phi, metrics), eqs. (14), (15); `z_q` are the queries' logits under phi."""
        z, y, read = self._logits(phi, task.s), episode.classes[task.y], self.reading
        if read.server_rows == "both":
            z = torch.cat([z, z_q])
            y = torch.cat([y, episode.classes[episode.query_y]])
        ce = cross_entropy(z, y)
        extra = {"base_accuracy": accuracy(z.detach(), y)}
        if not read.lambda_mi:
            return ce, extra
        if read.mi_loss == "shots":
            mi = contrastive_term(task.s, teacher.s, task.y, task.way, read.mi_tau)
        else:
            mi = transfer_loss(
                task.s,
                teacher.s,
                teacher.z_s,
                task.y,
                tau=read.mi_tau,
                denominator=read.mi_denominator,
            )
        return self._weigh(ce, mi, read.lambda_mi), extra | {"mi": mi}

    def _client_loss(
        self, z_phi: Tensor, view: View, episode: Episode
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (L_psi, metrics), eqs. (20), (21); `z_phi` are the queries' logits under phi."""
        y, read = episode.query_y, self.reading
        ce = cross_entropy(view.z_q, y)
        if not read.lambda_kd:
            return ce, {}
        z_phi = z_phi[:, episode.classes]
        if read.kd_targets == "sum":
            kd = share_targets_loss(z_phi, view.z_q)
            return self._weigh(ce, kd, read.lambda_kd), {"kd": kd}
        kd = distillation_loss(z_phi, view.z_q, y)
        extra = {"kd": kd, "temperature": temperatures(z_phi, y).mean()}
        return self._weigh(ce, kd, read.lambda_kd), extra

    def _weigh(self, ce: Tensor, term: Tensor, weight: float) -> Tensor:
        return (1 - weight if self.reading.weights == "shared" else 1) * ce + weight * term
