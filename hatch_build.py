"""What a package index shows: the project's addresses, and the README with links that work there.

Both come from `repository` in pyproject.toml. While it is empty there are no addresses, and a link
to a file of the repository becomes its text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"\[([^\]]+)\]\((?![a-z]+:|#)([^)\s]+)\)")


class Metadata(MetadataHookInterface):
    """Sets `readme` and `urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set what pyproject.toml calls dynamic."""
        address = self.config["repository"].rstrip("/")
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = _LINK.sub(rf"[\1]({address}/blob/HEAD/\2)" if address else r"\1", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        places = {
            "Repository": "",
            "Documentation": "/blob/HEAD/docs/index.md",
            "Changelog": "/blob/HEAD/CHANGELOG.md",
            "Issues": "/issues",
        }
        metadata["urls"] = {name: address + place for name, place in places.items() if address}
