"""Export the encoder of a run as weights, a torch program or ONNX, with a model card.

The encoder maps examples to features. Methods that compare class means need nothing else; methods
that adapt by gradient steps start from the encoder's weights.
"""

from __future__ import annotations

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
from fedshot.core.extras import require
from fedshot.learners.learner import test_modes
from fedshot.nn.models.module_backbone import ModuleBackbone
from fedshot.use.card import CARD, card_text, preprocessing
from fedshot.use.encoder import (
    Encoder,
    ImageEncoder,
    TaskEncoder,
    encoder_module,
    encoder_of,
    example,
    frozen_module,
)
from fedshot.use.trained import TrainedRun

Format = Literal["safetensors", "torch-export", "onnx"]
FILES: dict[str, str] = {
    "safetensors": "encoder.safetensors",
    "torch-export": "encoder.pt2",
    "onnx": "encoder.onnx",
}
TOLERANCE = 1e-5  # maximum difference of features, relative to the largest feature


def export(
    run: TrainedRun,
    to: Format,
    folder: Path,
    *,
    client: int | str | None = None,
    licence: str | None = None,
) -> list[Path]:
    """Write the encoder of the chosen round, its description and a model card; return the files.

    Args:
        run: the run.
        to: format: "safetensors", the weights and statistics by name; "torch-export", a program
            for `torch.export.load`; "onnx", which needs the extra `onnx`.
        folder: output folder, created if missing.
        client: number or name of the client whose encoder to export, for methods whose clients
            keep encoders.
        licence: licence of the training data, stated in the model card.

    Raises:
        ConfigError: there is no single encoder, or a package is missing.
        DataError: the features of the exported program differ from the run's.
    """
    check_kind("run", run, TrainedRun, "Open one with TrainedRun(folder).")
    check_word("to", to, FILES)
    folder = as_path("folder", folder)
    number = None if client is None else run.client_number(client)
    body, stats = encoder_of(run, number)
    weights = tree.digest({"body": body, "stats": stats})
    if run.config.model.encoder is not None:
        weights += f" {run.config.model.encoder.digest}"
    if isinstance(run.model.backbone, ModuleBackbone):
        weights += f" {run.model.backbone.digest}"
    before = _earlier(folder, FILES[to], weights)
    licence = licence or before.get("licence")
    module = encoder_module(run.model, body, stats, frozen_module(run))
    if to == "safetensors":
        data = _weights(run, module)
    else:
        data = _checked(run, module, _torch_export if to == "torch-export" else _onnx)
    _check_card(folder / "README.md")
    folder.mkdir(parents=True, exist_ok=True)
    description = _description(run, module) | {"weights": weights, "licence": licence}
    text = json.dumps(description, indent=1, sort_keys=True) + "\n"
    files = {FILES[to]: data, "encoder.json": text.encode(), "README.md": b""}
    if run.dataset_info.is_text:
        files["words.txt"] = (
            "\n".join(run.dataset_info.words).encode("utf-8", "surrogateescape") + b"\n"
        )
    encoders = [file for file in FILES.values() if file in files or (folder / file).exists()]
    others = [file for file in encoders if file not in files]
    files["README.md"] = card_text(run, encoders, [*files, *others], number, licence).encode()
    for name, content in files.items():
        storage.write_bytes(folder / name, content, sync=False)
    return [folder / name for name in files]


def _check_card(path: Path) -> None:
    """Raise ConfigError if the model card would replace another README."""
    if path.exists() and CARD not in path.read_text(encoding="utf-8", errors="replace"):
        raise ConfigError(
            f"{path} exists and is not the model card of an earlier export. Choose another folder."
        )


class _Description(TypedDict, total=False):
    weights: str
    licence: str | None


def _earlier(folder: Path, file: str, weights: str) -> dict[str, Any]:
    """Return the description that an earlier export of the same encoder left, or `{}`.

    `file` is the file to write now, `weights` the hash of the encoder's weights. Raises ConfigError
    if the folder contains files of another encoder.
    """
    path = folder / "encoder.json"
    others = [name for name in FILES.values() if name != file and (folder / name).exists()]
    found: dict[str, Any] = {}
    if path.exists():
        with suppress(CheckpointError):  # a file of another program
            found = records.read(path, _Description)
    if found.get("weights") == weights:
        return found
    if others:
        raise ConfigError(
            f"{folder} holds {' and '.join(others)} of another encoder, which the new model card "
            "would not describe. Choose another folder, or remove them."
        )
    return {}


