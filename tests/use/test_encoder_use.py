"""Uses of a run with a frozen encoder: the commands `predict` and `calibrate`, and exports."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import fedshot as fs
from data.encoders.test_module import SMALL, WORDS, LetterCounts, conv4
from fedshot.cli.main import main
from fedshot.core.errors import ConfigError
from fedshot.data.sources.digits import Digits
from fedshot.use.exporting import export
from fedshot.use.trained import TrainedRun

from .image_folders import check_predictions, support_and_query

pytestmark = pytest.mark.usefixtures("empty_cache")

TRAINED = SMALL | {"model": {"backbone": {"name": "mlp", "hidden": [8]}}, "method": "fl_proto"}
NET = """\
import torch

def make(width):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, width))
"""


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [[8], []])
def test_an_exported_program_holds_the_frozen_module(hidden: list[int], tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="the extra `onnx` is not installed")
    import onnxruntime

    model = {"backbone": {"name": "mlp", "hidden": hidden}}
    fs.train(TRAINED | {"model": model, "method": "fl_proto" if hidden else "fedncm"},
             encoder=conv4(), out=tmp_path / "run", progress=False)  # fmt: skip
    run = TrainedRun(tmp_path / "run", encoder=conv4())
    export(run, "onnx", tmp_path / "out")
    export(run, "safetensors", tmp_path / "out")
    session = onnxruntime.InferenceSession(tmp_path / "out" / "encoder.onnx")
    x = Digits().load(None).pixels[:5]
    (found,) = session.run(None, {"examples": x})
    h = torch.from_numpy(run.encoder.forward(run.encoder.network.prepare(x), 5))
    if not hidden:
        np.testing.assert_allclose(found, h, rtol=1e-4, atol=1e-6)
    assert found.shape == (5, 8)
    told = json.loads((tmp_path / "out" / "encoder.json").read_text())
    assert (told["kind"], told["shape"]) == ("images", [8, 8, 1])
    assert told["encoder"]["digest"] == run.encoder.options.digest
    held = load_file(tmp_path / "out" / "encoder.safetensors")
    assert held["encoder/0.weight"].equal(conv4().state_dict()["0.weight"])
    card = (tmp_path / "out" / "README.md").read_text()
    assert str(run.encoder.options.digest) in card
    assert "the frozen encoder is in the program" in card


@pytest.mark.slow
def test_another_frozen_module_is_another_export(tmp_path: Path) -> None:
    for seed in (0, 1):
        out = tmp_path / str(seed)
        fs.train(SMALL, encoder=conv4(seed=seed), out=out, progress=False)
    export(TrainedRun(tmp_path / "0", encoder=conv4()), "safetensors", tmp_path / "out")
    with pytest.raises(ConfigError, match="of another encoder"):
        export(TrainedRun(tmp_path / "1", encoder=conv4(seed=1)), "torch-export", tmp_path / "out")


def test_for_texts_the_trained_layers_are_exported(tmp_path: Path) -> None:
    texts = [f"{word} {word[::-1]}, {i}!" for word in WORDS for i in range(8)]
    labels = [word for word in WORDS for _ in range(8)]
    settings = {key: TRAINED[key] for key in TRAINED if key not in ("data", "split")}
    settings["split"] = {"random": [4, 3, 3]}
    fs.train(
        settings, data=(texts, labels), encoder=LetterCounts(), out=tmp_path / "run", progress=False
    )
    run = TrainedRun(tmp_path / "run", encoder=LetterCounts())
    export(run, "torch-export", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "encoder.json").read_text())["shape"] == [26]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "float [n, 26], the features of the frozen encoder, which is not in the file" in card


def test_the_commands_use_the_encoder_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net_of_mine.py").write_text(NET)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("FEDSHOT_PLUGINS", "net_of_mine")
    encoder = {"name": "module", "factory": "net_of_mine:make", "args": {"width": 6}}
    model = TRAINED["model"] | {"encoder": encoder}
    out = tmp_path / "run"
    fs.train(TRAINED | {"model": model}, out=out, progress=False)
    paths = support_and_query(tmp_path)
    assert main(["calibrate", str(out), "--way", "2", "--episodes", "8"]) == 0
    check_predictions(out, paths, capsys)
    assert main(["data", "show", "--model.encoder.name", "module", "--out", str(tmp_path / "show"),
                 "--model.encoder.factory", "net_of_mine:make",
                 "--model.encoder.args", "{width: 3}"]) == 0  # fmt: skip
    said = capsys.readouterr().out
    assert "examples of 3 features" in said
    assert "features of the encoder 'module', hash " in said
    assert (tmp_path / "show" / "digits-classes.png").exists()
    monkeypatch.delenv("FEDSHOT_PLUGINS")
    assert main(["predict", str(out), *paths]) == 2
    assert "set FEDSHOT_PLUGINS=net_of_mine" in capsys.readouterr().err


@pytest.mark.slow
def test_pictures_with_a_vit_from_training_to_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands of docs/encoder.md; the exported layers give what the run's own give."""
    transformers = pytest.importorskip("transformers", reason="no extra `encoders`")
    onnxruntime = pytest.importorskip("onnxruntime", reason="no extra `onnx`")
    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.ViTConfig(num_hidden_layers=1, image_size=32, patch_size=8, **sizes)
    transformers.ViTModel(config, add_pooling_layer=False).save_pretrained("vit")
    size = {"height": 32, "width": 32}
    transformers.ViTImageProcessorPil(size=size).save_pretrained("vit")
    rng = np.random.default_rng(0)
    for name in "abcdefghij":
        base = rng.integers(0, 256, 3)
        for i in range(12):
            picture = np.clip(base + rng.normal(0, 20, (40, 48, 3)), 0, 255).astype(np.uint8)
            for folder in (["pictures", name], ["examples", name], ["new"])[: 3 if i == 0 else 1]:
                Path(*folder).mkdir(parents=True, exist_ok=True)
                Image.fromarray(picture).save(Path(*folder) / f"{name}{i}.png")
    words = "run --name pictures --data folder --data.path pictures --split.random [6,2,2]"
    few = "--partition.clients 2 --run.rounds 2 --episode.way 2 --test.way 2 --test.episodes 5"
    encoder = "--model.encoder.name transformers --model.encoder.path vit"
    assert not main(f"{words} {few} --episode.query 3 --test.query 3 --method fl_proto "
                    f"--model.backbone adapter {encoder}".split())  # fmt: skip
    capsys.readouterr()
    assert not main(
        ["predict", "runs/pictures", "--support", "examples", "--query", "new", "--quiet"]
    )
    rows = [line.split(",")[:2] for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows == [[f"{name}0.png", name] for name in "abcdefghij"]
    assert not main(["export", "runs/pictures", "--to", "onnx"])
    session = onnxruntime.InferenceSession("runs/pictures/export/encoder.onnx")
    h = rng.normal(size=(4, 16)).astype(np.float32)
    assert session.run(None, {"examples": h})[0].shape == (4, 16)
