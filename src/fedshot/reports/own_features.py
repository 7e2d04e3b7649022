"""One client's images embedded by the client's own model, and a t-SNE plot of their features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fedshot.core.errors import ConfigError
from fedshot.core.text import shortened
from fedshot.learners.learner import episode_features
from fedshot.protocol.clients import Clients
from fedshot.reports.figure_export import PALETTE, drawing
from fedshot.runs.experiment import Experiment


class Space(NamedTuple):
    """A client's images as points: its training images, then its test images.

    `points` is [images, d], `names` has the class name of each image, and `tested` [images] is True
    for test images.
    """

    points: NDArray[np.float64]
    names: list[str]
    tested: NDArray[np.bool_]


def own_features(run: Experiment, client: int, *, original: bool = False) -> Space:
    """Embed a client's training and test images with the client's own model; return the features.

    The model is that of the chosen round. With `original`, the points are pixels in [0, 1] instead.

    Raises ConfigError for a client that is not tested, for methods other than pFedFSL, and for
    `original` with other data than images.
    """
    episodic_test, method = run.prepared.test, run.method
    if not method.traits.stores_client_models:
        raise ConfigError(
            f"the method is {method.name}; features of one client are available for pfedfsl only."
        )
    owners = episodic_test.owners or ()
    if client not in owners:
        raise ConfigError(f"client {client} is not tested; the tested clients are {list(owners)}.")
    if original and run.prepared.dataset.kind != "images":
        raise ConfigError("original is true, but the data have no pixels; leave it out.")
    u = owners.index(client)
    eval_episode = episodic_test.eval_episodes[u]
    if original:
        parts = eval_episode.support_x, eval_episode.query_x
        points = torch.cat(parts).flatten(1).double() / 255
    else:
        server = run.chosen()
        clients = Clients(run.fleet, owners, round=run.best_round, phase="evaluate")
        storing: Any = method  # its traits guarantee `stored_model`
        own = storing.stored_model(server, clients, client)
        with torch.no_grad():
            parts = episode_features(method.model, own["theta"], own["stats"], eval_episode)
        points = torch.cat(parts).double()
    places = torch.cat([eval_episode.support_y, episodic_test.labels(u)])
    names = [episodic_test.class_names[c] for c in episodic_test.classes(u)[places].tolist()]
    return Space(points.numpy(), names, np.arange(len(points)) >= len(eval_episode.support_y))


def features_picture(spaces: Mapping[str, Space]) -> str:
    """Return the SVG of t-SNE plots, one for each title -> space, with a colour per class.

    Markers are filled for training images and hollow for test images. t-SNE preserves only
    neighbourhoods: distances between clusters have no meaning.

    Source: van der Maaten & Hinton 2008.
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

    title = "One client's images; hollow markers: test images"
    return drawing(title, (1.4 + 3.6 * len(spaces), 3.6), draw)
