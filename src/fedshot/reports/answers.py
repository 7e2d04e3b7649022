"""A page that shows what a classifier predicted for each file.

The page is one HTML file with small copies of the images; it loads nothing and runs no script.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup
from PIL import Image, ImageOps

from fedshot.core import storage
from fedshot.core.text import count, shortened
from fedshot.data.files.images import FORMATS
from fedshot.reports.markup import render

MOST = 600  # maximum number of predictions on a page, so that a phone can open it
_SIDE, _SMALL = 160, 72  # pixels of an image at a prediction, and of a support image
_EXCERPT, _NAME = 160, 60  # maximum length of an excerpt, and of a name
_SUPPORT = 10  # maximum number of support examples shown of each class


@dataclass(frozen=True)
class Card:
    """A prediction for one file.

    `label` is the predicted class, or the label for unknown examples if the example was
    `turned_away` (rejected as unknown). `nearest` is the most probable class, and `confidence` its
    probability. `shown` is the path of an image, or the text itself.
    """

    name: str
    label: str
    confidence: float
    nearest: str
    turned_away: bool
    shown: Path | str


@dataclass(frozen=True)
class AnswersPage:
    """The content of a page: facts about the run, support examples by class, predictions.

    `skipped` lists the files that could not be read, as (name, reason).
    """

    title: str
    facts: Mapping[str, str]
    support: Mapping[str, Sequence[Path | str]]
    cards: Sequence[Card]
    skipped: Sequence[tuple[str, str]] = ()


def write_answers(path: Path, page: AnswersPage) -> None:
    """Write the page; its folder is created if needed."""
    by_label: dict[tuple[bool, str], list[Card]] = {}
    for card in sorted(page.cards, key=lambda c: (c.turned_away, c.label, c.confidence)):
        by_label.setdefault((card.turned_away, card.label), []).append(card)
    shown = _shares([len(cards) for cards in by_label.values()])
    html = render(
        "answers.html",
        title=page.title,
        lead=_summary(page),
        support=[
            (shortened(label, _NAME), [_sample(one, _SMALL) for one in examples[:_SUPPORT]],
             max(len(examples) - _SUPPORT, 0) or "")
            for label, examples in page.support.items()
        ],
        groups=[
            {
                "label": shortened(label, _NAME),
                "turned_away": turned_away,
                "files": count(len(cards), "file"),
                "cards": map(_card, cards[:n]),
                "more": f"{len(cards) - n:,}" if len(cards) > n else "",
            }
            for ((turned_away, label), cards), n in zip(by_label.items(), shown, strict=True)
        ],
        skipped=[(shortened(name, _NAME), shortened(why, 300)) for name, why in page.skipped],
        facts=page.facts.items(),
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    storage.deliver(path, html)


def _summary(page: AnswersPage) -> str:
    turned_away = sum(card.turned_away for card in page.cards)
    examples = count(sum(map(len, page.support.values())), "labelled example")
    text = (
        f"{count(len(page.cards), 'file')} classified, from {examples} of "
        f"{count(len(page.support), 'class', 'classes')}."
    )
    if turned_away:
        text += f" {turned_away:,} look like none of them."
    if page.skipped:
        text += f" {count(len(page.skipped), 'file')} could not be read."
    return text


def _shares(wanted: Sequence[int]) -> list[int]:
    """Return how many cards (predictions) to show of each group of them; at most MOST in total.

    `wanted` are the sizes of the groups. Small groups are shown completely, and large groups share
    the rest equally.
    """
    shares = dict.fromkeys(range(len(wanted)), 0)
    left = MOST
    for done, i in enumerate(sorted(shares, key=lambda i: wanted[i])):
        shares[i] = min(wanted[i], left // (len(wanted) - done))
        left -= shares[i]
    return list(shares.values())


def _card(card: Card) -> dict[str, Any]:
    return {
        "name": card.name,
        "short": shortened(card.name, _NAME),
        "width": f"{100 * card.confidence:.1f}",
        "percent": f"{100 * card.confidence:.0f} %" if card.confidence < 0.995 else "> 99 %",
        "nearest": card.nearest,
        "shown": _sample(card.shown, _SIDE),
    }


class _Thumbnail(NamedTuple):
    kind: str
    base64: Markup
    width: int
    height: int
    tiny: bool  # images of a few pixels are enlarged without smoothing


def _sample(one: Path | str, side: int) -> str | _Thumbnail | None:
    """Return an excerpt of a text, or a small copy of an image; None if it cannot be read.

    The copy contains no metadata, such as the place where a photo was taken.
    """
    if isinstance(one, str):
        return shortened(one, _EXCERPT)
    out = BytesIO()
    try:
        with Image.open(one, formats=FORMATS) as image:
            small = ImageOps.exif_transpose(image).convert("RGB")
            small.thumbnail((2 * side, 2 * side))  # for screens with two pixels per CSS pixel
            kind = "png" if max(small.size) <= 64 else "jpeg"
            small.info.clear()
            small.save(out, kind.upper(), quality=80)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    data = Markup(base64.b64encode(out.getvalue()).decode())
    return _Thumbnail(kind, data, *small.size, tiny=max(small.size) <= side // 2)
