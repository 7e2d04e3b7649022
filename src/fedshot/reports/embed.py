"""An SVG made part of an HTML page: no scripts, no links, no clashing ids, the page's own colours.

What is not on the list of elements below is dropped, so that a figure from elsewhere can bring
nothing along.
"""

from __future__ import annotations

import re
from xml.etree import ElementTree

from fedshot.errors import DataError
from fedshot.reports.canvas import INK
from fedshot.reports.words import printable

_SHAPES = ("path", "rect", "line", "circle", "polygon", "polyline", "image", "text", "tspan")
_KEPT = frozenset((*_SHAPES, "svg", "g", "use", "defs", "clipPath", "linearGradient", "stop"))
_OWN = re.compile(r"#[\w-]+")
_REFERENCE = re.compile(r"url\(#")
_REMOTE = re.compile(r"url\((?!#)", re.IGNORECASE)


def embed(svg: str, prefix: str, title: str) -> str:
    """Return the SVG for the inside of a page.

    Args:
        svg: a whole SVG document.
        prefix: put before every id; another one for every figure of a page.
        title: what the figure shows, for those who do not see it.

    Raises:
        DataError: the text is not SVG.
    """
    try:
        root = ElementTree.fromstring(svg)
    except ElementTree.ParseError as error:
        raise DataError(f"a figure is not SVG: {error}") from None
    if _local(root.tag) != "svg":
        raise DataError(f"a figure is <{_local(root.tag)}>; expected <svg>")
    _clean(root, prefix)
    root.attrib.pop("width", None)
    root.attrib.pop("height", None)
    root.set("role", "img")
    root.set("aria-labelledby", f"{prefix}-title")
    name = ElementTree.Element("title", {"id": f"{prefix}-title"})
    name.text = printable(title)
    root.insert(0, name)
    return ElementTree.tostring(root, encoding="unicode")


def _clean(element: ElementTree.Element, prefix: str) -> None:
    for child in list(element):
        if isinstance(child.tag, str) and _local(child.tag) in _KEPT:
            _clean(child, prefix)
        else:
            element.remove(child)
    element.tag = _local(element.tag)
    attributes = {_local(name): value for name, value in element.attrib.items()}
    element.attrib.clear()
    for name, value in attributes.items():
        kept = _attribute(element.tag, name, value, prefix)
        if kept is not None:
            element.set(name, kept)


def _attribute(tag: str, name: str, value: str, prefix: str) -> str | None:
    """Return the attribute's value in the page, or None when it does not belong there."""
    if name.lower().startswith("on") or _REMOTE.search(value):
        return None
    if name == "id":
        return f"{prefix}-{value}"
    if name == "href":
        if _OWN.fullmatch(value):
            return f"#{prefix}-{value[1:]}"
        return value if tag == "image" and value.startswith("data:image/png;base64,") else None
    return _REFERENCE.sub(f"url(#{prefix}-", value).replace(INK, "currentColor")


def _local(name: str) -> str:
    """Return a name without its namespace: HTML knows SVG by the element alone."""
    return name.rpartition("}")[2]
