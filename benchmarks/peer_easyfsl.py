"""easyfsl's evaluation of prototypical networks, with its own sampler, loader and `evaluate`.

    python peer_easyfsl.py FOLDER THREADS      reads FOLDER/test.safetensors; see `children`

Two things make easyfsl 1.5.0 run here, neither in what is measured. It imports torchvision, of
which there is no build for every torch; where that cannot be imported an empty module stands in.
And its sampler hands `data_source` to torch's, which no longer takes it.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import payloads
import torch
from nets import build, place
from serve import serve
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

try:
    import torchvision  # noqa: F401  (easyfsl wants it)
except (ImportError, RuntimeError):
    for part in ("", ".transforms", ".models", ".models.resnet", ".datasets", ".utils"):
        sys.modules[f"torchvision{part}"] = MagicMock()


def _take_data_source(self: Sampler[Any], data_source: object = None) -> None:
    del self, data_source


Sampler.__init__ = _take_data_source  # type: ignore[method-assign]

from easyfsl.datasets import FewShotDataset  # noqa: E402  (after torchvision)
from easyfsl.methods import PrototypicalNetworks  # noqa: E402
from easyfsl.samplers import TaskSampler  # noqa: E402
from easyfsl.utils import evaluate  # noqa: E402


class Images(FewShotDataset):  # type: ignore[misc]
    """Images ready in memory as floats [C, H, W]."""

    def __init__(self, x: Tensor, y: list[int]) -> None:
        self._x, self._y = x, y

    def __getitem__(self, item: int) -> tuple[Tensor, int]:
        return self._x[item], self._y[item]

    def __len__(self) -> int:
        return len(self._y)

    def get_labels(self) -> list[int]:
        """Return the class of every image."""
        return self._y


class Given(TaskSampler):  # type: ignore[misc]
    """A sampler of given rows, to compare accuracies on the same episodes."""

    def __init__(self, episodes: list[list[int]], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._episodes = episodes

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._episodes)


def main() -> None:
    """Load the test and serve."""
    torch.set_num_threads(int(sys.argv[2]))
    held = payloads.read(Path(sys.argv[1]) / "test.safetensors")
    images, n = Images(held["x"], held["y"]), len(held["episodes"])
    shape = (images, 5, held["shot"], held["query"], n)

    def accuracy(sampler: TaskSampler, layout: str, workers: int) -> Tensor:
        loader = DataLoader(
            images,
            batch_sampler=sampler,
            num_workers=workers,
            collate_fn=sampler.episodic_collate_fn,
        )
        module = build(held["net"])
        module.load_state_dict(held["state"])
        network = PrototypicalNetworks(place(module, layout))
        found = evaluate(network, loader, device="cpu", use_tqdm=False)
        return torch.tensor(found, dtype=torch.float64)

    random.seed(0)  # its TaskSampler draws from the global generator
    works = {"given": lambda: accuracy(Given(held["episodes"], *shape), "nchw", 0)}
    for layout in ("nchw", "channels_last"):
        for workers in (0, 2):
            works[f"{layout}-{workers}"] = lambda lay=layout, w=workers: accuracy(
                TaskSampler(*shape), lay, w
            )
    serve(works, {"version": "easyfsl 1.5.0"})


if __name__ == "__main__":
    main()
