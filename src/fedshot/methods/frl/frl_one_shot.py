"""Fine-tuning by one-shot FL: the server averages the models that do well on held-out data.

Base clients pre-train an encoder under a classifier over all base classes, by federated averaging.
At test more clients than needed fine-tune it; each reports the accuracy of its model on supports
that it holds out, the server averages the best models, and this is repeated for R rounds.

Source: Park et al., Few-Round Learning for Federated Learning, ICLR 2021 submission, section 4
(baseline fine-tuning via one-shot FL); Guha et al. 2019, One-Shot Federated Learning (selection
by cross-validation; ensembles).
Symbols: theta encoder and classifier; theta_r the model of round r; n_k examples of client k.
Departures from the paper: Guha et al. train to the end and average predictions. R rounds need one
model, so weights are averaged; `last` may average predictions in the last round. A class that no
selected client of any round holds counts as an error. Pre-training is bit for bit that of
`frl_finetune`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.errors import ConfigError
from fedshot.core.ranges import AtLeast0, AtLeast1, NotNegative, OpenShare
from fedshot.core.seeds import Key
from fedshot.core.tree import Tree
from fedshot.data.episodes.group_sampler import GroupSampler
from fedshot.learners.learner import EvalEpisode
from fedshot.methods.frl.client_share import EpisodeShare, in_order, shares_of, spare_shares
from fedshot.methods.frl.group import Group
from fedshot.methods.frl.group_predictions import GroupNorms, in_group, predict, query_maps
from fedshot.methods.frl.preparation import Prepared, Pretrained
from fedshot.nn.losses import accuracy
from fedshot.protocol.averaging import changes
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Reply, client_work
from fedshot.protocol.method import Prediction
from fedshot.protocol.reducers import Gather


@dataclass(frozen=True)
class FRLOneShot(Pretrained):
    """A classifier of the base classes, fine-tuned by the best of many clients in a few rounds.

    The other options are those of `Pretrained`.

    Args:
        candidates: number of models that are fine-tuned in a round of a test, one per client; 0 for
            all clients of the group and its spare ones (test.group.spare). With more candidates
            than clients, each client's supports are split among several.
        keep: number of candidates selected, those with the best held-out accuracy.
        holdout: fraction of each class's supports that a candidate holds out.
        last: in the last round, "average" the selected models, or "ensemble" their predictions.
    """

    name: ClassVar[str] = "frl_one_shot"

    test_rounds: AtLeast0 = 3
    inner_lr: NotNegative = 0.1
    local_steps: AtLeast1 = 1
    inner_batch: AtLeast1 | None = None
    candidates: AtLeast0 = 20
    keep: AtLeast1 = 10
    holdout: OpenShare = 0.34
    last: Literal["average", "ensemble"] = "average"

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.candidates < self.keep:
            raise ConfigError(
                f"keep is {self.keep} and candidates is {self.candidates}; expected "
                "candidates 0 or at least keep."
            )

    def check_group(self, group: GroupSampler) -> None:
        """Raise ConfigError if the supports of a group cannot be split evenly among candidates."""
        _check_candidates(self.candidates, (group.clients or 1) + group.spare)

    @client_work()
    def candidate(self, down: Tree, private: Tree, drawn: EpisodeShare) -> Reply:
        """Fine-tune on some of the supports; upload theta's change, and its held-out accuracy."""
        x, y = drawn.support_x, drawn.support_y
        aside = set_aside(y, self.holdout)
        rows = aside.long().argsort(stable=True)
        rest, held_out = rows.tensor_split([len(y) - int(aside.sum())])
        mine = drawn._replace(support_x=x[rest], support_y=y[rest], query_x=x[held_out])
        theta = self.local.learn(down["theta"], mine, None).theta
        score = torch.zeros(())
        if len(held_out):
            with torch.no_grad():
                norms = GroupNorms(self.local, down["stats"], [mine])
                (h,) = query_maps(self.local, theta, norms, [mine])
                logits = self.local.head_logits(theta, h, drawn.open)
                score = accuracy(logits, y[held_out])
        held = (y[:, None] == torch.arange(len(drawn.open), device=y.device)).any(0)
        up = {"score": score, "held": held, "n": torch.tensor(len(mine.support_y))}
        return Reply(up | changes({"theta": theta}, down), private, len(mine.support_y))

    def evaluate(
        self, server: Prepared, clients: Clients, eval_episodes: Sequence[EvalEpisode], key: Key
    ) -> list[Prediction]:
        """Return predictions after R rounds of selecting candidate models by held-out accuracy."""
        stats = self.test_stats(server)

        def answer(eval_episode: EvalEpisode, key: Key) -> Tensor:
            models, held = self.fine_tune(self.test_start(server, key), stats, eval_episode, key)
            shares = shares_of(eval_episode, self.local.slots(0))
            norms = GroupNorms(self.local, stats, shares)
            way, p = len(eval_episode.classes), []
            with torch.no_grad():
                for theta in models:
                    maps = query_maps(self.local, theta, norms, shares)
                    logits = [predict(self.local, theta, None, h, way) for h in maps]
                    p.append(in_order(eval_episode, logits).softmax(-1))
            log_p = torch.stack(p).mean(0).clamp_min(torch.finfo(p[0].dtype).tiny).log()
            return log_p.masked_fill(~held[:way], -1e9)

        return in_group(answer, eval_episodes, clients, key)

    def fine_tune(
        self, theta: Tree, stats: Tree, eval_episode: EvalEpisode, key: Key
    ) -> tuple[list[Tree], Tensor]:
        """Return the models that predict, and a bool mask [slots] of predictable classes.

        These are the classes of which a selected client has examples; with 0 rounds, all classes.
        """
        slots = self.local.slots(0)
        shares = [*shares_of(eval_episode, slots), *spare_shares(eval_episode, slots)]
        shares = split_among(shares, self.candidates)
        group, models = Group.of_shares(shares), [theta]
        held = torch.full((slots,), not self.test_rounds, device=eval_episode.support_y.device)
        for r in range(self.test_rounds):
            got = group.exchange(
                self.candidate,
                {"theta": theta, "stats": stats},
                to=group.ids,
                reduce={name: Gather() for name in ("theta", "score", "held", "n")},
                key=key.at("step", r),
            )
            best = sorted(got.accepted, key=lambda c: (-float(got["score"][c]), c))[: self.keep]
            held = held | torch.stack([got["held"][c] for c in best]).any(0)
            models = [tree.add(theta, got["theta"][c]) for c in best]
            counts = [int(got["n"][c]) for c in best]
            for c, n in zip(best, counts, strict=True):
                share = n / sum(counts)
                theta = tree.map(lambda w, d, s=share: w + s * d, theta, got["theta"][c])
        ensemble = self.last == "ensemble" and self.test_rounds
        return (models if ensemble else [theta]), held


