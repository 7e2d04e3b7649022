"""Finds folders of pre-trained models, locally or on the Hugging Face hub, and checks them.

Only weights in safetensors are read, because a file of pickled weights can run code when it is
read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from fedshot.core import storage
from fedshot.core.errors import ConfigError, DataError
from fedshot.core.extras import require
from fedshot.data.encoders.frozen import EncoderOptions
from fedshot.data.files.fingerprints import Fingerprints

_PICKLED = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})
_WANTED = ["*.safetensors", "*.json", "*.txt", "*.model"]
_OTHERS = ("onnx", "openvino")  # folders of other runtimes


@dataclass(frozen=True)
class PretrainedEncoder(EncoderOptions):
    """An encoder of a library that reads models from folders.

    Args:
        path: a folder that `save_pretrained` wrote, or a name on the Hugging Face hub.
        revision: branch, tag or commit on the hub; a run records the commit.
    """

    path: str
    revision: str | None = None

    def found(self, data_dir: Path | None, **facts: Any) -> tuple[Path, Self]:
        """Return the folder of the model, and these options with its commit and hash.

        The folder is `path`, `data_dir/encoders/path`, or downloaded from the hub. Only models on
        the hub have revisions: with `revision`, `data_dir` is not searched. `facts` also decide the
        features, and are part of the hash.

        Raises ConfigError if there is no such model, the hub cannot be reached, or the weights are
        not safetensors.
        """
        folder, commit = Path(self.path).expanduser(), self.revision
        if not folder.is_dir() and data_dir is not None and self.revision is None:
            folder = data_dir / "encoders" / self.path
        if not folder.is_dir():
            folder = _fetched(self.path, self.revision)
            commit = folder.name
        elif self.revision is not None:
            raise ConfigError(
                f"model.encoder.revision is {self.revision!r}, but model.encoder.path is a local "
                "folder, which has no revisions. Leave it out."
            )
        _check_weights(folder)
        hashes = Fingerprints(storage.cache_folder() / "sources.json")
        try:
            files = {
                file.relative_to(folder).as_posix(): hashes.of(file)
                for file in _files(folder)
                if any(file.match(pattern) for pattern in _WANTED)
            }
        except DataError as error:
            raise ConfigError(str(error)) from None
        return folder, self.recorded({"files": files, **facts}, revision=commit)


def _fetched(path: str, revision: str | None) -> Path:
    require("encoders", "model.encoder.path on the hub", "huggingface_hub")
    import huggingface_hub

    try:
        found = huggingface_hub.snapshot_download(
            path,
            revision=revision,
            allow_patterns=_WANTED,
            ignore_patterns=[f"{name}/*" for name in _OTHERS],
        )
    except Exception as error:  # network, hub and names raise many types
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"model.encoder.path is {path!r}, which is not a local folder and cannot be fetched "
            f"from the hub ({reason[0]}). Check the name and the network, set it to a local "
            f"folder, or put the model into encoders/{path} in the folder of data."
        ) from error
    return Path(found)


def _files(folder: Path) -> list[Path]:
    """Return the sorted files of a model, except hidden files and those for other runtimes."""
    return [
        file
        for file in sorted(folder.rglob("*"))
        if file.is_file()
        and file.relative_to(folder).parts[0] not in _OTHERS
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    ]


def _check_weights(folder: Path) -> None:
    """Raise ConfigError unless all weights in the folder and below it are safetensors."""
    files = _files(folder)
    safe = {file.parent for file in files if file.suffix == ".safetensors"}
    for file in files:
        if file.suffix in _PICKLED and file.parent not in safe:
            raise ConfigError(
                f"{file} holds pickled weights, which can run code when they are read. Convert "
                "them to safetensors where you trust the file: load the model there, and write it "
                "with save_pretrained."
            )
    if not safe:
        raise ConfigError(
            f"{folder} holds no weights in safetensors. Choose another folder or revision, or "
            "write the model with save_pretrained."
        )


@contextmanager
def loading(folder: Path) -> Iterator[None]:
    """Turn any error raised while a model is read into a ConfigError that names the folder."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # its libraries raise many types
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"{folder} cannot be loaded as model.encoder: {reason[0]}. Check the folder, and that "
            "model.encoder.name is the library that wrote it."
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the messages that transformers writes on the terminal while it reads a model."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
