"""The setup: the description of a run that server and nodes must agree on before round 1.

The configuration is sent as YAML, and the node checks it as the server does. It tells a node how to
train, never which files to read.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

import numpy as np
import torch
import yaml
from pydantic import Field, StrictInt, TypeAdapter, ValidationError

from fedshot import __version__
from fedshot.config import settings as trees
from fedshot.config.load import Config
from fedshot.config.registry import is_text
from fedshot.core.errors import ConfigError
from fedshot.core.seeds import draws
from fedshot.core.serialised import CodecError, short
from fedshot.deploy.flower.data_files import NodeData, ServerTestRun, notes_of
from fedshot.methods.user_methods import FILES, fingerprint
from fedshot.runs.prepare import PreparedRun

_MAX_SETTINGS = 1 << 18  # characters of a configuration


@dataclass(frozen=True)
class Setup:
    """The description of a run that its nodes receive.

    Args:
        run: the run's id, 32 hexadecimal digits.
        settings: the whole configuration, as YAML; with `run.device: cpu`, since each node has its
            own device.
        classes: the base classes, as class indices of the dataset.
        clients: number of clients on all nodes.
        data: metadata that every client file must have, and their values.
        own: file name and hash of a user-defined method; "" for a method of fedshot.
    """

    run: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    settings: Annotated[str, Field(max_length=_MAX_SETTINGS)]
    classes: tuple[StrictInt, ...]
    clients: Annotated[StrictInt, Field(ge=1)]
    data: dict[str, Any]
    own: str

    @classmethod
    def of(cls, run: str, prepared: PreparedRun) -> Setup:
        """Return the setup of a prepared run."""
        settings = trees.merged(prepared.config.settings, {"run": {"device": "cpu"}})
        text = yaml.safe_dump(settings, sort_keys=False)
        if isinstance(prepared, ServerTestRun):
            data = prepared.notes
        else:
            data = notes_of(prepared.dataset, prepared.client_split.train)
        own = fingerprint(prepared.config.settings["method"]["name"])
        return cls(run, text, prepared.base_classes, len(prepared.client_split.train), data, own)

    def to_json(self) -> dict[str, Any]:
        """Return the setup, with the versions of fedshot and of libraries, as JSON values."""
        versions = {"fedshot": __version__, "draws": [draws(), *_LIBRARIES]}
        return versions | asdict(self) | {"classes": list(self.classes)}

    @staticmethod
    def from_json(found: Any) -> Setup:
        """Parse a setup.

        Raises CodecError for an invalid setup, ConfigError for another version of fedshot, or for
        library versions that draw different random numbers.
        """
        if not isinstance(found, dict):
            raise CodecError("the setup is not a JSON object")
        if found.get("fedshot") != __version__:
            raise ConfigError(
                f"the server runs fedshot {str(found.get('fedshot'))[:40]}, this node "
                f"{__version__}. Install the same version of fedshot on both."
            )
        _check_draws(found.get("draws"))
        try:
            return _SCHEMA.validate_python(found)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            key = ".".join(map(str, first["loc"]))
            raise CodecError(short(f"setup.{key} is invalid: {first['msg']}")) from None

    def config(self) -> Config:
        """Return the checked configuration. Raises ConfigError if it is invalid."""
        settings = trees.parse(self.settings, is_text, origin="the server's configuration")
        if not isinstance(settings, dict):
            raise ConfigError("the server's configuration holds no keys and values.")
        self._check_own(settings.get("method"))
        return Config.of(settings)

    def _check_own(self, method: Any) -> None:
        """Raise ConfigError if the file of a user-defined method differs on server and node."""
        name = str(method.get("name") if isinstance(method, dict) else method)
        held = fingerprint(name)
        if self.own.rpartition(" ")[2] != held.rpartition(" ")[2]:
            raise ConfigError(
                f"method {name[:100]!r} is {self.own[:100] or 'of fedshot itself'} on the server, "
                f"and {held or 'unknown'} on this node. Copy the server's file here, and start the "
                f"node with {FILES}=FILE in its environment."
            )

    def check(self, data: NodeData) -> None:
        """Raise ConfigError unless the node's data have the metadata and the classes of the run."""
        for name, description in _DESCRIPTIONS.items():
            held = data.notes.get(name)
            # A server with the whole dataset does not send how texts are read.
            expected = self.data.get(name, held if name == "words" else None)
            if (held is not None or name == "encoder") and expected != held:
                raise ConfigError(
                    f"the client files have another {description} than the server's: "
                    f"{_shown(held)}, expected {_shown(expected)}. Use the configuration with "
                    "which the files were written, with the same seed, or write all of them again "
                    "with `fedshot flower partition` or `pack`."
                )
        others = np.setdiff1d(data.dataset.y, self.classes).tolist()
        if others:
            name = data.dataset.class_names[others[0]]
            raise ConfigError(
                f"the client files hold examples of {name!r:.60}, which is not a base class of the "
                "server's configuration. Pack them again with the server's configuration."
            )


def _shown(note: Any) -> str:
    if isinstance(note, list):
        more = f", ... ({len(note)} in all)" if len(note) > _FEW else ""
        return f"[{', '.join(short(one, 30) for one in note[:_FEW])}{more}]"
    return "none" if note in (None, "") else str(note)[:64]


_FEW = 4  # entries of a list that a message shows
_SCHEMA = TypeAdapter(Setup)
_LIBRARIES = f"numpy {np.__version__}", f"torch {torch.__version__}"


def _check_draws(found: Any) -> None:
    """Raise ConfigError if the server's random numbers differ from this node's."""
    theirs, *libraries = found if isinstance(found, list) and found else [None, "unknown versions"]
    if theirs != draws():
        versions = ", ".join(str(library)[:40] for library in libraries[:2])
        raise ConfigError(
            f"with the same seed, the server ({versions}) draws other random numbers than this "
            f"node ({', '.join(_LIBRARIES)}). Install the same versions of fedshot, numpy and "
            "torch on both."
        )


_DESCRIPTIONS = {
    "encoder": "frozen encoder", "class_names": "list of classes", "shape": "shape",
    "dataset": "dataset", "deal": "client split",
    "words": "way to read texts (`vectors`, `dim`, `cut`, `keep` and `unknown` of data)",
}  # fmt: skip
