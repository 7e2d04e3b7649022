"""Opening runs on a machine other than the one that trained them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fedshot.config import settings as trees
from fedshot.config.load import Config
from fedshot.runs.experiment import check_belongs


def on_this_machine(settings: trees.Settings) -> trees.Settings:
    """Return the settings with the CPU as device if this machine has no GPU."""
    if trees.at(settings, "run.device") == "cuda" and not torch.cuda.is_available():
        return trees.merged(settings, {"run": {"device": "cpu"}})  # type: ignore[no-any-return]
    return settings


def check_here(folder: Path, notes: dict[str, Any], config: Config) -> None:
    """Raise CheckpointError unless a checkpoint has this configuration; the device may differ."""
    held = trees.merged(notes["config"], {"run": {"device": config.run.device}})
    check_belongs(folder, notes | {"config": held}, config)
