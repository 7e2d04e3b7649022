"""The same experiment across machines: Flower carries messages, identities and TLS.

What is trained, whom it asks, what counts and what is kept is fedshot's own, as on one machine.
This package alone imports flwr, and `CHECKED` names the versions that it was checked with: it uses
parts of Flower below its documented interface (see `link.py` and `operator.py`), because what is
documented starts a process for every message, looks for one every three seconds, and runs code that
the server sends.
"""

from __future__ import annotations

import importlib.metadata

from fedshot.core.errors import ConfigError

CHECKED = ("1.41.0",)
_LIKE = ("1.41.", "1.42.")


def require_flower() -> str:
    """Return the version of flwr; raise ConfigError where there is none that would do."""
    try:
        version = importlib.metadata.version("flwr")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            "this command needs Flower, which is not installed. Install fedshot with its extra: "
            "pip install 'fedshot[flower]'."
        ) from None
    if not version.startswith(_LIKE):
        raise ConfigError(
            f"flwr is {version}; fedshot works with 1.41 and 1.42. Install one of them: "
            f"pip install flwr=={CHECKED[0]}."
        )
    return version
