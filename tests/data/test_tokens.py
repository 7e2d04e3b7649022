from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedshot.config.schema import ModelOptions
from fedshot.core.errors import ConfigError, DataError
from fedshot.core.seeds import Key
from fedshot.data.class_split import ClassSplit
from fedshot.data.dataset import Dataset
from fedshot.data.episodes.episode import ClientData, Tasks
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.data.tokens import Tokens
from fedshot.nn.models.backbones import BACKBONES, MLP, Conv4
from fedshot.nn.models.model import Model

TABLE = np.array([[0, 0], [0, 0], [1, 2], [3, 4]], dtype=np.float32)


def tokens(*texts: list[int], cut: int = 5) -> Tokens:
    ids = np.array([w for text in texts for w in text], dtype=np.int32)
    offsets = np.cumsum([0, *map(len, texts)]).astype(np.int64)
    return Tokens(ids, offsets, TABLE, cut)


def written(n: int = 12, classes: int = 3) -> Dataset:
    """Text i has i % 5 words."""
    x = tokens(*([1 + (i + j) % 3 for j in range(i % 5)] for i in range(n)))
    y = np.arange(n, dtype=np.int64) % classes
    return Dataset("written", x, y, tuple(f"class{c}" for c in range(classes)))


def rows(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def test_rows_are_padded_to_the_longest_of_them_and_to_one_word_at_least():
    x = tokens([2, 3, 1], [], [3])
    assert len(x) == 3
    assert x.rows(rows(2, 0)).tolist() == [[3, 0, 0], [2, 3, 1]]
    assert x.rows(rows(1, 2)).tolist() == [[0], [3]]
    assert x.rows(rows(1)).tolist() == [[0]]
    assert x.rows(rows()).shape == (0, 1)
    assert x.rows(rows(0)).dtype == np.int32
    assert x.known == 0.75


def test_a_choice_of_texts_keeps_their_words_and_order():
    x = tokens([2, 3, 1], [], [3], [1, 1])
    some = x.only(rows(3, 1, 0))
    assert some.rows(np.arange(3)).tolist() == [[1, 1, 0], [0, 0, 0], [2, 3, 1]]
    assert some.cut == 5


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"table": TABLE.astype(np.float64)}, r"float64\[4, 2\]; expected float32\[V, d\]"),
        ({"table": TABLE[:1]}, "row 1 for unknown"),
        ({"table": TABLE + 1}, r"row 0 \(padding\) all zero"),
        ({"table": np.where(TABLE == 4, np.nan, TABLE)}, "finite"),
        ({"offsets": np.array([0, 2])}, "do not divide 3 words"),
        ({"offsets": np.array([0])}, "at least one text"),
        ({"offsets": np.array([0, 4, 2, 3])}, "ascending offsets"),
        ({"cut": 1}, "1 to 2 words and cut is 1"),
        ({"cut": 0}, "cut is 0"),
        ({"ids": np.array([1, 0, 2], np.int32)}, r"from 0 to 2; .* 1\.\.3"),
        ({"ids": np.array([1, 4, 2], np.int32)}, "from 1 to 4"),
        ({"ids": np.array([1, 3, 2], np.int64)}, r"int64\[3\]; expected int32"),
    ],
)
def test_tokens_that_do_not_fit_together_are_refused(changes, said):
    with pytest.raises(DataError, match=said):
        replace(tokens([2, 3], [1]), **changes)


def test_a_dataset_of_texts_tells_its_shape_and_checks_its_labels():
    dataset = written()
    assert len(dataset) == 12
    assert dataset.shape == (5, 2)
    assert dataset.is_text
    assert dataset.images_of([1]).tolist() == [1, 4, 7, 10]
    with pytest.raises(DataError, match=r"int64\[3\]; expected int64\[12\], one for each text"):
        replace(dataset, y=np.zeros(3, np.int64))
    with pytest.raises(DataError, match="holds texts; this needs images"):
        _ = dataset.pixels


def test_the_digest_of_texts_depends_on_words_cuts_vectors_and_labels():
    dataset = written()
    x = dataset.x
    assert isinstance(x, Tokens)
    others = [
        replace(dataset, x=replace(x, cut=6)),
        replace(dataset, x=replace(x, table=x.table * 2)),
        replace(dataset, x=replace(x, ids=x.ids[::-1].copy())),
        replace(dataset, y=dataset.y[::-1].copy()),
        replace(dataset, class_names=("a", "b", "c")),
        replace(dataset, users=np.zeros(12, np.int64)),
    ]
    digests = [dataset.digest, *(other.digest for other in others)]
    assert len(set(digests)) == len(digests)
    split = ClassSplit((0,), (), (1,))
    assert replace(dataset, name="other", standard=split).digest == dataset.digest


