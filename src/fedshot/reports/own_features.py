"""What one client's model makes of its test images: its features in a plane, by t-SNE."""

from __future__ import annotations

from typing import Literal, overload

import numpy as np
import torch
from matplotlib.axes import Axes
from numpy.typing import NDArray

from fedshot.errors import ConfigError
from fedshot.experiment import Experiment
from fedshot.methods import PFedFSL
from fedshot.nn import question_features
from fedshot.protocol import Clients
from fedshot.reports.canvas import PALETTE, Format, picture
from fedshot.reports.words import shortened

Floats = NDArray[np.float64]


def own_features(run: Experiment, client: int) -> tuple[Floats, list[str]]:
    """Return a client's features [images, d] of its own test images, and their classes.

    The model is the client's own after the chosen round.

    Raises ConfigError for a client that is not tested, or another method than pFedFSL.
    """
    exam, method = run.setting.test, run.method
    if not isinstance(method, PFedFSL):
        raise ConfigError(f"features of a client are drawn for pfedfsl, not for {method.name}.")
    owners = exam.owners or ()
    if client not in owners:
        raise ConfigError(f"client {client} is not tested; those who are: {list(owners)}.")
    u = owners.index(client)
    server = run.chosen()
    clients = Clients(run.fleet, owners, round=run.best_round, phase="evaluate")
    own = method.own_model(server, clients, client)
    with torch.no_grad():
        _, h = question_features(method.model, own["theta"], own["stats"], exam.questions[u])
    names = [exam.class_names[c] for c in exam.classes(u)[exam.labels(u)].tolist()]
    return h.double().numpy(), names


@overload
def features_picture(h: Floats, names: list[str], *, format: Literal["svg"] = ...) -> str: ...
@overload
def features_picture(h: Floats, names: list[str], *, format: Literal["png"]) -> bytes: ...
def features_picture(h: Floats, names: list[str], *, format: Format = "svg") -> str | bytes:
    """Draw features [n, d] in a plane, a colour for each class, by t-SNE.

    Source: van der Maaten & Hinton 2008.

    Distances in it are those of neighbours alone; how far apart two clouds are says nothing.
    """
    from sklearn.manifold import TSNE

    few = max(1.0, min(30.0, (len(h) - 1) / 3))
    points = TSNE(2, perplexity=few, init="pca", random_state=0).fit_transform(h)
    classes = sorted(set(names))

    def draw(ax: Axes) -> None:
        for i, name in enumerate(classes):
            mine = [j for j, other in enumerate(names) if other == name]
            marker = "osD^v"[i // len(PALETTE) % 5]
            x, y = points[mine].T
            colour = PALETTE[i % len(PALETTE)]
            ax.scatter(x, y, s=16, color=colour, marker=marker, lw=0, label=shortened(name, 16))
        ax.set_xticks([])
        ax.set_yticks([])
        ax.figure.legend(loc="outside right center")

    return picture("Features of one client's test images", (5.0, 3.6), draw, format)
