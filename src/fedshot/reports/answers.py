"""A page that shows what a classifier said about each file, the surest last among its class.

One HTML file: pictures are inside it, small; nothing is fetched and nothing is run.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from io import BytesIO
from pathlib import Path

from PIL import Image, ImageOps

from fedshot import __version__
from fedshot.core import storage
from fedshot.core.text import count, printable, shortened
from fedshot.data.files.images import FORMATS
from fedshot.reports.page import document

MOST = 600  # cards on a page, so that it opens on a phone
_SIDE, _SMALL = 160, 72  # pixels of a picture, of one of the support
_EXCERPT, _NAME = 160, 60  # characters


@dataclass(frozen=True)
class Card:
    """One answer, as a page shows it.

    Args:
        name: of the file.
        label: the answer.
        confidence: probability of the nearest class, in [0, 1].
        nearest: that class.
        turned_away: whether the answer is that it is none of the classes.
        shown: the picture, or the text itself.
    """

    name: str
    label: str
    confidence: float
    nearest: str
    turned_away: bool
    shown: Path | str


@dataclass(frozen=True)
class AnswersPage:
    """What a page tells.

    Args:
        title: of the page.
        facts: of the run and of its confidence, by name.
        support: the examples learnt from, by class.
        cards: the answers.
        skipped: files that could not be read: name, reason.
    """

    title: str
    facts: Mapping[str, str]
    support: Mapping[str, Sequence[Path | str]]
    cards: Sequence[Card]
    skipped: Sequence[tuple[str, str]] = ()


def write_answers(path: Path, sheet: AnswersPage) -> None:
    """Write the page; its folder is made when it does not exist."""
    style = resources.files("fedshot.reports").joinpath("answers.css").read_text(encoding="utf-8")
    parts = [
        f"<h1>{_e(sheet.title)}</h1>",
        f'<p class="lead">{_e(_summary(sheet))}</p>',
        *_support(sheet.support),
        *_answers(sheet),
        *_skipped(sheet.skipped),
        *_facts(sheet.facts),
        f"<footer>Written by fedshot {_e(__version__)}.</footer>",
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    page = document(sheet.title, "\n".join(parts), style)
    storage.deliver(path, page.encode("utf-8", "replace"))


def _summary(sheet: AnswersPage) -> str:
    by_label = _by_label(sheet)
    turned = sum(len(cards) for (away, _), cards in by_label.items() if away)
    text = f"{count(len(sheet.cards), 'file')} answered, from " + count(
        sum(map(len, sheet.support.values())), "labelled example"
    )
    text += f" of {count(len(sheet.support), 'class', 'classes')}."
    if turned:
        text += f" {turned:,} look like none of them."
    if sheet.skipped:
        text += f" {count(len(sheet.skipped), 'file')} could not be read."
    return text


def _support(support: Mapping[str, Sequence[Path | str]]) -> Iterator[str]:
    yield '<section aria-labelledby="learnt"><h2 id="learnt">Learnt from</h2><div class="learnt">'
    for label, examples in support.items():
        yield f"<div><h3>{_e(shortened(label, _NAME))}</h3>"
        yield f'<div class="row">{"".join(_shown(one, _SMALL, label) for one in examples[:10])}'
        more = len(examples) - 10
        yield f'<span class="small">and {more} more</span>' if more > 0 else ""
        yield "</div></div>"
    yield "</div></section>"


def _answers(sheet: AnswersPage) -> Iterator[str]:
    yield '<section aria-labelledby="answers"><h2 id="answers">Answers</h2>'
    if not sheet.cards:
        yield "<p>There was nothing to answer.</p></section>"
        return
    yield (
        '<p class="small">Under each name the least certain come first: that is where a look is '
        "worth most.</p>"
    )
    by_label = _by_label(sheet)
    most = _shares([len(cards) for cards in by_label.values()])
    for ((turned, label), cards), shown in zip(by_label.items(), most, strict=True):
        tone = ' class="turned"' if turned else ""
        files = count(len(cards), "file")
        yield f"<h3{tone}>{_e(shortened(label, _NAME))} <span>{files}</span></h3>"
        yield '<ul class="cards">'
        yield from map(_card, cards[:shown])
        yield "</ul>"
        if len(cards) > shown:
            yield f'<p class="small">And {len(cards) - shown:,} more, in the CSV or JSON.</p>'
    yield "</section>"


def _shares(asked: Sequence[int]) -> list[int]:
    """Return how many of each are shown: all of the few, and as many of each of the others."""
    shares = dict.fromkeys(range(len(asked)), 0)
    left = MOST
    for done, i in enumerate(sorted(shares, key=lambda i: asked[i])):
        shares[i] = min(asked[i], left // (len(asked) - done))
        left -= shares[i]
    return list(shares.values())


def _card(card: Card) -> str:
    percent = f"{100 * card.confidence:.0f} %" if card.confidence < 0.995 else "&gt; 99 %"
    nearest = f'<div class="near">nearest: {_e(card.nearest)}</div>' if card.turned_away else ""
    return (
        f"<li>{_shown(card.shown, _SIDE, card.name)}"
        f'<div class="bar"><i style="width:{100 * card.confidence:.1f}%"></i></div>'
        f'<div class="sure">{percent}</div>{nearest}'
        f'<div class="file" title="{_e(card.name)}">{_e(shortened(card.name, _NAME))}</div></li>'
    )


def _shown(one: Path | str, side: int, name: str) -> str:
    if isinstance(one, str):
        return f'<blockquote class="text">{_e(shortened(one, _EXCERPT))}</blockquote>'
    data = _thumbnail(one, side)
    if data is None:
        return '<div class="gone">cannot be shown</div>'
    kind, width, height = data[1]
    text = base64.b64encode(data[0]).decode()
    # Drawings of a few pixels are shown large, pixel by pixel.
    tiny = ' class="tiny"' if max(width, height) <= side // 2 else ""
    return (
        f'<img{tiny} src="data:image/{kind};base64,{text}" width="{width}" height="{height}" '
        f'alt="{_e(shortened(name, _NAME))}" loading="lazy">'
    )


def _thumbnail(path: Path, side: int) -> tuple[bytes, tuple[str, int, int]] | None:
    """Return a small copy of a picture, without what cameras note in it; None if it is gone."""
    out = BytesIO()
    try:
        with Image.open(path, formats=FORMATS) as image:
            small = ImageOps.exif_transpose(image).convert("RGB")
            small.thumbnail((2 * side, 2 * side))  # for screens of two pixels to a point
            kind = "png" if max(small.size) <= 64 else "jpeg"
            small.info.clear()
            small.save(out, kind.upper(), quality=80)
            return out.getvalue(), (kind, *small.size)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None


def _skipped(skipped: Sequence[tuple[str, str]]) -> Iterator[str]:
    if not skipped:
        return
    yield '<section aria-labelledby="skipped"><h2 id="skipped">Could not be read</h2><dl>'
    for name, reason in skipped[:100]:
        yield f"<dt>{_e(shortened(name, _NAME))}</dt><dd>{_e(shortened(reason, 300))}</dd>"
    yield "</dl>"
    if len(skipped) > 100:
        yield f'<p class="small">And {len(skipped) - 100:,} more.</p>'
    yield "</section>"


def _facts(facts: Mapping[str, str]) -> Iterator[str]:
    yield '<section aria-labelledby="model"><h2 id="model">What answered</h2><dl>'
    for name, value in facts.items():
        yield f"<dt>{_e(name)}</dt><dd>{_e(value)}</dd>"
    yield "</dl></section>"


def _by_label(sheet: AnswersPage) -> dict[tuple[bool, str], list[Card]]:
    """Return the cards by (whether turned away, answer), the least certain first."""
    found: dict[tuple[bool, str], list[Card]] = {}
    for card in sorted(sheet.cards, key=lambda card: (card.turned_away, card.label)):
        found.setdefault((card.turned_away, card.label), []).append(card)
    return {key: sorted(cards, key=lambda card: card.confidence) for key, cards in found.items()}


def _e(text: object) -> str:
    return html.escape(printable(text))