def _description(run: TrainedRun, module: Encoder) -> dict[str, Any]:
    model, settings = run.model, run.config.settings["model"]
    found: dict[str, Any] = {
        "backbone": settings["backbone"],
        "dtype": model.dtype,
        "features": model.out_features,
        "inputs": ["support", "query"] if isinstance(module, TaskEncoder) else ["examples"],
        "kind": run.dataset_info.kind,
        "norm_policy": model.norm_policy,
        "pixel_mean": model.pixel_mean,
        "pixel_std": model.pixel_std,
        "shape": list(model.shape),
    }
    if isinstance(module, ImageEncoder):
        found |= {"kind": "images", "shape": list(run.dataset_info.original or ())}
    if "encoder" in settings:
        found["encoder"] = settings["encoder"]
    if found["kind"] == "images":
        found["pixels"] = preprocessing(run)
    return found


def _weights(run: TrainedRun, module: Encoder) -> bytes:
    body, stats = module._read()
    flat = {**dict(tree.items(body, "body")), **dict(tree.items(stats, "stats"))}
    if run.model.table is not None:
        flat["table"] = run.model.table
    if isinstance(module, ImageEncoder):
        flat |= {f"encoder/{name}": leaf for name, leaf in module.frozen.state_dict().items()}
    if isinstance(run.model.backbone, ModuleBackbone):
        constants = run.model.backbone.net.constants
        flat |= {f"constants/{name}": leaf for name, leaf in constants.items()}
    return save({name: leaf.contiguous().clone() for name, leaf in flat.items()})


def _checked(
    run: TrainedRun, module: Encoder, make: Callable[[Encoder, tuple[Tensor, ...]], Any]
) -> bytes:
    """Return the bytes of the program that `make` exports.

    Raises DataError if its features differ from those of the run's own model.
    """
    n_inputs = 2 if isinstance(module, TaskEncoder) else 1
    images = run.dataset_info.original if isinstance(module, ImageEncoder) else None
    traced, inputs = (
        tuple(example(run.model, n, seed, images) for n, seed in sizes[:n_inputs])
        for sizes in (((3, 0), (4, 1)), ((5, 2), (7, 3)))
    )
    with torch.no_grad():
        data, program = make(module, traced)
        wanted, found = _own_features(run, module, inputs), program(inputs)
    for a, b in zip(wanted, found, strict=True):
        gap = float((a - b).abs().max() / a.abs().max().clamp_min(1e-12))
        if not gap <= TOLERANCE:
            raise DataError(
                f"the features of the exported encoder differ from the run's by {gap:.2g} of the "
                f"largest feature; expected at most {TOLERANCE:g}. Nothing was written; export to "
                "another format."
            )
    return bytes(data)


def _own_features(
    run: TrainedRun, module: Encoder, inputs: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Return the features of the run's own model, with compiled kernels, in float32."""
    model = replace(run.model, bf16=False)
    body, stats = module._read()
    first, then = test_modes(model)
    if isinstance(module, ImageEncoder):
        encoder, images = run.encoder, inputs[0].numpy()
        inputs = (torch.from_numpy(encoder.forward(encoder.network.prepare(images), len(images))),)
    if len(inputs) == 1:
        return (model.features({"body": body}, stats, inputs[0], then)[0],)
    support, stats = model.features({"body": body}, {}, inputs[0], first)
    return support, model.features({"body": body}, stats, inputs[1], then)[0]


def _torch_export(module: Encoder, traced: tuple[Tensor, ...]) -> Any:
    program = torch.export.export(module, traced, dynamic_shapes=_dynamic(module))
    out = BytesIO()
    torch.export.save(program, out)
    loaded = torch.export.load(BytesIO(out.getvalue())).module()

    def features(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        found = loaded(*inputs)
        return found if isinstance(found, tuple) else (found,)

    return out.getvalue(), features


def _onnx(module: Encoder, traced: tuple[Tensor, ...]) -> Any:
    require("onnx", "an export to ONNX")
    import onnxruntime

    names = list(_dynamic(module))
    with warnings.catch_warnings(), _quiet("torch.onnx._internal.exporter._registration"):
        warnings.simplefilter("ignore")  # the exporter's own deprecations
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
    options.log_severity_level = 3  # only errors; unused weights of a loop would be warnings
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])

    def features(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        feed = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
        return tuple(torch.from_numpy(out) for out in session.run(None, feed))

    return data, features


@contextmanager
def _quiet(logger: str) -> Iterator[None]:
    """Suppress warnings of a logger, such as those on missing optional packages."""
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
