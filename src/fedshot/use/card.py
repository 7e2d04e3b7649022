"""The model card: what users should know about a model before they use it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fedshot import __version__
from fedshot.core import records
from fedshot.core.text import typed
from fedshot.data.example_inputs import Pictures
from fedshot.data.sources.publishers import LICENCES, NO_LICENCE, VECTORS
from fedshot.nn.models.module_backbone import ModuleBackbone
from fedshot.runs.dataset_info import DatasetInfo
from fedshot.runs.run_folder import RESULT
from fedshot.runs.test_protocol import ResultJson, TestProtocol
from fedshot.use.calibration import stored
from fedshot.use.encoder import frozen_module
from fedshot.use.trained import TrainedRun

CARD = "Exported by fedshot"  # text that identifies the card of an earlier export
_MAX_NAMES = 40  # maximum number of class names in a card


def card_facts(run: TrainedRun) -> dict[str, str]:
    """Return facts about the model as strings, keyed by name."""
    settings, info = run.config.settings, run.dataset_info
    test = result_of(run)
    return {
        "run": settings["name"],
        "method": f"{run.method.name}, {settings['model']['backbone']['name']}",
        "round": f"{run.round} of {run.trained_rounds} trained",
        "trained on": f"{_examples(info)} of {len(info.base)} classes of {info.name}, "
        f"at {len(info.clients)} clients",
        "test": _accuracy(run, test) if test else "not tested yet",
        **({"not honest": "; ".join(marks)} if (marks := protocol_of(run).marks) else {}),
    }


def result_of(run: TrainedRun) -> dict[str, Any] | None:
    """Return the content of result.json if it is about the chosen round, else None.

    Raises CheckpointError if the file is damaged.
    """
    path = run.folder / RESULT
    if not path.exists():
        return None
    found: dict[str, Any] = records.read(
        path, ResultJson, f"`fedshot resume {typed(run.folder)}` writes it again"
    )
    return found if found.get("round") == run.round else None


def protocol_of(run: TrainedRun) -> TestProtocol:
    """Return the protocol of the run's test, whether or not the run has been tested."""
    found = TestProtocol.of(run.config.settings, result_of(run))
    return replace(found, own=not run.dataset_info.novel) if found.own is None else found


def card_text(
    run: TrainedRun,
    encoders: Sequence[str],
    files: Sequence[str],
    client: int | None,
    licence: str | None,
) -> str:
    """Return the model card as Markdown.

    Args:
        run: the run.
        encoders: names of the encoder's files, one per format.
        files: names of all exported files.
        client: the client whose encoder was exported; None for the server's.
        licence: licence of the training data; None for the known one of the dataset.
    """
    settings, info = run.config.settings, run.dataset_info
    lines = [
        f"# {code(settings['name'])}: an encoder for few-shot recognition",
        "",
        f"Maps {'texts' if info.reads_text else 'images'} to features that separate classes, given "
        f"a few examples of each. {CARD} {__version__}; files: {', '.join(files)}.",
        *(f"\n**{mark}.**" for mark in protocol_of(run).marks),
        "",
        "## Data",
        "",
        f"- Data set: {code(info.name)} (source `{settings['data']['name']}`), content hash "
        f"`{info.digest[:16]}`.",
        f"- Licence of the data: {licence or _licence(run)}.",
        f"- Trained on {_examples(info)} of {len(info.base)} base classes, which stayed "
        f"with {len(info.clients)} clients (partition `{settings['partition']['name']}`).",
        f"- Base classes: {_names(run, info.base)}.",
        *_parts(run),
        "",
        "## Method",
        "",
        f"- `{run.method.name}`, options {_options(settings['method'])}.",
        f"- Backbone {_options(settings['model']['backbone'])}; round {run.round} of "
        f"{run.trained_rounds} trained, seed {settings['seed']}"
        + (f"; the encoder of client {client}" if client is not None else "")
        + ".",
        f"- Batch norm at test: {run.model.norm_policy}.",
        *_encoder(settings["model"]),
        "",
        "## Accuracy",
        "",
        *_results(run),
        "",
        "## Use",
        "",
        *_use(run, encoders),
        "",
        "## Limits",
        "",
        *_limits(run),
        "",
    ]
    return "\n".join(lines)


