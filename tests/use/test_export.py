"""Exports give the features of the run: read back by torch, by safetensors, and by ONNX Runtime."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from covering import slow
from fedshot.config.registry import kind_options
from fedshot.core import tree
from fedshot.core.errors import ConfigError, DataError
from fedshot.core.seeds import Key
from fedshot.learners.learner import EvalEpisode, episode_features
from fedshot.methods.personal.base_class_method import AmongBaseClasses
from fedshot.methods.registry import METHODS
from fedshot.nn.models.backbones import BACKBONES
from fedshot.nn.models.mode import Mode
from fedshot.nn.models.model import Model
from fedshot.nn.models.recurrent import GRU, BiLSTM
from fedshot.runs.experiment import Experiment
from fedshot.use.card import card_text
from fedshot.use.encoder import encoder_module, encoder_of, example
from fedshot.use.exporting import _earlier, export
from fedshot.use.trained import TrainedRun
from system.runs import CHOOSING, OWN, finished, merged

from .test_inputs import texts  # noqa: F401  (a fixture)

SHORT: dict[str, Any] = {"run": {"rounds": 1}}
PROTO: dict[str, Any] = {"method": {"name": "fl_proto", "local_steps": 2}}
MAML: dict[str, Any] = {
    "method": {"name": "fedfsl_naive", "local_steps": 1},
    "model": {"head": {"name": "linear", "way": 5}},
}
CONV: dict[str, Any] = {"model": {"backbone": {"name": "conv4", "width": 4}}}
RESNET: dict[str, Any] = {"model": {"backbone": {"name": "resnet12", "widths": [4, 4, 8, 8]}}}
TRANSDUCTIVE: dict[str, Any] = {"model": {"norm_policy": "transductive"}}
FEW = {"local_steps": 1, "adversarial_steps": 1, "episodes": 1}
KINDS: dict[str, tuple[dict[str, Any], ...]] = {
    "mlp": (PROTO,),
    "conv4": (PROTO, CONV),
    "conv4, support": (MAML, CONV),
    "conv4, transductive": (PROTO, CONV, TRANSDUCTIVE),
    "resnet12": (PROTO, RESNET),
}
EACH = [kind if kind == "conv4" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]


def by_run(run: TrainedRun, asked: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the features as the run's own tests have them, compiled kernels and all."""
    body, stats = encoder_of(run)
    with torch.no_grad():
        if len(asked) == 2:
            eval_episode = EvalEpisode(asked[0], torch.zeros(0), asked[1], torch.zeros(0))
            return episode_features(run.model, {"body": body}, stats, eval_episode)
        norm: Any = "batch" if run.model.norm_policy == "transductive" else "given"
        return (run.model.features({"body": body}, stats, asked[0], Mode(norm=norm))[0],)


def asked_of(run: TrainedRun, folder: Path) -> tuple[Tensor, ...]:
    """Return examples, of numbers that were not traced, for each input that is described."""
    inputs = json.loads((folder / "encoder.json").read_text(encoding="utf-8"))["inputs"]
    return tuple(example(run.model, 6 + 5 * i, 10 + i) for i in range(len(inputs)))


def equal(run: TrainedRun, asked: tuple[Tensor, ...], found: tuple[Tensor, ...]) -> None:
    wanted = by_run(run, asked)
    assert len(wanted) == len(found)
    for a, b in zip(wanted, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5 * float(a.abs().max()))


