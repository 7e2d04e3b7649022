"""What both sides must agree on before round 1: a run, in words.

The configuration travels as text and is read at the node by the loader that reads it at the server.
A node takes from it how to train, never which files to read: its data are its own.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import yaml

from fedshot import __version__
from fedshot.config import settings as trees
from fedshot.config.load import Config
from fedshot.config.registry import is_text
from fedshot.core.errors import ConfigError
from fedshot.core.seeds import Key, draws
from fedshot.deploy.flower.codec import CodecError
from fedshot.deploy.flower.server_tests import ServerTestRun
from fedshot.deploy.flower.shards import NodeData, notes_of
from fedshot.methods.user_methods import FILES, fingerprint
from fedshot.protocol.method import Method
from fedshot.runs.prepare import PreparedRun

_ID = re.compile(r"[0-9a-f]{32}")
_MOST = 1 << 18  # characters of a configuration


@dataclass(frozen=True)
class Setup:
    """One run as a node knows it.

    Args:
        run: its name among all runs, 32 hexadecimal digits.
        settings: the whole configuration, as YAML.
        classes: numbers of the base classes.
        clients: how many clients there are on all nodes.
        data: what the clients' files must agree on.
        own: the file of a method that is not the package's, and its hash; "" for one that is.
    """

    run: str
    settings: str
    classes: tuple[int, ...]
    clients: int
    data: dict[str, Any]
    own: str = ""

    @classmethod
    def of(cls, run: str, setting: PreparedRun) -> Setup:
        """Return the setup of a setting."""
        text = yaml.safe_dump(setting.config.settings, sort_keys=False)
        if isinstance(setting, ServerTestRun):
            data = setting.notes
        else:
            data = notes_of(setting.dataset, setting.deal.train)
        own = fingerprint(setting.config.settings["method"]["name"])
        return cls(run, text, setting.base_classes, len(setting.deal.train), data, own)

    def to_json(self) -> dict[str, Any]:
        """Return the setup as JSON-able values."""
        return {
            "fedshot": __version__,
            "draws": [draws(), *_libraries()],
            "run": self.run,
            "settings": self.settings,
            "classes": list(self.classes),
            "clients": self.clients,
            "data": self.data,
            "own": self.own,
        }

    @classmethod
    def from_json(cls, found: Any) -> Setup:
        """Read a setup.

        Raises CodecError, or ConfigError for another version of fedshot, or of a library that draws
        other numbers there than here.
        """
        if not isinstance(found, dict):
            raise CodecError("the setup is no tree")
        if found.get("fedshot") != __version__:
            raise ConfigError(
                f"the server runs fedshot {str(found.get('fedshot'))[:40]}, this node "
                f"{__version__}. Install the same version on both."
            )
        _check_draws(found.get("draws"))
        run, text, classes = (found.get(name) for name in ("run", "settings", "classes"))
        data = found.get("data")
        if not isinstance(run, str) or not _ID.fullmatch(run):
            raise CodecError("the run has no name of 32 hexadecimal digits")
        if not isinstance(text, str) or len(text) > _MOST:
            raise CodecError(f"the configuration is no text of at most {_MOST} characters")
        if not isinstance(classes, list) or not all(type(c) is int for c in classes):
            raise CodecError("the base classes are no whole numbers")
        clients = found.get("clients")
        if type(clients) is not int or clients < 1:
            raise CodecError("the number of clients is no whole number above 0")
        if not isinstance(data, dict):
            raise CodecError("the setup does not say which data it is for")
        own = found.get("own")
        if not isinstance(own, str):
            raise CodecError("the setup does not say whose the method is")
        return cls(run, text, tuple(classes), clients, data, own)

    def key(self) -> str:
        """Return a text that two setups share when nodes may take them for the same."""
        return json.dumps(self.to_json(), sort_keys=True)

    def config(self) -> Config:
        """Return the checked configuration. Raises ConfigError."""
        settings = trees.parse(self.settings, is_text, origin="the server's configuration")
        if not isinstance(settings, dict):
            raise ConfigError("the server's configuration holds no keys and values.")
        self._check_own(settings.get("method"))
        return Config.of(settings)

    def _check_own(self, chosen: Any) -> None:
        """Raise ConfigError where the server has another file of a method than this node."""
        name = str(chosen.get("name") if isinstance(chosen, dict) else chosen)
        held = fingerprint(name)
        if self.own.rpartition(" ")[2] != held.rpartition(" ")[2]:
            raise ConfigError(
                f"method {name[:100]!r} is {self.own[:100] or 'of fedshot itself'} at the server, "
                f"and {held or 'not known'} at this node. Bring the server's file here, and start "
                f"the node with {FILES}=FILE in its environment."
            )

    def check(self, holdings: NodeData) -> None:
        """Raise ConfigError unless the node's data are of the kind that the run is about."""
        for name, told in _WORDS.items():
            held = holdings.notes.get(name)
            # A server that reads the whole dataset itself says nothing of how words are read.
            asked = self.data.get(name, held if name == "words" else None)
            if held is not None and asked != held:
                raise ConfigError(
                    f"the clients' files are of another {told} than the server's: "
                    f"{str(held)[:60]}, expected {str(asked)[:60] or 'none'}. Use the "
                    "configuration with which the files were dealt, its seed included, or deal or "
                    "pack all of them again."
                )
        strange = np.setdiff1d(holdings.dataset.y, self.classes).tolist()
        if strange:
            name = holdings.dataset.class_names[strange[0]]
            raise ConfigError(
                f"the clients' files hold examples of {name!r:.60}, which is no base class of the "
                "server's configuration. Pack them again, with the configuration of the server."
            )

    def method(self, config: Config, holdings: NodeData) -> Method[Any]:
        """Return the method as the node runs it."""
        return config.method(config.model.build(holdings.dataset), self.classes, self.clients)

    def private_key(self, config: Config) -> Key:
        """Return the root of the keys of the clients' first private states."""
        return Key(config.seed).at("clients")


def _libraries() -> tuple[str, str]:
    return f"numpy {np.__version__}", f"torch {torch.__version__}"


def _check_draws(told: Any) -> None:
    """Raise ConfigError where the server's keys draw other numbers than this node's."""
    if not isinstance(told, list) or not told:
        raise ConfigError(
            "the server does not tell what its keys draw: its fedshot is older than this node's. "
            "Install the same version on both, from one commit."
        )
    found, *libraries = told
    if found != draws():
        theirs = ", ".join(str(one)[:40] for one in libraries[:2])
        raise ConfigError(
            f"from one key the server draws other numbers ({theirs}) than this node "
            f"({', '.join(_libraries())}). Install the same versions on both."
        )


_WORDS = {
    "class_names": "list of classes", "shape": "shape", "dataset": "dataset", "deal": "deal",
    "words": "way to read texts (`vectors`, `dim`, `cut`, `keep` and `unknown` of data)",
}  # fmt: skip