def _encoder(model: dict[str, Any]) -> list[str]:
    if "encoder" not in model:
        return []
    options = {key: value for key, value in model["encoder"].items() if key != "cache"}
    return [f"- Frozen encoder {_options(options)}; its features are the input."]


def _parts(run: TrainedRun) -> list[str]:
    """Return the lines on the data used to choose the round and on the data of the test."""
    info, protocol = run.dataset_info, protocol_of(run)
    by = (result_of(run) or {}).get("chosen_by", run.config.run.choose)
    if by in ("best_on_test_classes", "test classes"):
        chosen = "chosen by the test itself, so the accuracy below is NOT HONEST"
    elif by.startswith("last") or not (protocol.own or info.validation):
        chosen = "the last one"
    elif protocol.own:
        chosen = "chosen by held-out images of the clients' own classes"
    elif protocol.users:
        chosen = "chosen by users who neither train nor test"
    else:
        chosen = "chosen by the validation classes"
    lines = [f"- Round: {chosen}."]
    if protocol.own:
        return [*lines, "- Tested on other held-out images of the clients' own classes."]
    of_users = " of the users" if protocol.users else ""
    return [
        *lines,
        f"- Validation classes{of_users}: {_names(run, info.validation)}.",
        f"- {'Classes of the test users' if protocol.users else 'Novel classes, for the test'}: "
        f"{_names(run, info.novel)}.",
    ]


def _accuracy(run: TrainedRun, result: dict[str, Any]) -> str:
    test, protocol = result["test"], protocol_of(run)
    marks = [*(["transductive"] if test.get("transductive") else []), *protocol.marks]
    return (
        f"{100 * test['accuracy']:.2f} ± {100 * test['interval']:.2f} % "
        f"({'; '.join([protocol.on(test['episodes']), *marks])})"
    )


def _results(run: TrainedRun) -> list[str]:
    result = result_of(run)
    lines = ["- Not tested at this round."]
    if result:
        test, unit = result["test"], protocol_of(run).unit
        lines = [
            f"- {_accuracy(run, result)}, 95 % interval over {unit}s, one training seed; test "
            f"`{test['tasks'][:12]}`."
        ]
        if test.get("worst_tenth") is not None:
            lines.append(f"- The worst tenth of the clients: {100 * test['worst_tenth']:.2f} %.")
    for one in stored(run.folder):
        if one.round == run.round:
            lines.append(
                f"- Confidence ({one.way}-way {one.shot}-shot, validation classes): expected "
                f"calibration error {100 * one.ece_before:.1f} % before, "
                f"{100 * one.ece_after:.1f} % after dividing the logits by {one.temperature:.4g}."
            )
    return lines