@pytest.mark.parametrize("kind", EACH)
def test_a_torch_program_gives_the_runs_features(kind: str, tmp_path: Path) -> None:
    finished(tmp_path / "run", *KINDS[kind], SHORT)
    run = TrainedRun(tmp_path / "run")
    export(run, "torch-export", tmp_path / "out")
    program = torch.export.load(tmp_path / "out" / "encoder.pt2").module()
    asked = asked_of(run, tmp_path / "out")
    found = program(*asked)
    equal(run, asked, found if isinstance(found, tuple) else (found,))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_onnx_runtime_gives_the_runs_features(kind: str, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    finished(tmp_path / "run", *KINDS[kind], SHORT)
    run = TrainedRun(tmp_path / "run")
    export(run, "onnx", tmp_path / "out")
    session = runtime.InferenceSession(tmp_path / "out" / "encoder.onnx")
    asked = asked_of(run, tmp_path / "out")
    names = [one.name for one in session.get_inputs()]
    found = session.run(None, dict(zip(names, (x.numpy() for x in asked), strict=True)))
    equal(run, asked, tuple(torch.from_numpy(one) for one in found))


@pytest.mark.parametrize("to", ["safetensors", *slow("torch-export", "onnx")])
def test_texts_are_exported_with_their_words(
    to: Any, texts: tuple[Experiment, list[str]], tmp_path: Path  # noqa: F811
) -> None:  # fmt: skip
    if to == "onnx":
        onnxruntime = pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    run = TrainedRun(texts[0].folder)
    made = export(run, to, tmp_path / "out")
    assert {path.name for path in made} >= {"encoder.json", "words.txt", "README.md"}
    words = (tmp_path / "out" / "words.txt").read_text(encoding="utf-8").split()
    assert tuple(words) == run.dataset_info.words
    if to == "onnx":
        session = onnxruntime.InferenceSession(tmp_path / "out" / "encoder.onnx")
        x = example(run.model, 9, 10)
        (found,) = session.run(None, {"examples": x.numpy()})
        equal(run, (x,), (torch.from_numpy(found),))


@pytest.mark.slow
@pytest.mark.parametrize("net", [GRU(4), BiLSTM(4)])
def test_the_program_of_a_recurrent_net_does_not_grow_with_the_texts(net: Any) -> None:
    """One that has every word apart takes minutes to trace."""
    model = Model(net, None, (200, 3), table=torch.randn(9, 3, generator=Key(0).torch()))
    params, stats = model.init(Key(1))
    module = encoder_module(model, params["body"], stats)
    n = {"examples": {0: torch.export.Dim("n", min=2)}}
    with torch.no_grad():
        program = torch.export.export(module, (example(model, 3),), dynamic_shapes=n)
        x = example(model, 7, 1)
        found, wanted = program.module()(x), model.features(params, stats, x, Mode())[0]
    assert len(program.graph.nodes) < 100
    torch.testing.assert_close(found, wanted)


def test_weights_and_description_make_the_encoder_again(tmp_path: Path) -> None:
    """By the names in the files alone, as a stranger would."""
    finished(tmp_path / "run", PROTO, CONV, SHORT)
    run = TrainedRun(tmp_path / "run")
    export(run, "safetensors", tmp_path / "out")
    told = json.loads((tmp_path / "out" / "encoder.json").read_text(encoding="utf-8"))
    flat = load_file(tmp_path / "out" / "encoder.safetensors")
    options = {k: v for k, v in told["backbone"].items() if k != "name"}
    backbone = BACKBONES[told["backbone"]["name"]](**options)
    model = Model(backbone, None, tuple(told["shape"]), told["norm_policy"], told["dtype"])
    parts: dict[str, dict[str, dict[str, Tensor]]] = {"body": {}, "stats": {}}
    for path, leaf in flat.items():
        part, layer, name = path.split("/")
        parts[part].setdefault(layer, {})[name] = leaf
    x = example(model, 5)
    with torch.no_grad():
        found, _ = model.features({"body": parts["body"]}, parts["stats"], x, Mode())
    assert torch.equal(found, by_run(run, (x,))[0])


# Methods whose only encoders are their clients'.
THEIRS = {"fsl_local", "pfedfsl", "fedfomo", "heur_fedamp", "fedproto"}
THREE = {"f2l", "fedmeta", "pfedfsl"}  # of a state each in its own form


@pytest.mark.parametrize(
    "name",
    ["f2l", "fedmeta", "pfedfsl", *slow(*sorted(METHODS.keys() - {"f2l", "fedmeta", "pfedfsl"}))],
)
def test_every_methods_encoder_is_found(name: str, tmp_path: Path) -> None:
    """Whatever a method calls its state, one body of the backbone's form is in it, and trained."""
    valid = {option.path for option in kind_options("method", name)}
    short = {k: v for k, v in FEW.items() if f"method.{k}" in valid}
    inner = {"inner": {"steps": 1, "test_steps": 1}} if "method.inner.steps" in valid else {}
    method = {"method": {"name": name, **short, **inner}}
    head: dict[str, Any] = {"model": {"head": {"name": "linear", "way": 5}}}
    two = {"run": {"cohort": 2}, "test": {"episodes": 2}}
    own = OWN if issubclass(METHODS[name], AmongBaseClasses) else {}
    made = finished(tmp_path / "run", merged(method, head, own), CONV, SHORT, two)
    run = TrainedRun(tmp_path / "run")
    client = None
    if name in THEIRS:
        with pytest.raises(ConfigError, match=r"no single encoder.*Choose a client with --client"):
            encoder_of(run)
        client = next(c for c in made.prepared.clients if _trained(run, c))
    body, stats = encoder_of(run, client)
    first, first_stats = run.model.init(made.prepared.key.at("init"))
    assert tree.difference(first["body"], body) is None
    assert tree.difference(first_stats, stats) is None
    moved = [not torch.equal(a, b) for a, b in zip(tree.leaves(first), tree.leaves(body))]  # noqa: B905
    untrained = {"frl_fedavg", "fedncm", "fedcgs", "fed3r"}  # afresh with every group; sums alone
    assert any(moved) != (name in untrained)


def _trained(run: TrainedRun, client: int) -> bool:
    try:
        run.client_number(client)
    except ConfigError:
        return False
    return True


@pytest.mark.slow
def test_meta_sgd_exports_its_weights_and_not_its_step_sizes(tmp_path: Path) -> None:
    options = {"method": {"name": "fedmeta", "learned_steps": True}}
    finished(tmp_path / "run", merged(options, {"model": MAML["model"]}), CONV, SHORT)
    run = TrainedRun(tmp_path / "run")
    body, _ = encoder_of(run)
    assert torch.equal(
        body["conv1"]["weight"], run.server.theta["start"]["body"]["conv1"]["weight"]
    )


def test_the_card_tells_what_the_run_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = finished(tmp_path / "run", PROTO, CHOOSING, SHORT)
    result = made.result()
    run = TrainedRun(tmp_path / "run")
    export(run, "safetensors", tmp_path / "out", licence="CC0, ours")
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert f"{result} (20 2-way 1-shot test episodes of classes that no client trained on)" in card
    for words in ("CC0, ours", "Base classes: `0`, `1`, `2`, `3`, `4`.", "`fl_proto`", "## Limits"):
        assert words in card
    assert str(tmp_path) not in card
    monkeypatch.setattr("fedshot.use.card.LICENCES", {})
    export(run, "safetensors", tmp_path / "unknown")
    card = (tmp_path / "unknown" / "README.md").read_text(encoding="utf-8")
    assert "state its licence when you export." in card, "in Python and on the command line alike"


@pytest.mark.slow
def test_a_program_is_compared_with_the_runs_own_encoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with the rewritten copy that it was made from, which may be wrong itself."""
    finished(tmp_path / "run", PROTO, SHORT)
    run = TrainedRun(tmp_path / "run")
    monkeypatch.setattr(
        "fedshot.use.encoder.traceable", lambda model: replace(model, pixel_mean=0.9)
    )
    with pytest.raises(DataError, match="features of the exported encoder differ"):
        export(run, "torch-export", tmp_path / "out")


def test_a_card_obeys_nothing_that_names_hold(tmp_path: Path) -> None:
    finished(tmp_path / "run", PROTO, SHORT)
    run = TrainedRun(tmp_path / "run")
    names = ("[a](http://x)", "<img>`b``", "c\n# d", *run.dataset_info.class_names[3:])
    run.dataset_info = replace(run.dataset_info, class_names=names)
    card = card_text(run, ["encoder.safetensors"], [], None, None)
    assert "``` <img>`b`` ```" in card
    assert "`[a](http://x)`" in card
    assert "`c # d`" in card
    assert "\n# d" not in card
    assert "simulated" not in card
    assert f"{len(run.dataset_info.clients)} clients" in card


def test_a_program_that_answers_otherwise_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished(tmp_path / "run", PROTO, SHORT)
    run = TrainedRun(tmp_path / "run")
    monkeypatch.setattr(
        "fedshot.use.exporting._torch_export",
        lambda module, _: (b"", lambda asked: (module(*asked) * 1.001,)),
    )
    with pytest.raises(DataError, match=r"differ from the run's by 0\.001 of the largest"):
        export(run, "torch-export", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_one_card_tells_of_all_exports_of_an_encoder_and_of_no_other(tmp_path: Path) -> None:
    made = finished(tmp_path / "run", {"method": {"name": "fsl_local", "local_steps": 1}}, SHORT)
    run, folder = TrainedRun(tmp_path / "run"), tmp_path / "out"
    one, other = [c for c in made.prepared.clients if _trained(run, c)][:2]
    export(run, "safetensors", folder, client=one, licence="CC0, ours")
    export(run, "torch-export", folder, client=one)
    card = (folder / "README.md").read_text(encoding="utf-8")
    for words in ("- `encoder.safetensors`: `body/", "- `encoder.pt2`: takes", "CC0, ours"):
        assert words in card
    with pytest.raises(
        ConfigError, match=r"holds encoder\.safetensors of another encoder.*another folder"
    ):
        export(run, "torch-export", folder, client=other)
    assert (folder / "README.md").read_text(encoding="utf-8") == card
    (folder / "encoder.safetensors").unlink()
    export(run, "torch-export", folder, client=other)  # nothing of the first is left
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert f"the encoder of client {other}" in card
    assert "CC0, ours" not in card


def test_a_readme_that_is_no_card_stays(tmp_path: Path) -> None:
    finished(tmp_path / "run", *KINDS["conv4"], SHORT)
    run, project = TrainedRun(tmp_path / "run"), tmp_path / "project"
    project.mkdir()
    (project / "README.md").write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"README.md exists and is not the model card"):
        export(run, "safetensors", project)
    assert [path.name for path in project.iterdir()] == ["README.md"]
    assert (project / "README.md").read_text(encoding="utf-8") == "mine"
    for _ in range(2):  # an earlier card gives way
        export(run, "safetensors", tmp_path / "card")


@pytest.mark.parametrize(
    "text", ["[" * 10**5, "no JSON", "[]", '{"weights": "this", "licence": ["MIT"]}', "\xff"]
)
def test_what_an_earlier_export_says_is_read_within_bounds(tmp_path: Path, text: str) -> None:
    """The folder may come from anywhere: what no export writes counts for nothing."""
    (tmp_path / "encoder.json").write_text(text, encoding="latin-1")
    assert _earlier(tmp_path, "encoder.pt2", "this") == {}
    told = {"weights": "this", "licence": "MIT", "shape": [8, 8, 1]}
    (tmp_path / "encoder.json").write_text(json.dumps(told), encoding="utf-8")
    assert _earlier(tmp_path, "encoder.pt2", "this") == told
    assert _earlier(tmp_path, "encoder.pt2", "another") == {}
