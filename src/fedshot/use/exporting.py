"""The encoder of a run for other programs: weights, a torch program, or ONNX, with a model card.

What is exported turns examples into features. How a task is learnt from features is the method's:
class means need no more, and methods that adapt by gradient steps start from these weights.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save
from torch import Tensor
from typing_extensions import TypedDict

from fedshot.core import records, storage, tree
from fedshot.core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    as_path,
    check_kind,
    check_word,
)
from fedshot.learners.learner import test_modes
from fedshot.use.card import CARD, card_text, made_of
from fedshot.use.encoder import encoder_of
from fedshot.use.plain import Encoder, TaskEncoder, encoder_module, example
from fedshot.use.trained import TrainedRun

Format = Literal["safetensors", "torch-export", "onnx"]
FILES: dict[str, str] = {
    "safetensors": "encoder.safetensors",
    "torch-export": "encoder.pt2",
    "onnx": "encoder.onnx",
}
TOLERANCE = 1e-5  # of the features, relative to the largest


def export(
    run: TrainedRun,
    to: Format,
    folder: Path,
    *,
    client: int | None = None,
    licence: str | None = None,
) -> list[Path]:
    """Write the encoder, its description and a model card; return the files.

    Args:
        run: whose chosen round.
        to: "safetensors", the weights and statistics by name; "torch-export", a program for
            `torch.export.load`; "onnx", which needs the extra of that name.
        folder: where; it is made if it is not there.
        client: whose encoder, for methods that leave them with the clients.
        licence: of the training data, for the card.

    Raises:
        ConfigError: there is no single encoder, or a package is missing.
        DataError: the exported program does not give the same features.
    """
    check_kind("run", run, TrainedRun, "Open one with TrainedRun(folder).")
    check_word("to", to, FILES)
    folder = as_path("folder", folder)
    body, stats = encoder_of(run, client)
    weights = tree.digest({"body": body, "stats": stats})
    before = _earlier(folder, FILES[to], weights)
    licence = licence or before.get("licence")
    module = encoder_module(run.model, body, stats)
    if to == "safetensors":
        data = _weights(run, module)
    else:
        data = _checked(run, module, _torch_export if to == "torch-export" else _onnx)
    _check_card(folder / "README.md")
    folder.mkdir(parents=True, exist_ok=True)
    told = _described(run, module) | {"weights": weights, "licence": licence}
    described = (json.dumps(told, indent=1, sort_keys=True) + "\n").encode()
    made = {FILES[to]: data, "encoder.json": described, "README.md": b""}
    if run.facts.is_text:
        made["words.txt"] = "\n".join(run.facts.words).encode("utf-8", "surrogateescape") + b"\n"
    encoders = [file for file in FILES.values() if file in made or (folder / file).exists()]
    others = [file for file in encoders if file not in made]
    made["README.md"] = card_text(run, encoders, [*made, *others], client, licence).encode()
    for name, content in made.items():
        storage.write_bytes(folder / name, content, sync=False)
    return [folder / name for name in made]


def _check_card(path: Path) -> None:
    """Raise ConfigError where another README stands in the place of the model card."""
    if path.exists() and CARD not in path.read_text(encoding="utf-8", errors="replace"):
        raise ConfigError(
            f"{path} is there and is no model card of an earlier export, which would replace it. "
            "Name a folder of its own with --out."
        )


class _Description(TypedDict, total=False):
    """What is relied on in encoder.json."""

    weights: str
    licence: str | None


def _earlier(folder: Path, file: str, weights: str) -> dict[str, Any]:
    """Return what an earlier export in the folder says of the same encoder; `{}` without one.

    One card is for all the files of a folder. Raises ConfigError where another encoder's would
    stay beside it.
    """
    path = folder / "encoder.json"
    others = [name for name in FILES.values() if name != file and (folder / name).exists()]
    found: dict[str, Any] = {}
    if path.exists():
        with suppress(CheckpointError):  # not what an export writes
            found = records.read(path, _Description)
    if found.get("weights") == weights:
        return found
    if others:
        raise ConfigError(
            f"{folder} holds {' and '.join(others)} of another encoder, which the new model card "
            "would not describe. Name another folder with --out, or remove them."
        )
    return {}


def _described(run: TrainedRun, module: Encoder) -> dict[str, Any]:
    model, settings = run.model, run.config.settings["model"]
    told: dict[str, Any] = {
        "backbone": settings["backbone"],
        "dtype": model.dtype,
        "features": model.out_features,
        "inputs": ["support", "query"] if isinstance(module, TaskEncoder) else ["examples"],
        "kind": "text" if run.facts.is_text else "images",
        "norm_policy": model.norm_policy,
        "pixel_mean": model.pixel_mean,
        "pixel_std": model.pixel_std,
        "shape": list(model.shape),
    }
    if not run.facts.is_text:
        told["pixels"] = made_of(run)
    return told


def _weights(run: TrainedRun, module: Encoder) -> bytes:
    body, stats = module._read()
    flat = {**dict(tree.items(body, "body")), **dict(tree.items(stats, "stats"))}
    if run.model.table is not None:
        flat["table"] = run.model.table
    return save({name: leaf.contiguous().clone() for name, leaf in flat.items()})


def _checked(
    run: TrainedRun, module: Encoder, make: Callable[[Encoder, tuple[Tensor, ...]], Any]
) -> bytes:
    """Return the bytes of an exported program that answers as the run's own encoder does."""
    pair = isinstance(module, TaskEncoder)
    traced = (example(run.model, 3), example(run.model, 4, 1))[: 2 if pair else 1]
    asked = (example(run.model, 5, 2), example(run.model, 7, 3))[: 2 if pair else 1]
    with torch.no_grad():
        data, answer = make(module, traced)
        wanted, found = _own_features(run, module, asked), answer(asked)
    for a, b in zip(wanted, found, strict=True):
        gap = float((a - b).abs().max() / a.abs().max().clamp_min(1e-12))
        if not gap <= TOLERANCE:
            raise DataError(
                f"the exported encoder gives other features, by {gap:.2g} of the largest; "
                f"expected {TOLERANCE:g} at most. Nothing was written."
            )
    return bytes(data)