def set_aside(y: Tensor, holdout: float) -> Tensor:
    """Return a bool mask [n] of held-out examples: floor(holdout * m) of a class of m examples."""
    same = y[:, None] == y[None, :]
    rank, count = same.tril(-1).sum(1), same.sum(1)
    return rank >= count - (count * holdout).floor()


def _check_candidates(candidates: int, clients: int) -> None:
    if candidates > clients and candidates % clients:
        raise ConfigError(
            f"candidates is {candidates}, but a test episode has {clients} clients, whose supports "
            f"cannot be split evenly. Set candidates to a multiple of {clients}, or raise "
            "test.group.spare to have more clients."
        )


def split_among(shares: Sequence[EpisodeShare], candidates: int) -> list[EpisodeShare]:
    """Return one share of the episode for each candidate; 0 candidates means one per client.

    With more candidates than clients, each client's supports are split evenly among several
    candidates; a candidate without supports is left out.
    """
    if candidates == 0 or candidates <= len(shares):
        return list(shares[: candidates or None])
    _check_candidates(candidates, len(shares))
    times, found = candidates // len(shares), []
    for share in shares:
        y = share.support_y
        rank = (y[:, None] == y[None, :]).tril(-1).sum(1)
        for i in range(times):
            mine = rank % times == i
            found.append(share._replace(support_x=share.support_x[mine], support_y=y[mine]))
    return [share for share in found if len(share.support_y)]
