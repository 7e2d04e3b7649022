"""The model card: what a person should know of a model before they use it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fedshot import __version__
from fedshot.core import records
from fedshot.data.example_inputs import Pictures
from fedshot.data.sources.licences import LICENCES, UNKNOWN, VECTORS
from fedshot.runs.run_folder import RESULT
from fedshot.runs.test_protocol import ResultJson, TestProtocol
from fedshot.use.calibration import stored
from fedshot.use.trained import TrainedRun

CARD = "Exported by fedshot"  # by which a card is known
_MANY = 40  # names of classes that a card lists


def card_facts(run: TrainedRun) -> dict[str, str]:
    """Return what answers, in words, by name."""
    settings, facts = run.config.settings, run.facts
    test = result_of(run)
    return {
        "run": settings["name"],
        "method": f"{run.method.name}, {settings['model']['backbone']['name']}",
        "round": f"{run.round} of {run.trained_rounds} trained",
        "trained on": f"{facts.examples:,} examples of {len(facts.base)} classes of {facts.name}, "
        f"at {len(facts.clients)} clients",
        "test": _accuracy(run, test) if test else "not tested yet",
        **({"not honest": "; ".join(marks)} if (marks := tested_of(run).marks) else {}),
    }


def result_of(run: TrainedRun) -> dict[str, Any] | None:
    """Return result.json where it is of the round that answers; else None.

    Raises CheckpointError when it is damaged.
    """
    path = run.folder / RESULT
    if not path.exists():
        return None
    found: dict[str, Any] = records.read(
        path, ResultJson, f"`fedshot resume {run.folder}` writes it anew"
    )
    return found if found.get("round") == run.round else None


def tested_of(run: TrainedRun) -> TestProtocol:
    """Return what the run's test asks, whether it was sat or not."""
    told = TestProtocol.of(run.config.settings, result_of(run))
    return replace(told, own=not run.facts.novel) if told.own is None else told


def card_text(
    run: TrainedRun,
    encoders: Sequence[str],
    files: Sequence[str],
    client: int | None,
    licence: str | None,
) -> str:
    """Return the card of an export as Markdown: of an encoder in one format or several."""
    settings, facts = run.config.settings, run.facts
    lines = [
        f"# {code(settings['name'])}: an encoder for few-shot recognition",
        "",
        f"Turns {'texts' if facts.is_text else 'images'} into features by which classes are told "
        f"apart from a few examples each. {CARD} {__version__}; the files: "
        f"{', '.join(files)}.",
        *(f"\n**{mark}.**" for mark in tested_of(run).marks),
        "",
        "## Data",
        "",
        f"- Data set: {code(facts.name)} (source `{settings['data']['name']}`), content hash "
        f"`{facts.digest[:16]}`.",
        f"- Licence of the data: {licence or _licence(run)}.",
        f"- Trained on {facts.examples:,} examples of {len(facts.base)} base classes, which stayed "
        f"with {len(facts.clients)} clients (partition "
        f"`{settings['partition']['name']}`).",
        f"- Base classes: {_names(run, facts.base)}.",
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


def _parts(run: TrainedRun) -> list[str]:
    """Return what chose the round and what tested, which differs with split and options."""
    facts, told = run.facts, tested_of(run)
    by = (result_of(run) or {}).get("chosen_by", run.config.run.choose)
    unasked = not told.own and not facts.validation
    if by in ("best_on_test_classes", "test classes"):
        chosen = "Round: chosen by the test itself, so the accuracy below is NOT HONEST"
    elif by.startswith("last") or unasked:
        chosen = "Round: the last one"
    elif told.own:
        chosen = "Round: chosen by other images of the clients' own classes, set aside for it"
    elif told.users:
        chosen = "Round: chosen by users who neither train nor test"
    else:
        chosen = "Round: chosen by the validation classes"
    lines = [f"- {chosen}."]
    if told.own:
        return [*lines, "- Tested on images of the clients' own classes that were set aside."]
    kind = "Classes of the users who" if told.users else "Novel classes, which"
    other = "Classes of the users for validation" if told.users else "Validation classes"
    return [
        *lines,
        f"- {other}: {_names(run, facts.validation)}.",
        f"- {kind} tested: {_names(run, facts.novel)}.",
    ]


def _accuracy(run: TrainedRun, result: dict[str, Any]) -> str:
    test, told = result["test"], tested_of(run)
    marks = ["transductive"] if test.get("transductive") else []
    return (
        f"{100 * test['accuracy']:.2f} ± {100 * test['interval']:.2f} % "
        f"({'; '.join([told.on(test['episodes']), *marks, *told.marks])})"
    )


def _results(run: TrainedRun) -> list[str]:
    result = result_of(run)
    lines = ["- Not tested at this round."]
    if result:
        test, unit = result["test"], tested_of(run).unit
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
                f"calibration error {100 * one.ece_before:.1f} % as it comes, "
                f"{100 * one.ece_after:.1f} % after dividing the logits by {one.temperature:.4g}."
            )
    return lines