def _own_features(
    run: TrainedRun, module: Encoder, asked: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Return the features by the run's own model, kernels and all, in full precision."""
    model = replace(run.model, bf16=False)
    body, stats = module._read()
    first, then = test_modes(model)
    if len(asked) == 1:
        return (model.features({"body": body}, stats, asked[0], then)[0],)
    support, seen = model.features({"body": body}, {}, asked[0], first)
    return support, model.features({"body": body}, seen, asked[1], then)[0]


def _torch_export(module: Encoder, traced: tuple[Tensor, ...]) -> Any:
    program = torch.export.export(module, traced, dynamic_shapes=_dynamic(module))
    out = BytesIO()
    torch.export.save(program, out)
    loaded = torch.export.load(BytesIO(out.getvalue())).module()
    return out.getvalue(), lambda asked: _tuple(loaded(*asked))


def _onnx(module: Encoder, traced: tuple[Tensor, ...]) -> Any:
    missing = [
        name for name in ("onnx", "onnxscript", "onnxruntime") if not importlib.util.find_spec(name)
    ]
    if missing:
        raise ConfigError(
            f"--to onnx needs {' and '.join(missing)}. Install the extra: pip install "
            "'fedshot[onnx]'."
        )
    import onnxruntime

    names = list(_dynamic(module))
    with warnings.catch_warnings(), _quiet("torch.onnx._internal.exporter._registration"):
        warnings.simplefilter("ignore")  # the exporter's, of its own deprecations
        program = torch.onnx.export(
            module,
            traced,
            dynamo=True,
            verbose=False,
            dynamic_shapes=_dynamic(module),
            input_names=names,
            output_names=["features"] if len(names) == 1 else ["support_features", "features"],
        )
    assert program is not None
    data = program.model_proto.SerializeToString()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors: a loop's weights that it does not use are none
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])

    def answer(asked: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        fed = {name: x.numpy() for name, x in zip(names, asked, strict=True)}
        return tuple(torch.from_numpy(out) for out in session.run(None, fed))

    return data, answer


@contextmanager
def _quiet(logger: str) -> Iterator[None]:
    """Keep a logger from telling which packages are not there."""
    log = logging.getLogger(logger)
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _dynamic(module: Encoder) -> dict[str, Any]:
    names = ("support", "query") if isinstance(module, TaskEncoder) else ("examples",)
    return {name: {0: torch.export.Dim(f"n_{name}", min=2)} for name in names}


def _tuple(found: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)