def _use(run: TrainedRun, encoders: Sequence[str]) -> list[str]:
    model = run.model
    shape = ", ".join(map(str, model.shape))
    if run.dataset_info.is_text:
        takes = (
            f"int32 [n, {model.shape[0]}]: word numbers, 0 for padding after the words, 1 for "
            "an unknown word, and for others the line number in words.txt plus 1 (the first line "
            "is word 2)"
        )
    elif frozen_module(run) is not None:
        shape = ", ".join(map(str, run.dataset_info.original or ()))
        takes = (
            f"uint8 [n, {shape}] (height, width, channels), {preprocessing(run)}; the frozen "
            "encoder is in the program, and takes x / 255"
        )
    elif run.dataset_info.original is not None:
        takes = f"float [n, {shape}], the features of the frozen encoder, which is not in the file"
    elif run.dataset_info.kind == "features":
        takes = f"float [n, {shape}], the features on which the run was trained"
    else:
        takes = (
            f"uint8 [n, {shape}] (height, width, channels), {preprocessing(run)}; the program "
            f"scales pixels by (x / 255 - {model.pixel_mean:g}) / {model.pixel_std:g}"
        )
    where = "`body/...` are the weights and `stats/...` the statistics of batch norm by layer"
    if frozen_module(run) is not None:
        where += ", `encoder/...` the weights of the frozen encoder"
    if isinstance(model.backbone, ModuleBackbone):
        where += ", `constants/...` the tensors of the module that are not trained"
    lines = [
        f"- `{file}`: {where}; encoder.json describes the layers."
        if file == "encoder.safetensors"
        else f"- `{file}`: takes {takes}; gives {model.dtype} [n, {model.out_features}]."
        for file in encoders
    ]
    if model.by_support and len(model.backbone.norm_policies) > 1:
        lines.append(
            "- Batch norm uses the statistics of the support: pass support and queries together "
            "(inputs `support`, `query`)."
        )
    if run.model.bf16:
        lines.append("- Trained in bfloat16, exported in float32: features differ by rounding.")
    return lines


_ASPECTS = {
    "crop": " at its aspect ratio and cropped to the centre",
    "pad": " at its aspect ratio and padded with black",
}


def preprocessing(run: TrainedRun) -> str:
    """Return a phrase that describes how image files are converted to pixels in the run."""
    height, width, channels = run.dataset_info.original or run.model.shape
    pictures = Pictures.like(run.config.data, (height, width, channels))
    if pictures.ink:
        return "ink 255 on 0, averaged down from the drawing"
    aspect = _ASPECTS.get(pictures.aspect, "")
    return f"{'grey' if channels == 1 else 'colour'}, upright, scaled bilinearly{aspect}"


def _limits(run: TrainedRun) -> list[str]:
    spent = (result_of(run) or {}).get("privacy")
    lines = [
        "- The accuracy is that of this test. With other classes, cameras or languages, or with "
        "more classes at once, it can be much lower; measure it on your own data.",
        "- Without a threshold, every example is assigned to one of the classes, even if it "
        "belongs to none of them.",
        "- Features contain information about their images. Federated averaging alone gives no "
        "differential privacy: parts of the clients' training data may be inferred."
        if spent is None
        else f"- Trained with differential privacy of single {spent['level']}s: epsilon is "
        f"{spent['epsilon']:.3g} at delta {spent['delta']:g}.",
    ]
    if run.method.traits.adapts:
        lines.append(
            "- The method adapts by gradient steps at test, which this file does not do: "
            "predictions by class means of its features differ from the run's."
        )
    if run.dataset_info.is_text:
        lines.append(
            f"- Knows {len(run.dataset_info.words):,} words: those of the data set that have a "
            "vector."
        )
    return lines


def _licence(run: TrainedRun) -> str:
    known = LICENCES.get(run.config.settings["data"]["name"], NO_LICENCE)
    return f"{known}; {VECTORS}" if run.dataset_info.is_text else known


def _examples(info: DatasetInfo) -> str:
    return f"{info.examples:,} examples" if info.examples else "examples (number not known here)"


def _names(run: TrainedRun, classes: Sequence[int]) -> str:
    if not classes:
        return "none"
    names = [code(run.dataset_info.class_names[c]) for c in classes]
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"{', '.join(names[:_MAX_NAMES])}{more}"


def _options(settings: dict[str, Any]) -> str:
    return code(json.dumps(settings, ensure_ascii=False))


def code(text: object) -> str:
    """Return text as inline code in Markdown, fenced by more backticks than the text contains."""
    line = " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
    fence = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    padded = f" {line} " if line.startswith("`") or line.endswith("`") else line
    return f"{fence}{padded}{fence}" if line else "(no name)"
