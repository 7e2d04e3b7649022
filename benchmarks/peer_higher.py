"""`higher` on a list of MAML tasks: the mean gradient of the query losses.

    python peer_higher.py FOLDER THREADS      reads FOLDER/maml.safetensors; see `children`

Second order as its documentation has it. First order is without the graph through the inner steps:
the gradient with respect to the adapted weights, which is that of first-order MAML.
"""

from __future__ import annotations

import higher
import torch
import torch.nn.functional as F  # noqa: N812  (the name everybody reads)
from maml_tasks import Spec, gradients, serve_gradients


def meta_gradient(spec: Spec, first_order: bool) -> dict[str, torch.Tensor]:
    """Return the mean over tasks of the gradient of the query loss after the inner steps."""
    module = spec.module
    inner = torch.optim.SGD(module.parameters(), lr=spec.lr)
    module.zero_grad()
    for sx, sy, qx, qy in spec.tasks:
        with higher.innerloop_ctx(
            module, inner, copy_initial_weights=False, track_higher_grads=not first_order
        ) as (adapted, steps):
            for _ in range(spec.steps):
                steps.step(F.cross_entropy(adapted(sx), sy))
            loss = F.cross_entropy(adapted(qx), qy)
            if not first_order:
                loss.backward()
                continue
            found = torch.autograd.grad(loss, adapted.parameters())
            for p, g in zip(module.parameters(), found, strict=True):
                p.grad = g if p.grad is None else p.grad + g
    return gradients(spec)


if __name__ == "__main__":
    serve_gradients(meta_gradient, "higher 0.2.1")
