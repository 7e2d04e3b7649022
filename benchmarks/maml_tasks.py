"""What the MAML peers share: the network and the tasks of a folder. No import of fedshot."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import payloads
import torch
from nets import build, in_layout, place
from serve import serve
from torch import Tensor, nn

MamlTask = tuple[Tensor, Tensor, Tensor, Tensor]  # support x, y; query x, y


class Spec(NamedTuple):
    """A network, its tasks, and the inner loop."""

    module: nn.Module
    tasks: list[MamlTask]
    lr: float
    steps: int


def load(folder: Path, layout: str, dtype: str) -> Spec:
    """Read FOLDER/maml.safetensors; in float64 there are only two tasks, to compare gradients."""
    held = payloads.read(folder / "maml.safetensors")
    kind = getattr(torch, dtype)
    module = build(held["net"]).to(kind)
    module.load_state_dict(held["state"])  # in float64; cast by a float32 network
    module = place(module, layout)
    module.train()
    tasks = [
        (in_layout(sx.to(kind), layout), sy, in_layout(qx.to(kind), layout), qy)
        for sx, sy, qx, qy in held["tasks"]
    ]
    return Spec(module, tasks[:2] if dtype == "float64" else tasks, held["lr"], held["steps"])


def gradients(spec: Spec) -> dict[str, Tensor]:
    """Return the mean gradient that has gathered in the parameters."""
    found = {}
    for name, p in spec.module.named_parameters():
        assert p.grad is not None
        found[name] = p.grad / len(spec.tasks)
    return found


def serve_gradients(meta_gradient: Callable[[Spec, bool], dict[str, Tensor]], version: str) -> None:
    """Serve the gradients of both orders in both layouts and types (`FOLDER THREADS`)."""
    torch.set_num_threads(int(sys.argv[2]))
    works = {}
    for layout in ("nchw", "channels_last"):
        for kind in ("float32", "float64"):
            spec = load(Path(sys.argv[1]), layout, kind)
            for order in ("first", "second"):
                works[f"{order}-{layout}-{kind}"] = lambda s=spec, o=order: meta_gradient(
                    s, o == "first"
                )
    serve(works, {"version": version})
