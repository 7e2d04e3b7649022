"""What uploads give away, on scikit-learn's digits: two attacks, with and without clip and noise.

    python benchmarks/leaks.py          prints both tables, writes docs/leaks.svg; a minute or two

Inversion: the server knows the model, the labels and one client's gradient, and looks for images
whose gradient points the same way (Geiping et al. 2020, Inverting gradients). Membership: the
attacker sees one released sum over 30 clients, has the contribution that a client would make, and
knows 30 clients that took no part (Dwork et al. 2015, Robust traceability from trace amounts).
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import norm
from sklearn.metrics import roc_auc_score
from torch import Tensor

from fedshot.config.load import Config
from fedshot.core import tree
from fedshot.core.seeds import Key
from fedshot.nn.heads import LinearHead
from fedshot.nn.models.backbones import MLP
from fedshot.nn.models.model import Model
from fedshot.privacy.differential import Mechanism
from fedshot.protocol.exchange import ClientWork, Exchange
from fedshot.runs.experiment import Experiment
from fedshot.runs.prepare import PreparedRun

FIGURE = Path(__file__).resolve().parent.parent / "docs" / "leaks.svg"
KEY = Key(0)
NOISE = (0.0, 0.001, 0.01, 0.1)  # noise multipliers of the inversion
BATCHES = (1, 2, 4)


def gradient(model: Model, params: Any, x: Tensor, y: Tensor, *, graph: bool) -> list[Tensor]:
    """Return the gradient of the cross-entropy for images in [0, 1], leaf by leaf."""
    body, head = params["body"], params["head"]
    h = torch.relu(x @ body["linear1"]["weight"].T + body["linear1"]["bias"])
    logits = model.head.logits(head, h)
    loss = torch.nn.functional.cross_entropy(logits, y)
    return list(torch.autograd.grad(loss, tree.leaves(params), create_graph=graph))


def inverted(model: Model, params: Any, seen: list[Tensor], y: Tensor) -> Tensor:
    """Return images in [0, 1] whose gradient has the direction of the one seen."""
    length = torch.sqrt(sum((leaf**2).sum() for leaf in seen))

    def mismatch(raw: Tensor) -> Tensor:
        mine = gradient(model, params, torch.sigmoid(raw), y, graph=True)
        dot = sum((a * b).sum() for a, b in zip(mine, seen, strict=True))
        return 1 - dot / (length * torch.sqrt(sum((leaf**2).sum() for leaf in mine)))

    found = []
    for start in range(2):
        drawn = KEY.at("start", start).numpy().normal(0, 0.1, (len(y), 64))
        raw = torch.tensor(drawn, requires_grad=True)
        search = torch.optim.LBFGS([raw], max_iter=200, line_search_fn="strong_wolfe")
        search.step(partial(_slope, search, mismatch, raw))
        found.append((float(mismatch(raw).detach()), torch.sigmoid(raw.detach())))
    return min(found, key=lambda one: one[0])[1]


def _slope(search: torch.optim.Optimizer, loss: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    search.zero_grad()
    value = loss(at)
    value.backward()
    return value.detach()


def inversion() -> None:
    """Print how like the images the reconstructions are, and draw those of two digits."""
    from matplotlib import pyplot as plt
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    model = Model(MLP(hidden=(64,)), LinearHead(10), (8, 8, 1), "running", "float64")
    params, _ = model.init(KEY.at("model"))
    for leaf in tree.leaves(params):
        leaf.requires_grad_()
    shown: list[tuple[str, Tensor]] = []
    rng = KEY.at("digits").numpy()
    for batch in BATCHES:
        for multiplier in (None, *NOISE):
            likeness = []
            for trial in range(4):
                rows = np.random.default_rng(trial).choice(len(labels), batch, replace=False)
                x, y = torch.tensor(images[rows] / 16), torch.tensor(labels[rows])
                seen = gradient(model, params, x, y, graph=False)
                if multiplier is not None:
                    up = Mechanism(1.0, 0.1).clipped({str(i): leaf for i, leaf in enumerate(seen)})
                    deviation = multiplier * 0.1
                    seen = [up[str(i)] + deviation * torch.tensor(rng.normal(size=leaf.shape))
                            for i, leaf in enumerate(seen)]  # fmt: skip
                got = inverted(model, params, seen, y)
                likeness.append(_matched(x, got))
                if batch == 2 and trial == 0:
                    shown += [("image", x)] if multiplier is None else []
                    name = "plain" if multiplier is None else f"noise {multiplier:g}"
                    shown.append((name if multiplier != 0 else "clipped", got))
            print(f"inversion, batch {batch}, noise {multiplier}: {np.mean(likeness):.2f}")
    figure, axes = plt.subplots(2, len(shown), figsize=(1.1 * len(shown), 2.4))
    for column, (name, got) in zip(axes.T, shown, strict=True):
        for ax, one in zip(column, got, strict=True):
            ax.imshow(one.reshape(8, 8), cmap="gray_r", vmin=0, vmax=1)
            ax.set_axis_off()
        column[0].set_title(name, fontsize=9)
    figure.savefig(FIGURE, metadata={"Date": None}, bbox_inches="tight")


def _matched(x: Tensor, got: Tensor) -> float:
    """Return the mean correlation of each image with the reconstruction most like it."""
    each = np.corrcoef(x.numpy(), got.numpy())[: len(x), len(x) :]
    return float(np.nanmax(each, axis=1).mean())


def contributions(method: Mapping[str, Any], hidden: list[int]) -> Tensor:
    """Return what each of 90 clients uploads in the first round, [clients, numbers]."""
    prepared = PreparedRun(Config.of({
        "data": {"name": "digits"},
        "split": {"base": ["0-7"], "novel": ["8", "9"]},
        "partition": {"name": "iid", "clients": 90},
        "episode": {"way": 3, "shot": 1, "query": 2, "queries": "up_to"},
        "model": {"backbone": {"name": "mlp", "hidden": hidden}},
        "method": method, "run": {"fleet": "sequential", "infeasible_clients": "leave_out"},
        "test": {"way": 2, "episodes": 5},
    }))  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        run = Experiment(prepared, Path(folder) / "run")
        asked: list[Tensor] = []

        def upload(exchange: Exchange) -> None:
            for arrival in run.meter.replies(exchange):
                assert arrival.reply is not None
                leaves = [leaf.double().flatten() for leaf in tree.leaves(dict(arrival.reply.up))]
                asked.append(torch.cat(leaves))

        work = ClientWork(run.method, "sum_features" if hidden == [] else "train")
        down = {"theta": run.server.theta, "stats": run.server.stats}
        upload(Exchange(work, down, tuple(prepared.clients), {}, KEY, (1, 0)))
    return torch.stack(asked)


def membership() -> None:
    """Print the AUC of telling members from others by a sum of clipped contributions."""
    cases = {"FL-Proto, change of weights": ({"name": "fl_proto", "local_steps": 5}, [32]),
             "FedNCM, class sums": ({"name": "fedncm"}, [])}  # fmt: skip
    for case, (method, hidden) in cases.items():
        raw = contributions(method, hidden)
        clip = float(raw.norm(dim=1).median())
        clipped = raw * (clip / raw.norm(dim=1, keepdim=True)).clamp_max(1)
        for noise in (None, 0.0, 0.6, 1.5, 4.0):
            rng, truth, scores = KEY.at(case, str(noise)).numpy(), [], []
            of = raw if noise is None else clipped
            for _ in range(100):
                order = rng.permutation(len(of))
                member, other, known = order[:30], order[30:60], order[60:]
                total = of[member].sum(0)
                if noise:
                    total = total + noise * clip * torch.tensor(rng.normal(size=total.shape))
                mean = of[known].mean(0)
                score = (of[order[:60]] - mean) @ (total - len(member) * mean)
                truth += [1] * len(member) + [0] * len(other)
                scores += score.tolist()
            bound = 1.0 if not noise else norm.cdf(1 / (noise * math.sqrt(2)))
            auc = roc_auc_score(truth, scores)
            print(f"membership, {case}, noise {noise}: AUC {auc:.3f}, at most {bound:.3f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    membership()
    inversion()
