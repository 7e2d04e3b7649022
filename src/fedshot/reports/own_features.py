"""One client's images in a plane, by t-SNE: as they are, and as its model sees them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, overload

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fedshot.core.errors import ConfigError
from fedshot.core.text import shortened
from fedshot.learners.learner import episode_features
from fedshot.methods.personal.pfedfsl import PFedFSL
from fedshot.protocol.clients import Clients
from fedshot.reports.figure_export import PALETTE, Format, drawing
from fedshot.runs.experiment import Experiment

Floats = NDArray[np.float64]


class Space(NamedTuple):
    """A client's images as points: those that it trains on first, then those of its test."""

    points: Floats  # [images, d]
    names: list[str]  # of their classes
    tested: NDArray[np.bool_]  # [images]: whether an image is of the test


def own_features(run: Experiment, client: int, *, original: bool = False) -> Space:
    """Return a client's training and test images as its own model's features.

    The model is that after the chosen round; `original` gives the pixels, from 0 to 1, instead.

    Raises ConfigError for a client that is not tested, another method than pFedFSL, or the original
    space of texts, which is none.
    """
    episodic_test, method = run.setting.test, run.method
    if not isinstance(method, PFedFSL):
        raise ConfigError(f"features of a client are drawn for pfedfsl, not for {method.name}.")
    owners = episodic_test.owners or ()
    if client not in owners:
        raise ConfigError(f"client {client} is not tested; those who are: {list(owners)}.")
    if original and run.setting.dataset.is_text:
        raise ConfigError("original is true, and texts have no pixels; leave it out.")
    u = owners.index(client)
    eval_episode = episodic_test.eval_episodes[u]
    if original:
        parts = eval_episode.support_x, eval_episode.query_x
        points = torch.cat(parts).flatten(1).double() / 255
    else:
        server = run.chosen()
        clients = Clients(run.fleet, owners, round=run.best_round, phase="evaluate")
        own = method.own_model(server, clients, client)
        with torch.no_grad():
            parts = episode_features(method.model, own["theta"], own["stats"], eval_episode)
        points = torch.cat(parts).double()
    places = torch.cat([eval_episode.support_y, episodic_test.labels(u)])
    names = [episodic_test.class_names[c] for c in episodic_test.classes(u)[places].tolist()]
    return Space(points.numpy(), names, np.arange(len(points)) >= len(eval_episode.support_y))


@overload
def features_picture(spaces: Mapping[str, Space], *, format: Literal["svg"] = ...) -> str: ...
@overload
def features_picture(spaces: Mapping[str, Space], *, format: Literal["png"]) -> bytes: ...
def features_picture(spaces: Mapping[str, Space], *, format: Format = "svg") -> str | bytes:
    """Draw each space, by its title, in a plane of its own by t-SNE, a colour for each class.

    Training images are filled, test images hollow.

    Source: van der Maaten & Hinton 2008.

    Distances in it are those of neighbours alone; how far apart two clouds are says nothing.
    """
    from sklearn.manifold import TSNE

    def draw(figure: Figure) -> None:
        axes = figure.subplots(1, len(spaces), squeeze=False)[0]
        for i, (ax, (title, space)) in enumerate(zip(axes, spaces.items(), strict=True)):
            few = max(1.0, min(30.0, (len(space.points) - 1) / 3))
            plane = TSNE(2, perplexity=few, init="pca", random_state=0).fit_transform(space.points)
            for c, name in enumerate(sorted(set(space.names))):
                mine = np.array(space.names) == name
                colour, marker = PALETTE[c % len(PALETTE)], "osD^v"[c // len(PALETTE) % 5]
                for part, fill in ((~space.tested, colour), (space.tested, "none")):
                    x, y = plane[mine & part].T
                    label = shortened(name, 16) if i == 0 and fill == colour else None
                    ax.scatter(x, y, s=16, color=colour, facecolors=fill, marker=marker,
                               lw=0.8, label=label)  # fmt: skip
            ax.set(title=title, xticks=[], yticks=[])
        figure.legend(loc="outside right center")

    title = "One client's images; hollow, those of its test"
    return drawing(title, (1.4 + 3.6 * len(spaces), 3.6), draw, format)