def test_the_digest_of_images_is_what_it_was_before_there_were_texts():
    x = np.arange(96, dtype=np.uint8).reshape(12, 2, 4, 1)
    y = np.arange(12, dtype=np.int64)
    dataset = Dataset("made", x, y % 4, tuple("abcd"), users=y // 3)
    # sha256 of this dataset at commit 4c3ab09; runs of that time must still resume
    assert dataset.digest == ("8cadb26da1f9a1f720486b407fd8182f2513b317e8bcd388efb3b1286ce4f431")


def test_support_and_queries_of_an_episode_have_one_length():
    dataset = written(30)
    data, rng = ClientData(dataset, np.arange(30)), np.random.default_rng(0)
    seen = set()
    for _ in range(30):
        episode = data.episode(EpisodeSpec(2, 1, 2), rng)
        length = episode.support_x.shape[1]
        assert episode.support_x.dtype == episode.query_x.dtype == torch.int32
        assert (episode.support_x.shape, episode.query_x.shape) == ((2, length), (4, length))
        both = torch.cat([episode.support_x, episode.query_x])
        assert length == max(1, int((both != 0).sum(1).max()))
        seen.add(length)
    assert len(seen) > 1
    x, y = data.batch(7, rng)
    assert (x.dtype, x.shape[0], y.shape) == (torch.int32, 7, (7,))
    assert x.shape[1] == max(1, int((x != 0).sum(1).max()))


def test_tasks_of_texts_are_the_rows_they_name():
    dataset = written(30)
    tasks = Tasks.draw(dataset, [0, 1, 2], EpisodeSpec(3, 1, 2), 4, Key(0))
    episode = tasks.episode(dataset, 2)
    assert isinstance(dataset.x, Tokens)
    lengths = dataset.x.lengths(tasks.query[2])
    assert (episode.query_x != 0).sum(1).tolist() == lengths.tolist()
    assert tasks.digest(dataset) == tasks.digest(written(30))


class Mean:
    """The mean word vector: the least a text backbone can be."""

    takes = ("text",)
    vmappable = True
    norm_policies = ("running",)

    def init(self, key, shape, dtype):
        return {}, {}

    def out_features(self, shape):
        return shape[1]

    def apply(self, params, stats, x, mode):
        real = x[..., -1:]
        return (x[..., :-1] * real).sum(1) / real.sum(1).clamp(min=1), stats


def test_a_model_hands_its_backbone_vectors_and_a_column_that_tells_words_from_padding():
    model = Model(Mean(), None, (5, 2), table=torch.from_numpy(TABLE))
    x = torch.tensor([[3, 1, 0], [2, 0, 0]], dtype=torch.int32)
    want = [[[3, 4, 1], [0, 0, 1], [0, 0, 0]], [[1, 2, 1], [0, 0, 0], [0, 0, 0]]]
    assert model.prepare(x).tolist() == want
    assert model.out_features == 2
    h, _ = model.features({"body": {}}, {}, x, None)
    assert h.tolist() == [[1.5, 2], [1, 2]]
    again, _ = model.features({"body": {}}, {}, model.prepare(x), None)
    assert torch.equal(h, again)
    under = torch.func.vmap(model.prepare)(x[:, None])
    assert torch.equal(under[:, 0], model.prepare(x))


def test_the_table_has_the_models_dtype_and_plays_no_part_in_its_identity():
    table = torch.from_numpy(TABLE)
    model = Model(Mean, None, (5, 2), dtype="float64", table=table)  # type: ignore[arg-type]
    assert model.prepare(torch.ones(1, 1, dtype=torch.int32)).dtype == torch.float64
    other = replace(model, table=table + 1)
    assert model == other
    assert hash(model) == hash(other)
    assert "table" not in repr(model)


def test_a_backbone_is_refused_data_it_does_not_take():
    table = torch.from_numpy(TABLE)
    for backbone in (MLP(), Conv4()):
        with pytest.raises(
            ConfigError, match=r"(MLP|Conv4) takes images( or features)?, but the data are text"
        ):
            Model(backbone, None, (5, 2), table=table)
    with pytest.raises(ConfigError, match="Mean takes text, but the data are images"):
        Model(Mean(), None, (8, 8, 1))
    for name, kind in BACKBONES.items():
        if name == "module":  # it takes all data
            continue
        takes = getattr(kind, "takes", ("images",))
        other = {"shape": (8, 8, 1)} if "text" in takes else {"shape": (5, 2), "table": table}
        with pytest.raises(ConfigError, match=f"takes {takes[0]}"):
            Model(kind(), None, **other)


def test_shapes_and_inputs_of_texts_are_checked():
    table = torch.from_numpy(TABLE)
    with pytest.raises(ConfigError, match=r"shape is \(5,\); expected \(longest length, d\)"):
        Model(Mean(), None, (5,), table=table)
    with pytest.raises(ConfigError, match=r"table is \[4, 2\]; expected word vectors \[V, 3\]"):
        Model(Mean(), None, (5, 3), table=table)
    model = Model(Mean(), None, (5, 2), table=table)
    with pytest.raises(ConfigError, match=r"texts are torch.uint8 of shape \[1, 8, 8, 1\]"):
        model.prepare(torch.zeros(1, 8, 8, 1, dtype=torch.uint8))
    with pytest.raises(ConfigError, match=r"prepared texts have shape \[1, 4, 2\].*\[n, L, 3\]"):
        model.features({"body": {}}, {}, torch.zeros(1, 4, 2), None)


def test_options_build_a_model_for_the_dataset_they_are_given():
    model = ModelOptions(Mean(), None).build(written())
    assert model.shape == (5, 2)
    assert model.table is not None
    assert model.table.tolist() == TABLE.tolist()
    images = Dataset("i", np.zeros((2, 8, 8, 1), np.uint8), np.arange(2), ("a", "b"))
    assert ModelOptions(Conv4(), None).build(images).table is None