def _use(run: TrainedRun, encoders: Sequence[str]) -> list[str]:
    model = run.model
    shape = ", ".join(map(str, model.shape))
    if run.facts.is_text:
        takes = (
            f"int32 [n, {model.shape[0]}]: word numbers, 0 for padding after the words, 1 for "
            "a word that is not known, and the line of words.txt plus 1 for others (the first line "
            "is word 2)"
        )
    else:
        takes = (
            f"uint8 [n, {shape}] (height, width, channels), {made_of(run)}; the scaling, "
            f"(x / 255 - {model.pixel_mean:g}) / {model.pixel_std:g}, is inside"
        )
    where = "`body/...` are the weights and `stats/...` the statistics of batch norm by layer"
    lines = [
        f"- `{file}`: {where}; encoder.json says which layers."
        if file == "encoder.safetensors"
        else f"- `{file}`: takes {takes}; gives {model.dtype} [n, {model.out_features}]."
        for file in encoders
    ]
    if model.by_support and len(model.backbone.norm_policies) > 1:
        lines.append(
            "- Batch norm goes by the statistics of the support: pass support and queries together "
            "(inputs `support`, `query`)."
        )
    if run.model.bf16:
        lines.append("- Trained in bfloat16, exported in float32: features differ by its rounding.")
    return lines


_AT_ITS_ASPECT = {
    "crop": " at its aspect, the middle of it",
    "pad": " at its aspect, with black added",
}


def made_of(run: TrainedRun) -> str:
    """Return how a picture becomes pixels of the run's data set, in words."""
    height, width, channels = run.model.shape
    pictures = Pictures.like(run.config.data, (height, width, channels))
    if pictures.ink:
        return "ink 255 on 0, averaged down from the drawing"
    how = _AT_ITS_ASPECT.get(pictures.aspect, "")
    return f"{'grey' if channels == 1 else 'colour'}, upright, scaled bilinearly{how}"


def _limits(run: TrainedRun) -> list[str]:
    lines = [
        "- The accuracy is that of this test alone. Other classes, other cameras, other languages "
        "or more classes at once can do much worse; measure on your own.",
        "- Without a threshold every example is given one of the classes, also what is none of "
        "them.",
        "- Features hold something of the images they are made of. Federated averaging alone is no "
        "differential privacy: what clients trained on may be inferred in part.",
    ]
    if run.method.traits.adapts:
        lines.append(
            "- The method adapts by gradient steps at test, which this file does not do: class "
            "means of its features answer otherwise than the run did."
        )
    if run.facts.is_text:
        lines.append(
            f"- Knows {len(run.facts.words):,} words, those of the data set that have a vector."
        )
    return lines


def _licence(run: TrainedRun) -> str:
    known = LICENCES.get(run.config.settings["data"]["name"], UNKNOWN)
    return f"{known}; {VECTORS}" if run.facts.is_text else known


def _names(run: TrainedRun, classes: Sequence[int]) -> str:
    if not classes:
        return "none"
    names = [code(run.facts.class_names[c]) for c in classes]
    more = f" and {len(names) - _MANY} more" if len(names) > _MANY else ""
    return f"{', '.join(names[:_MANY])}{more}"


def _options(settings: dict[str, Any]) -> str:
    return code(json.dumps(settings, ensure_ascii=False))


def code(text: object) -> str:
    """Return text as code in Markdown, in which nothing is obeyed: a longer fence, on one line."""
    line = " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
    fence = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    padded = f" {line} " if line.startswith("`") or line.endswith("`") else line
    return f"{fence}{padded}{fence}" if line else "(no name)"
