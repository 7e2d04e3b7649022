"""A setting before any training: what the data is and how it is dealt."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedshot import storage
from fedshot.experiment import Setting
from fedshot.reports.plots import class_histogram, contact_sheet, partition_picture

_ROWS = 20  # classes on the contact sheet


def facts(setting: Setting) -> list[str]:
    """Return lines that describe the data, the split and the partition."""
    data, split, sizes = setting.dataset, setting.split, setting.deal.train.sizes
    if data.is_text:
        kind_of_x = f"texts of at most {data.shape[0]} words"
    else:
        kind_of_x = f"images of {' x '.join(map(str, data.shape))}"
    kind = type(setting.config.partition).__name__.lower()
    lines = [
        f"{data.name}: {len(data)} {kind_of_x}, {data.n_classes} classes, hash {data.digest[:12]}",
        f"split: {len(split.base)} base, {len(split.validation)} validation, "
        f"{len(split.novel)} novel classes",
        f"partition {kind}: {len(sizes)} clients with {sizes.min()} to {sizes.max()} images, "
        f"median {np.median(sizes):.0f}",
        f"{len(setting.clients)} clients can form a {setting.config.episode} episode",
    ]
    return lines + [f"client {c} cannot: {why}" for c, why in list(setting.left_out.items())[:5]]


def pictures(setting: Setting, folder: Path) -> list[Path]:
    """Write the contact sheet, the class histogram and the partition picture; return the files."""
    data = setting.dataset
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    if not data.is_text:
        written.append(folder / f"{data.name}-classes.png")
        scale = max(1, 56 // max(data.shape[:2]))
        base = setting.split.base
        some = [base[i] for i in np.linspace(0, len(base) - 1, min(_ROWS, len(base))).astype(int)]
        contact_sheet(data, some, scale=scale).save(written[0])
    figures = {
        "histogram": class_histogram(data.y, data.class_names, setting.split),
        "partition": partition_picture(setting.deal.train, data.y, data.class_names),
    }
    for name, svg in figures.items():
        path = folder / f"{data.name}-{name}.svg"
        storage.write_bytes(path, svg.encode(), sync=False)
        written.append(path)
    return written
