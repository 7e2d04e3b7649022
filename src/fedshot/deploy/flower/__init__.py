"""Federated training across machines: Flower provides transport, node identities and TLS.

fedshot itself samples clients, aggregates and writes checkpoints, as on one machine. This is the
only package that imports flwr. It uses internal modules of Flower (see `connection.py` and
`operator.py`), because the documented interface starts a process for every message, polls every
three seconds, and runs code that the server sends. `CHECKED` lists the tested versions of flwr.
"""

from __future__ import annotations

import importlib.metadata

from fedshot.core.errors import ConfigError
from fedshot.core.extras import require

CHECKED = ("1.41.0",)
_LIKE = ("1.41.", "1.42.")


def require_flower() -> str:
    """Return the version of flwr. Raises ConfigError if it is missing or unsupported."""
    require("flower", "this command", "flwr", "cryptography", "httpx")
    version = importlib.metadata.version("flwr")
    if not version.startswith(_LIKE):
        raise ConfigError(
            f"flwr is {version}; fedshot works with 1.41 and 1.42. Install one of them: "
            f"pip install flwr=={CHECKED[0]}."
        )
    return version
