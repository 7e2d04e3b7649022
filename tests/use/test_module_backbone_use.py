"""Uses of a run with a module as backbone: from Python, by the commands, and exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fedshot as fs
from data.encoders.test_module import SMALL, WORDS
from fedshot.cli.main import main
from fedshot.config.load import Config
from fedshot.core.errors import ConfigError
from fedshot.core.plugins import VARIABLE
from fedshot.data.sources.digits import Digits
from fedshot.nn.models.mode import Mode
from fedshot.runs.checkpoint import Checkpoints
from fedshot.runs.prepare import PreparedRun
from fedshot.use.exporting import export
from fedshot.use.trained import TrainedRun
from nn.models.user_nets import Conv4Module, SmallViT, conv4

from .image_folders import check_predictions, support_and_query

PROTO = {"name": "fl_proto", "local_steps": 1}
TRAINED = {key: value for key, value in SMALL.items() if key != "model"} | {"method": PROTO}
VIT: dict[str, Any] = {
    "name": "module", "factory": "nn.models.user_nets:vit", "args": {"dropout": 0.1},
    "tune": "head",
}  # fmt: skip


def last_hash(folder: Path) -> str:
    checkpoints = Checkpoints(folder / "checkpoints")
    return checkpoints.hash(checkpoints.rounds()[-1])


def test_a_module_from_python_is_trained_and_asked_for_again(tmp_path: Path) -> None:
    out, net = tmp_path / "run", Conv4Module()
    run = fs.train(TRAINED, backbone=net, out=out, progress=False)
    (key,) = (row["bytes"] for row in json.loads((out / "ledger.json").read_text())
              if (row["part"], row["direction"]) == ("theta", "up"))  # fmt: skip
    assert key == 3 * 4 * sum(leaf.numel() for leaf in net.parameters())
    x = Digits().load(None).pixels[:6]
    wanted = run.classifier().fit(x[:4], [0, 1, 0, 1]).predict_proba(x)
    again = fs.FewShotClassifier(out, backbone=conv4).fit(x[:4], [0, 1, 0, 1])
    np.testing.assert_array_equal(again.predict_proba(x), wanted)
    with pytest.raises(ConfigError, match=r"fedshot\.open_run\(folder, backbone=module\), or"):
        _ = fs.open_run(out).classifier()
    assert 0 <= fs.open_run(out, backbone=net).evaluate(episodes=4).accuracy <= 1
    with pytest.raises(ConfigError, match="another module than this run's"):
        fs.FewShotClassifier(out, backbone=Conv4Module(5)).fit(x[:4], [0, 1, 0, 1])
    with pytest.raises(ConfigError, match=r"a backbone was passed, and model.backbone is a MLP"):
        fs.train(SMALL, backbone=net, progress=False)


def test_code_that_a_configuration_names_is_not_run_unasked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = Config.of(TRAINED | {"model": {"backbone": VIT}})
    with pytest.raises(ConfigError, match=rf"model.backbone.factory .* set {VARIABLE}=nn.models"):
        config.model.build(Digits().load(None))  # as a node does when a server announces a run
    monkeypatch.setenv(VARIABLE, "nn.models.user_nets")
    assert config.model.build(Digits().load(None)).out_features == 6
    digest = PreparedRun(config).config.settings["model"]["backbone"]["digest"]
    other = {**VIT, "args": {"seed": 1}, "digest": digest}
    with pytest.raises(ConfigError, match="another module than this run's"):
        Config.of(TRAINED | {"model": {"backbone": other}}).model.build(Digits().load(None))


@pytest.mark.slow
def test_an_interrupted_run_goes_on_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "nn.models.user_nets")
    settings = TRAINED | {"model": {"backbone": VIT}}
    for name, rounds in (("whole", [2]), ("parts", [1, 2])):
        for n in rounds:
            fs.train(
                settings, out=tmp_path / name, rounds=n, name="run", resume=True, progress=False
            )
    assert last_hash(tmp_path / "whole") == last_hash(tmp_path / "parts")


@pytest.mark.slow
def test_the_commands_use_the_module_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxruntime", reason="the extra `onnx` is not installed")
    pytest.importorskip("peft", reason="the extra `encoders` is not installed")
    import onnxruntime

    monkeypatch.setenv(VARIABLE, "nn.models.user_nets")
    out = tmp_path / "run"
    backbone = VIT | {"tune": "lora", "rank": 2}
    fs.train(TRAINED | {"model": {"backbone": backbone}}, out=out, progress=False)
    paths = support_and_query(tmp_path)
    assert main(["evaluate", str(out), "--episodes", "5"]) == 0
    assert main(["calibrate", str(out), "--way", "2", "--episodes", "8"]) == 0
    assert main(["resume", str(out)]) == 0
    check_predictions(out, paths, capsys)
    assert main(["export", str(out), "--to", "onnx", "--out", str(tmp_path / "out")]) == 0
    session = onnxruntime.InferenceSession(tmp_path / "out" / "encoder.onnx")
    (features,) = session.run(None, {"examples": Digits().load(None).pixels[:5]})
    assert features.shape == (5, 6)
    monkeypatch.delenv(VARIABLE)
    assert main(["predict", str(out), *paths]) == 2
    assert f"set {VARIABLE}=nn.models.user_nets" in capsys.readouterr().err


@pytest.mark.parametrize(
    "tune", ["head", *(pytest.param(tune, marks=pytest.mark.slow) for tune in ("all", "none"))]
)
def test_exported_files_hold_the_whole_module(tune: str, tmp_path: Path) -> None:
    method = "fedncm" if tune == "none" else PROTO
    net = SmallViT()
    settings = TRAINED | {"model": {"backbone": {"tune": tune}}, "method": method}
    fs.train(settings, backbone=net, out=tmp_path / "run", progress=False)
    run = TrainedRun(tmp_path / "run", backbone=net)
    export(run, "safetensors", tmp_path / "out")
    held = load_file(tmp_path / "out" / "encoder.safetensors")
    parts = {path.partition("/")[2].replace("/", "."): leaf for path, leaf in held.items()}
    assert parts.keys() == net.state_dict().keys()
    net.load_state_dict(parts)
    x = torch.from_numpy(Digits().load(None).pixels[:5])
    with torch.no_grad():
        found, _ = run.model.features(run.server.theta, {}, x, Mode())
        torch.testing.assert_close(found, net.eval()(run.model.prepare(x)))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "`constants/...` the tensors of the module that are not trained" in card


class Letters(nn.Module):
    """Texts as numbers of their letters, 0 for padding, in place of a tokenizer."""

    def forward(self, texts: list[str]) -> torch.Tensor:
        numbers = torch.zeros(len(texts), 12)
        for i, text in enumerate(texts):
            letters = [ord(letter) - 96 for letter in text if letter.isalpha()]
            numbers[i, : len(letters)] = torch.tensor(letters[:12]).float()
        return numbers


class Bert(nn.Module):
    """A small language model with random weights."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        torch.manual_seed(0)
        self.model = BertModel(
            BertConfig(
                vocab_size=27, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
                intermediate_size=16, max_position_embeddings=12,
            ),
            add_pooling_layer=False,
        )  # fmt: skip

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        mask = (numbers > 0).long()
        h = self.model(input_ids=numbers.long(), attention_mask=mask).last_hidden_state
        return (h * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp_min(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [PROTO, {"name": "fedmeta", "episodes": 1, "inner": {"steps": 1, "test_steps": 1}}]
)
def test_a_language_model_is_fine_tuned_on_texts(method: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the extra `encoders` is not installed")
    pytest.importorskip("peft", reason="the extra `encoders` is not installed")
    settings = {key: TRAINED[key] for key in TRAINED if key not in ("data", "split")}
    run = fs.train(
        settings | {"model": {"backbone": {"tune": "lora", "rank": 2}}, "method": method},
        data=([f"{word} {i * 'x'}" for word in WORDS for i in range(8)], np.repeat(WORDS, 8)),
        split={"random": [4, 3, 3]}, encoder=Letters(), backbone=Bert(), out=tmp_path / "run",
        progress=False,
    )  # fmt: skip
    (sent,) = (row["bytes"] for row in json.loads((tmp_path / "run/ledger.json").read_text())
               if (row["part"], row["direction"]) == ("theta", "down"))  # fmt: skip
    head = 4 * 5 * (8 + 1) if method is not PROTO else 0
    assert sent == 3 * (4 * 2 * (4 * (8 + 8) + 2 * (8 + 16)) + head)
    found = run.classifier().fit(["blue sky", "dark night"], ["day", "night"])
    predicted = found.predict(["blue sky", "dark night"]).tolist()
    assert predicted == ["day", "night"] if method is PROTO else {*predicted} <= {"day", "night"}
