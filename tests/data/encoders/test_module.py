"""A user's module as encoder: the same bits with and without a cache, runs, and refusals."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedshot as fs
from fedshot.config.load import Config
from fedshot.core.console import log_shown
from fedshot.core.errors import ConfigError, InputError
from fedshot.data.encoders.encoded import BLOCK, encoded, features_of
from fedshot.data.encoders.frozen import hash_weights
from fedshot.data.encoders.module import ModuleEncoder
from fedshot.data.encoders.timm_models import TimmEncoder
from fedshot.data.sources.digits import Digits
from fedshot.runs.prepare import FederatedDataset
from fedshot.use.trained import TrainedRun

pytestmark = pytest.mark.usefixtures("empty_cache")

SMALL: dict[str, Any] = {
    "data": "digits",
    "split": {"base": "0-4", "validation": [5, 6], "novel": [7, 8, 9]},
    "partition": {"name": "iid", "clients": 3},
    "episode": {"way": 2, "shot": 1, "query": 2},
    "model": {"backbone": {"name": "mlp", "hidden": []}},
    "method": "fedncm",
    "run": {"rounds": 1},
    "test": {"way": 2, "shot": 1, "query": 5, "episodes": 20, "validation_episodes": 5},
}
WORDS = ("sun", "moon", "star", "rain", "snow", "wind", "fog", "hail", "dew", "ice")


def conv4(width: int = 8, seed: int = 0) -> nn.Module:
    """A Conv4 without fedshot's own layers, with random weights."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for channels in (1, width, width):
        layers += [
            nn.Conv2d(channels, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    return nn.Sequential(*layers, nn.Flatten())


class LetterCounts(nn.Module):
    """Counts of letters: an encoder of texts."""

    def forward(self, texts: list[str]) -> Tensor:
        counts = [[text.count(chr(97 + i)) for i in range(26)] for text in texts]
        return torch.tensor(counts, dtype=torch.float32)


class Wrong(nn.Module):
    """Returns what it is told."""

    def __init__(self, give: Any) -> None:
        super().__init__()
        self.give = give

    def forward(self, x: Tensor) -> Any:
        return self.give(x)


def load(module: nn.Module, **options: Any) -> Any:
    return ModuleEncoder(**options).hold(module).load("images", "cpu")


def test_the_hash_covers_buffers_that_are_not_saved() -> None:
    made = [conv4() for _ in range(3)]
    for module, value in zip(made[1:], (1.0, 2.0), strict=True):
        module.register_buffer("scale", torch.tensor(value), persistent=False)
    assert len({hash_weights(module) for module in made}) == 3
    sha = hashlib.sha256(repr(made[0]).encode())
    for name, leaf in made[0].state_dict().items():
        sha.update(f"{name}:{leaf.dtype}{tuple(leaf.shape)};".encode() + leaf.numpy().tobytes())
    assert hash_weights(made[0]) == sha.hexdigest()


def test_features_are_the_same_bits_with_and_without_a_cache(empty_cache: Path) -> None:
    digits = Digits().load(None)
    without = encoded(digits, load(conv4(), cache=False))
    assert not list(empty_cache.glob("*-features-*"))
    written, read = (encoded(digits, load(conv4())) for _ in range(2))
    assert len(list(empty_cache.glob("digits-features-*"))) == 1
    assert (without.kind, without.shape, without.x.dtype) == ("features", (8,), np.float32)
    np.testing.assert_array_equal(without.x, written.x)
    np.testing.assert_array_equal(without.x, read.x)
    assert isinstance(read.array.base, np.memmap)
    assert without.digest == read.digest != digits.digest
    with torch.no_grad():
        whole = conv4().eval()(torch.from_numpy(digits.pixels).permute(0, 3, 1, 2).float() / 255)
    torch.testing.assert_close(torch.from_numpy(without.x), whole, rtol=1e-4, atol=1e-6)


def test_a_damaged_or_foreign_entry_is_computed_again(empty_cache: Path) -> None:
    digits = Digits().load(None)
    first = np.array(encoded(digits, load(conv4())).x)
    (entry,) = empty_cache.glob("digits-features-*")
    (entry / "features.npy").write_bytes((entry / "features.npy").read_bytes()[:-4] + b"\1\1\1\1")
    np.testing.assert_array_equal(encoded(digits, load(conv4())).x, first)
    encoded(digits, load(conv4(seed=1)))
    assert len(list(empty_cache.glob("digits-features-*"))) == 2


def test_an_entry_has_a_plain_name_in_the_cache_folder(empty_cache: Path) -> None:
    named = replace(Digits().load(None), name="../a b/c")
    encoded(named, load(conv4()))
    assert [entry.name[:15] for entry in empty_cache.glob("*-features-*")] == [".._a_b_c-featur"]


def test_the_number_of_threads_does_not_change_features(monkeypatch: pytest.MonkeyPatch) -> None:
    digits, found = Digits().load(None), []
    for workers in (1, 4):
        monkeypatch.setattr("fedshot.data.encoders.encoded.cores", lambda n=workers: n)
        found.append(np.concatenate(list(features_of(digits.pixels, load(conv4())))))
    np.testing.assert_array_equal(*found)


def test_a_long_computation_shows_its_progress(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fedshot.data.encoders.encoded._EVERY", 0.0)
    digits = Digits().load(None)
    with log_shown():
        encoded(digits, load(conv4()))
    encoded(digits, load(conv4(seed=1)))  # logs, and prints nothing
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"features of {BLOCK} of {len(digits):,} examples computed"
    assert lines[-1] == f"features of {len(digits):,} of {len(digits):,} examples computed"


def test_the_encoder_never_sees_more_than_a_block() -> None:
    seen: list[int] = []

    def note(x: Tensor) -> Tensor:
        seen.append(len(x))
        return x.flatten(1)

    list(features_of(Digits().load(None).pixels[:70], load(Wrong(note))))
    assert sorted(seen) == [70 - 2 * BLOCK, BLOCK, BLOCK]


def test_the_users_module_stays_as_it_is() -> None:
    module = conv4()
    before = {name: leaf.clone() for name, leaf in module.state_dict().items()}
    encoded(Digits().load(None), load(module, cache=False))
    assert all(torch.equal(leaf, before[name]) for name, leaf in module.state_dict().items())
    assert module.training
    assert all(p.requires_grad for p in module.parameters())


@pytest.mark.parametrize("method", ["fedncm", pytest.param("fl_proto", marks=pytest.mark.slow)])
def test_a_run_trains_resumes_and_predicts_with_its_encoder(method: str, tmp_path: Path) -> None:
    model = {"backbone": {"name": "mlp", "hidden": [] if method == "fedncm" else [8]}}
    settings = SMALL | {"model": model, "method": method}
    once = fs.train(settings, encoder=conv4(), out=tmp_path / "once", rounds=2, progress=False)
    out = tmp_path / "twice"
    fs.train(settings, encoder=conv4, out=out, rounds=1, progress=False)
    run = fs.train(encoder=conv4(), out=out, resume=True, rounds=2, progress=False)
    assert once.result is not None
    assert run.result == once.result
    assert {*run.result.baselines} == {"given features"}
    encoder = run.config["model"]["encoder"]
    assert (encoder["name"], len(encoder["digest"])) == ("module", 64)
    digits = Digits().load(None)
    novel = np.flatnonzero(digits.y >= 7)
    x, y = digits.pixels[novel], digits.y[novel]
    classifier = run.classifier().fit(x[:20], y[:20])
    other = fs.FewShotClassifier(out, encoder=conv4()).fit(x[:20], y[:20])
    np.testing.assert_array_equal(classifier.predict(x[20:]), other.predict(x[20:]))
    assert classifier.score(x[20:], y[20:]) > 0.34
    assert classifier.n_features_in_ == 64
    with pytest.raises(InputError, match="example 0 is"):
        classifier.predict([3.5])
    assert len(classifier.predict_proba(x[:0])) == 0


def test_another_encoder_is_refused_with_both_hashes(tmp_path: Path) -> None:
    fs.train(SMALL, encoder=conv4(), out=tmp_path, progress=False)
    digest = fs.open_run(tmp_path).config["model"]["encoder"]["digest"]
    other = load(conv4(seed=1)).options.digest
    for use in (
        lambda: fs.train(encoder=conv4(seed=1), out=tmp_path, resume=True, progress=False),
        lambda: TrainedRun(tmp_path, encoder=conv4(seed=1)).encoder,
        lambda: TrainedRun(tmp_path, encoder=conv4(seed=1)).federated,
    ):
        with pytest.raises(ConfigError, match=f"{other}, but the run has {digest}"):
            use()
    with pytest.raises(ConfigError, match="encoder=module"):
        fs.FewShotClassifier(tmp_path).fit(Digits().load(None).pixels[:4], [0, 0, 1, 1])


def test_options_that_read_another_encoder_refuse_a_module() -> None:
    with pytest.raises(ConfigError, match=r"an encoder was passed, and model.encoder is a Timm"):
        ModuleEncoder.holding(TimmEncoder("resnet18"), conv4())


@pytest.mark.slow
def test_a_change_of_the_cache_or_none_does_not_matter_to_a_resumed_run(tmp_path: Path) -> None:
    fs.train(SMALL, encoder=conv4(), out=tmp_path, progress=False)
    settings = {"model.encoder": {"name": "module", "cache": False}, "run.rounds": 2}
    run = fs.train(SMALL | settings, encoder=conv4(), out=tmp_path, resume=True, progress=False)
    assert run.finished


def test_raw_texts_reach_a_module(tmp_path: Path) -> None:
    texts = [f"{word} {word[::-1]}, {i}!" for word in WORDS for i in range(8)]
    labels = [word for word in WORDS for _ in range(8)]
    settings = {key: value for key, value in SMALL.items() if key not in ("data", "split")}
    settings["split"] = {"random": [4, 3, 3]}
    run = fs.train(
        settings, data=(texts, labels), encoder=LetterCounts(), out=tmp_path, progress=False
    )
    assert run.result is not None
    classifier = run.classifier().fit(["sun", "sun sun", "moon"], ["a", "a", "b"])
    query = tmp_path / "q.txt"
    query.write_text("nus")
    assert classifier.predict(["the sun", query, ["moon", "noom"]]).tolist() == ["a", "a", "b"]
    with pytest.raises(InputError, match="text 1 has no words"):
        classifier.predict(["a", " "])
    with pytest.raises(InputError, match="text 0 is of type int"):
        classifier.predict([3])
    info = json.loads((tmp_path / "data.json").read_text())
    assert (info["original"], info["shape"]) == ([], [26])


def test_copies_are_counted_among_the_texts_not_the_features() -> None:
    texts = [*(f"{word} {i}" for word in WORDS for i in range(8))]
    texts[1] = texts[0]
    data = fs.as_dataset((texts, [word for word in WORDS for _ in range(8)]), raw=True)
    settings = {key: value for key, value in SMALL.items() if key not in ("data", "split")}
    config = Config.of(settings | {"split": {"random": [4, 3, 3]}}).with_data(data)
    with pytest.raises(ConfigError, match="holds raw texts, which only"):
        FederatedDataset(config)
    found = FederatedDataset(config.with_encoder(ModuleEncoder().hold(LetterCounts())))
    assert found.copies.identical == 2


@pytest.mark.parametrize(
    ("give", "message"),
    [
        (lambda x: x, r"returns a tensor \[32, 1, 8, 8\] for 32 examples; expected features"),
        (lambda x: x.flatten(1)[:3], r"returns a tensor \[3, 64\]"),
        (lambda x: {"h": x}, "returns an object of type dict"),
        (lambda x: x.flatten(1).long(), "expected floating point"),
        (lambda x: x.flatten(1) / 0, "returns NaN or infinity"),
        (
            lambda x: x.flatten(1) @ x.new_zeros(3, 3),
            r"for inputs \[32, 1, 8, 8\]: RuntimeError: mat1",
        ),
        (lambda x: x.flatten(1) - x.flatten(1).mean(0), "different features alone and in a batch"),
        (lambda x: x.flatten(1) + torch.rand_like(x.flatten(1)), "different features alone and"),
    ],
)
def test_a_module_that_gives_no_features_is_refused(give: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        encoded(Digits().load(None), load(Wrong(give)))


def test_data_that_are_features_take_no_encoder() -> None:
    x, y = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32), np.arange(40) % 4
    with pytest.raises(ConfigError, match="the data are features already"):
        fs.train(data=(x, y), encoder=conv4(), method="fedncm", progress=False)


def test_code_that_a_configuration_names_runs_only_if_the_user_allows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_net.py").write_text(
        "import torch\n"
        "def make(width):\n"
        "    torch.manual_seed(0)\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, width))\n"
        "def number(): return 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def chosen(factory: str, **args: Any) -> FederatedDataset:
        encoder = {"name": "module", "factory": factory, "args": args}
        return FederatedDataset(Config.of(SMALL | {"model": {"encoder": encoder}}))

    with pytest.raises(ConfigError, match="set FEDSHOT_PLUGINS=my_net"):
        chosen("my_net:make", width=4)
    monkeypatch.setenv("FEDSHOT_PLUGINS", "other,my_net,gone")
    assert chosen("my_net:make", width=4).dataset.shape == (4,)
    for factory, args, message in (
        ("my_net:make", {"size": 4}, "raises an error if it is called with"),
        ("my_net:number", {}, "returns an object of type int"),
        ("my_net:lost", {}, "cannot be imported"),
        ("gone:make", {}, "cannot be imported"),
        ("my_net.make", {}, "expected 'package.module:function'"),
    ):
        with pytest.raises(ConfigError, match=message):
            chosen(factory, **args)
