"""learn2learn's MAML on a list of tasks: the mean gradient of the query losses.

    python peer_learn2learn.py FOLDER      reads FOLDER/maml.safetensors; see `children`

The package does not build on Python 3.11 (its data part is compiled); MAML itself is pure Python
and is imported from the unpacked source, past the package's own `__init__`.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812  (the name everybody reads)
from maml_tasks import Spec, gradients, serve_gradients

SOURCE = Path(__file__).resolve().parent.parent / ".venv-peers/src/learn2learn-0.2.0/learn2learn"
for name, folder in (("learn2learn", SOURCE), ("learn2learn.algorithms", SOURCE / "algorithms")):
    package = types.ModuleType(name)
    package.__path__ = [str(folder)]
    sys.modules[name] = package

from learn2learn.algorithms.maml import MAML  # noqa: E402  (past the package's __init__)


def meta_gradient(spec: Spec, first_order: bool) -> dict[str, torch.Tensor]:
    """Return the mean over tasks of the gradient of the query loss after the inner steps."""
    maml = MAML(spec.module, lr=spec.lr, first_order=first_order)
    spec.module.zero_grad()
    for sx, sy, qx, qy in spec.tasks:
        learner = maml.clone()
        for _ in range(spec.steps):
            learner.adapt(F.cross_entropy(learner(sx), sy))
        F.cross_entropy(learner(qx), qy).backward()
    return gradients(spec)


if __name__ == "__main__":
    serve_gradients(meta_gradient, "learn2learn 0.2.0, MAML in pure Python")
