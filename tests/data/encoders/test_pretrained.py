"""Encoders of transformers, sentence-transformers and timm, with tiny random models."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedshot as fs
from fedshot.core.errors import ConfigError
from fedshot.data.dataset import Dataset
from fedshot.data.encoders.encoded import encoded
from fedshot.data.encoders.frozen import LoadedEncoder
from fedshot.data.encoders.sentences import SentenceTransformersEncoder
from fedshot.data.encoders.timm_models import TimmEncoder
from fedshot.data.encoders.transformers_models import TransformersEncoder
from fedshot.data.sources.digits import Digits
from fedshot.data.tokens import RawTexts

from .test_module import SMALL, WORDS

pytestmark = pytest.mark.usefixtures("empty_cache")

TEXTS = tuple(f"{word} and {WORDS[i % 7]} {i}" for word in WORDS for i in range(8))
LABELS = np.repeat(np.arange(len(WORDS)), 8)


def needed(module: str) -> Any:
    """Import a module of an extra. It takes a second, so it is not imported at collection."""
    return pytest.importorskip(module, reason="the extra `encoders` is not installed")


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vit")
    torch.manual_seed(0)
    transformers = needed("transformers")
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        image_size=16, patch_size=8,
    )  # fmt: skip
    transformers.ViTModel(config, add_pooling_layer=False).save_pretrained(folder)
    size = {"height": 16, "width": 16}
    transformers.ViTImageProcessorPil(size=size, image_mean=[0.4] * 3).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    letters = [chr(97 + i) for i in range(26)]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{a}" for a in letters)]
    (folder / "vocab.txt").write_text("\n".join([*words, *WORDS]) + "\n")
    transformers = needed("transformers")
    tokenizer = transformers.BertTokenizer(vocab=str(folder / "vocab.txt"))
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(words) + len(WORDS), hidden_size=16, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=32, max_position_embeddings=12,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sentences(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sentences")
    made = needed("sentence_transformers").SentenceTransformer(str(bert), device="cpu")
    made.save_pretrained(str(folder))
    return folder


def texts() -> Dataset:
    return Dataset("texts", RawTexts(TEXTS), LABELS.astype(np.int64), WORDS)


def images(path: Path, **options: Any) -> LoadedEncoder:
    return TransformersEncoder(path=str(path), **options).load("images", "cpu")


def raw_text(path: Path, **options: Any) -> LoadedEncoder:
    return TransformersEncoder(path=str(path), **options).load("raw text", "cpu")


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_a_vit_gives_the_features_of_its_own_processor(vit: Path, pooling: str) -> None:
    digits = Digits().load(None)
    found = encoded(digits, images(vit, pooling=pooling))
    transformers = needed("transformers")
    processor = transformers.AutoImageProcessor.from_pretrained(vit, backend="pil")
    model = transformers.AutoModel.from_pretrained(vit).eval()
    x = [np.repeat(one, 3, axis=2) for one in digits.pixels[:32]]
    with torch.no_grad():
        h = model(**processor(x, return_tensors="pt")).last_hidden_state
    wanted = h.mean(1) if pooling == "mean" else h[:, 0]
    torch.testing.assert_close(torch.tensor(found.x[:32]), wanted, rtol=1e-5, atol=1e-5)
    without = encoded(digits, images(vit, pooling=pooling, cache=False))
    np.testing.assert_array_equal(without.x, found.x)


def test_a_text_model_ignores_padding(bert: Path) -> None:
    encoder = raw_text(bert)
    long = " ".join(WORDS)
    alone, beside = (
        encoder.forward(encoder.network.prepare(block), len(block))
        for block in (("sun",), ("sun", long))
    )
    np.testing.assert_allclose(alone[0], beside[0], rtol=1e-4, atol=1e-5)
    assert encoder.network.prepare((long, "sun"))["input_ids"].shape == (2, 12)
    first = encoded(texts(), raw_text(bert, pooling="cls"))
    assert first.shape == (16,)
    assert not np.allclose(first.x[0], encoded(texts(), encoder).x[0])


def test_sentences_have_the_embedding_of_the_library(sentences: Path) -> None:
    options = SentenceTransformersEncoder(path=str(sentences))
    found = encoded(texts(), options.load("raw text", "cpu"))
    model = needed("sentence_transformers").SentenceTransformer(str(sentences), device="cpu")
    wanted = model.encode(list(TEXTS), show_progress_bar=False)
    np.testing.assert_allclose(found.x, wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigError, match="takes texts, and the data are images"):
        options.load("images", "cpu")


def test_a_model_of_images_and_texts_gives_its_projections(
    bert: Path, vit: Path, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
             "intermediate_size": 16}  # fmt: skip
    vision = {"image_size": 16, "patch_size": 8}
    words = {"vocab_size": 80, "max_position_embeddings": 12, "eos_token_id": 3}
    transformers = needed("transformers")
    config = transformers.CLIPConfig(
        vision_config=sizes | vision, text_config=sizes | words, projection_dim=6
    )
    transformers.CLIPModel(config).save_pretrained(tmp_path)
    for file in (vit / "preprocessor_config.json", *bert.glob("*token*")):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert encoded(Digits().load(None), images(tmp_path)).shape == (6,)
    assert encoded(texts(), raw_text(tmp_path)).shape == (6,)


def test_the_hash_is_that_of_files_and_pooling(vit: Path, tmp_path: Path) -> None:
    first = images(vit).options.digest
    assert first == images(vit, cache=False).options.digest
    assert first != images(vit, pooling="cls").options.digest
    copy = shutil.copytree(vit, tmp_path / "copy")
    for name in (".cache", "onnx"):  # of a clone of a hub's repository
        (copy / name).mkdir()
        (copy / name / "config.json").write_text("{}")
        (copy / name / "model.bin").write_bytes(b"")
    assert images(copy).options.digest == first
    note = json.loads((copy / "preprocessor_config.json").read_text())
    (copy / "preprocessor_config.json").write_text(json.dumps(note | {"image_std": [0.9] * 3}))
    assert images(copy).options.digest != first
    with pytest.raises(ConfigError, match="Restore the encoder"):
        images(copy, digest=first)


def test_a_run_on_texts_of_a_file(sentences: Path, tmp_path: Path) -> None:
    path, out = tmp_path / "texts.jsonl", tmp_path / "run"
    rows = zip(TEXTS, LABELS.tolist(), strict=True)
    path.write_text("".join(json.dumps({"text": t, "label": WORDS[y]}) + "\n" for t, y in rows))
    encoder = {"name": "sentence_transformers", "path": str(sentences)}
    settings = SMALL | {
        "data": {"name": "texts", "path": str(path)},
        "split": {"random": [4, 3, 3]},
        "model": {"backbone": {"name": "mlp", "hidden": []}, "encoder": encoder},
    }
    run = fs.train(settings, out=out, progress=False)
    assert run.result is not None
    classifier = fs.FewShotClassifier(out).fit(["sun", "moon"], ["a", "b"])
    assert classifier.predict(["sun", "moon"]).tolist() == ["a", "b"]
    assert fs.train(settings | {"run": {"rounds": 2}}, out=out, resume=True, progress=False)


def drop(folder: Path) -> None:
    """Remove one weight of a layer."""
    from safetensors.torch import load_file, save_file

    held = load_file(folder / "model.safetensors")
    part = next(name for name in sorted(held) if "layer" in name)
    del held[part]
    save_file(held, folder / "model.safetensors", {"format": "pt"})


def convert(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: convert(f, "pytorch_model.bin"), "pickled weights, .* Convert them"),
        (lambda f: (f / "model.safetensors").unlink(), "holds no weights in safetensors"),
        (lambda f: (f / "config.json").write_text("{}"), "cannot be loaded as model.encoder"),
        (lambda f: (f / "preprocessor_config.json").unlink(), "cannot be loaded"),
        (drop, "lacks weights of its model, such as"),
    ],
    ids=["pickled", "none", "config", "processor", "missing"],
)
def test_a_folder_that_is_no_safe_model_is_refused(
    change: Callable[[Path], None], message: str, vit: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(vit, tmp_path / "copy")
    change(copy)
    with pytest.raises(ConfigError, match=message):
        _ = images(copy).network


def test_a_model_does_not_choose_the_code_that_runs(sentences: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(sentences, tmp_path / "copy")
    modules = json.loads((copy / "modules.json").read_text())
    modules[1]["type"] = "os.system"
    (copy / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ConfigError, match="not part of sentence-transformers"):
        SentenceTransformersEncoder(path=str(copy)).load("raw text", "cpu")


def test_a_model_of_the_hub_is_looked_for_below_the_data_and_read_when_it_is_used(
    sentences: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same features as from its path; with the features in the cache, the library is unused."""
    shutil.copytree(sentences, tmp_path / "encoders" / "some" / "model")
    options = SentenceTransformersEncoder(path="some/model")
    first = encoded(texts(), options.load("raw text", "cpu", tmp_path))
    by_path = SentenceTransformersEncoder(path=str(sentences)).load("raw text", "cpu")
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    again = encoded(texts(), by_path)
    assert first.digest == again.digest
    assert np.array_equal(first.x, again.x)


def test_a_hub_that_cannot_be_reached_names_the_local_folder(
    vit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="or put the model into encoders/somebody/some-model"):
        images(Path("somebody/some-model"))
    with pytest.raises(ConfigError, match="which has no revisions"):
        images(vit, revision="main")


def test_timm_gives_the_features_before_its_classifier(tmp_path: Path) -> None:
    timm = pytest.importorskip(
        "timm", reason="the extra `timm` is not installed", exc_type=ImportError
    )
    model = timm.create_model("resnet18", pretrained=False)
    timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
    found = TimmEncoder(path=str(tmp_path)).load("images", "cpu")
    x = Digits().load(None).pixels[:4]
    assert found.forward(found.network.prepare(x), 4).shape == (4, 512)


def test_timm_takes_images_alone() -> None:
    with pytest.raises(ConfigError, match="takes images, and the data are texts"):
        TimmEncoder(path="x").load("raw text", "cpu")
