"""The same local steps in JAX: one jitted Adam step, images as [n, h, w, c], pooling by reshape.

python peer_jax.py FOLDER THREADS      reads FOLDER/jax.safetensors; see `children`
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import payloads

if sys.argv[2] == "1":  # before the first import: XLA takes the cores that it sees
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])

import jax
import jax.numpy as jnp
import torch
from jax import lax
from serve import serve

Params = dict[str, Any]
B1, B2, EPS = 0.9, 0.999, 1e-8


def features(p: Params, s: Params, x: jax.Array) -> tuple[jax.Array, Params]:
    """Return the features of a Conv4 and its running statistics."""
    after = {}
    for i in range(1, 5):
        name = f"norm{i}"
        x = lax.conv_general_dilated(
            x, p[f"conv{i}.weight"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = x + p[f"conv{i}.bias"]
        mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
        n = x.size // x.shape[-1]
        x = (x - mean) * lax.rsqrt(var + 1e-5) * p[f"{name}.weight"] + p[f"{name}.bias"]
        after[f"{name}.running_mean"] = 0.9 * s[f"{name}.running_mean"] + 0.1 * mean
        after[f"{name}.running_var"] = 0.9 * s[f"{name}.running_var"] + 0.1 * var * (n / (n - 1))
        b, h, w, c = x.shape
        x = x[:, : h // 2 * 2, : w // 2 * 2].reshape(b, h // 2, 2, w // 2, 2, c).max((2, 4))
        x = jax.nn.relu(x)
    return x.transpose(0, 3, 1, 2).reshape(x.shape[0], -1), after


def loss(p: Params, s: Params, x: jax.Array, y: jax.Array, shot: int) -> tuple[jax.Array, Params]:
    """Return the loss of prototypical networks on a 5-way task."""
    h, s = features(p, s, x)
    means = h[: 5 * shot].reshape(5, shot, -1).mean(1)
    logits = -jnp.square(h[5 * shot :, None] - means[None]).sum(-1)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1)
    return -picked.mean(), s


@partial(jax.jit, static_argnames="shot")
def gradient(p: Params, s: Params, x: jax.Array, y: jax.Array, shot: int) -> Params:
    """Return the gradient."""
    return jax.grad(loss, has_aux=True)(p, s, x, y, shot)[0]


@partial(jax.jit, static_argnames="shot")
def step(carried: tuple[Any, ...], x: jax.Array, y: jax.Array, shot: int) -> tuple[Any, ...]:
    """Take an Adam step."""
    p, s, m, v, t = carried
    g, s = jax.grad(loss, has_aux=True)(p, s, x, y, shot)
    t = t + 1
    m = jax.tree.map(lambda m, g: B1 * m + (1 - B1) * g, m, g)
    v = jax.tree.map(lambda v, g: B2 * v + (1 - B2) * g * g, v, g)
    root = jnp.sqrt(1 - B2**t)
    size = 1e-3 * root / (1 - B1**t)
    p = jax.tree.map(lambda p, m, v: p - size * m / (jnp.sqrt(v) + EPS * root), p, m, v)
    return p, s, m, v, t


def main() -> None:
    """Load the tasks of one client and serve."""
    held = payloads.read(Path(sys.argv[1]) / "jax.safetensors")
    p, s = {}, {}
    for name, leaf in held["state"].items():
        if leaf.is_floating_point():
            array = jnp.asarray((leaf.permute(2, 3, 1, 0) if leaf.ndim == 4 else leaf).numpy())
            (s if "running" in name else p)[name] = array
    tasks = [
        (jnp.asarray(x.permute(0, 2, 3, 1).contiguous().numpy()), jnp.asarray(y.int().numpy()))
        for x, y, _, _ in held["tasks"]
    ]
    shot = held["shot"]

    def visit() -> None:
        zeros = jax.tree.map(jnp.zeros_like, p)
        carried: tuple[Any, ...] = (p, s, zeros, zeros, jnp.zeros(()))
        for x, y in tasks:
            carried = step(carried, x, y, shot)
        jax.block_until_ready(carried)

    def check() -> dict[str, torch.Tensor]:
        found = gradient(p, s, *tasks[0], shot)
        leaves = {name: torch.tensor(jax.device_get(leaf)) for name, leaf in found.items()}
        return {n: g.permute(3, 2, 0, 1) if g.ndim == 4 else g for n, g in leaves.items()}

    serve({"visit": visit, "gradient": check}, {"version": f"JAX {jax.__version__}"})


if __name__ == "__main__":
    main()
