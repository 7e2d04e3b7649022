"""Settings: read from YAML and the command line, merged, checked, and refused in plain words."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from covering import diagonal, slow
from fedshot.config.load import Config, load, override
from fedshot.config.registry import difference
from fedshot.core.errors import ConfigError, DataError
from fedshot.data.dataset import Dataset
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.data.partitions.pooled import Iid, Shards
from fedshot.data.sources.digits import Digits
from fedshot.data.sources.npz import Npz
from fedshot.learners.maml import InnerLoop
from fedshot.learners.proto import Proto
from fedshot.methods.registry import METHODS
from fedshot.nn.models.backbones import MLP
from fedshot.nn.models.model import Model
from fedshot.runs.experiment import Experiment
from fedshot.runs.prepare import PreparedRun


def read(tmp_path: Path, text: str) -> dict[str, Any]:
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return load(path)


def refusal(settings: dict[str, Any], *words: str) -> str:
    with pytest.raises(ConfigError) as error:
        Config.of(override(settings, list(words))[0])
    text = str(error.value)
    assert "Parser key" not in text
    assert "Union" not in text
    assert "<class" not in text
    return text


def chosen(*words: str, file: dict[str, Any] | None = None) -> dict[str, Any]:
    return Config.of(override(file or {}, list(words))[0]).settings


# What YAML means.


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("010", 10),
        ("-3", -3),
        ("1e-3", 0.001),
        ("1.", 1.0),
        ("true", True),
        ("no", "no"),
        ("1_000", "1_000"),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("~", None),
        ("'5'", "5"),
        ("!!str 5", "5"),
        ("!!str", ""),
        ("! 5", "5"),
        ("! '5'", "5"),
        ("!", ""),
        ("!!seq [!!str 5, 5]", ["5", 5]),
        ("9" * 5000, float("inf")),
    ],
)
def test_yaml_is_read_as_people_mean_it(tmp_path: Path, text: str, value: object) -> None:
    assert read(tmp_path, f"a: {text}") == {"a": value}


def test_what_is_merged_in_gives_way_and_is_not_given_twice(tmp_path: Path) -> None:
    text = "a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}\nb.z: 4\nc: [*a, *a, {x: 5}]"
    same = {"x": 1, "y": 2}
    assert read(tmp_path, text) == {
        "a": same, "b": {"x": 3, "y": 2}, "b.z": 4, "c": [same, same, {"x": 5}],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed: 1\nseed: 2", "line 2: 'seed' is given twice. Keep one of them."),
        ("run:\n  rounds: 1\n  rounds: 2", "line 3: 'run.rounds' is given twice"),
        ("run:\n  rounds: 1\nrun.rounds: 2", "line 3: 'run.rounds' is given twice"),
        ("run.rounds: 2\nrun:\n  rounds: 1", "line 3: 'run.rounds' is given twice"),
        ("a: &x {b: *x}", "an anchor contains itself"),
        ("[1]: 2", "a key is a list or a tree"),
        ("a: " + "[" * 600, "nested too deeply"),
        ("a: !!python/object:os.system {}", "os.system' is not known here. Leave it out."),
        ("a: !!int 5", "'tag:yaml.org,2002:int' is not known here. Leave it out."),
        ("a: !!seq 5", "'tag:yaml.org,2002:seq' is not known here. Leave it out."),
        ("a: [", "is not YAML"),
        ('a: "\\U00110000"', "is not YAML: the number of an escape"),
        ('a: "\\Uffffffff"', "is not YAML: the number of an escape"),
        ("a: \x00", "is not YAML"),
        ("5", "holds 5; expected keys and values"),
        ("", "holds nothing; expected keys and values"),
    ],
)
def test_unclear_yaml_is_refused_with_its_line(tmp_path: Path, text: str, expected: str) -> None:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)  # Python's own, which a library may have raised
    try:
        with pytest.raises(ConfigError) as error:
            read(tmp_path, text)
    finally:
        sys.setrecursionlimit(limit)
    assert expected in str(error.value)
    assert "config.yaml" in str(error.value)


def test_a_pipe_or_a_device_as_settings_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    for path in (tmp_path / "pipe.yaml", Path("/dev/zero")):
        with pytest.raises(ConfigError, match=rf"{path} cannot be read \(it is not a regular file"):
            load(path)


def test_anchors_used_over_and_over_are_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 8)}]" for i in range(1, 9)]
    with pytest.raises(ConfigError, match="Use fewer anchors"):
        read(tmp_path, "\n".join(lines))


# Text where an option takes text.


@pytest.mark.parametrize("text", ["2024", "true", "2024-01-01", "010", "1.10", "1e5", "no"])
def test_a_name_is_text_whatever_it_looks_like(tmp_path: Path, text: str) -> None:
    assert chosen("--name", text)["name"] == text
    assert Config.of(read(tmp_path, f"name: {text}")).name == text


def test_a_path_of_digits_is_text() -> None:
    assert chosen("--data.name", "npz", "--data.path", "05")["data"]["path"] == "05"
    assert chosen(file={"data": {"name": "npz", "path": 5}})["data"]["path"] == "5"
    assert chosen("--data.name=cifar100", "--data.file=null")["data"]["file"] is None


@pytest.mark.parametrize(
    ("words", "base"),
    [
        (["--split.base", "0-4"], ["0-4"]),
        (["--split.base", "[0, 1]"], ["0", "1"]),
        (["--split.base", "['0-2', cat]"], ["0-2", "cat"]),
        (["--split.base", "7"], ["7"]),
    ],
)
def test_classes_may_be_numbers_ranges_and_names(words: list[str], base: list[str]) -> None:
    assert chosen(*words)["split"]["base"] == base


def test_classes_may_be_numbers_in_python_and_in_a_file(tmp_path: Path) -> None:
    assert Config.of({"split": {"base": [0, 1], "novel": (2,)}}).split.base == ("0", "1")
    held = Config.of(read(tmp_path, "split: {base: [0, 01], novel: 5-9}")).split
    assert (held.base, held.novel) == (("0", "01"), ("5-9",))


# The command line over a file.


def test_a_section_on_the_command_line_is_merged() -> None:
    file = {"run": {"rounds": 7, "unreliable": {"drop": 0.5}}}
    assert chosen("--run", "{}", file=file)["run"]["rounds"] == 7
    run = chosen("--run", "{cohort: 3, unreliable: {delay: 0.1}}", file=file)["run"]
    assert (run["rounds"], run["cohort"]) == (7, 3)
    assert run["unreliable"] == {"drop": 0.5, "delay": 0.1, "corrupt": 0.0}


@pytest.mark.parametrize(
    ("option", "short"), diagonal(["--method", "--method.name"], [True, False])
)
def test_the_same_kind_keeps_the_options_of_the_file(option: str, short: bool) -> None:
    file: dict[str, Any] = {"method": {"name": "fl_proto", "local_steps": 7}}
    if short:
        del file["method"]["name"]  # fl_proto is the default
    settings, notices = override(file, [option, "fl_proto"])
    assert Config.of(settings).settings["method"]["local_steps"] == 7
    assert notices == []


def test_a_kind_that_the_file_names_alone_stays_under_an_option() -> None:
    file = {"method": "fsl_local", "model": {"backbone": "mlp"}}
    settings, notices = override(
        file, ["--method.local_steps", "3", "--model.backbone.hidden", "[8]"]
    )
    found = Config.of(settings).settings
    assert (found["method"]["name"], found["method"]["local_steps"]) == ("fsl_local", 3)
    assert (found["model"]["backbone"]["name"], found["model"]["backbone"]["hidden"]) == (
        "mlp",
        [8],
    )
    assert notices == []


@pytest.mark.parametrize(
    "words",
    [["--method", "fl_proto"], ["--method.name", "fl_proto"], ["--method={name: fl_proto}"]],
)
def test_another_kind_drops_what_it_does_not_have_and_says_so(words: list[str]) -> None:
    file = {"method": {"name": "fedfsl_naive", "local_steps": 7, "inner": {"lr": 0.5}}}
    settings, notices = override(file, words)
    assert Config.of(settings).settings["method"]["local_steps"] == 7
    assert "inner" not in settings["method"]
    assert notices == [
        "ignored from the file: method.inner, set for 'fedfsl_naive'; method is now 'fl_proto'; "
        "method.local_steps stays"
    ]


def test_an_option_of_the_same_name_and_another_type_is_another_option() -> None:
    file = {"method": {"name": "fedbabu", "local_steps": 7, "probe": "finetune"}}
    settings, notices = override(file, ["--method", "fedavg_probe"])
    assert Config.of(settings).settings["method"]["probe"] == "mean"
    assert notices == [
        "ignored from the file: method.probe, set for 'fedbabu'; method is now 'fedavg_probe'; "
        "method.local_steps stays"
    ]


def test_a_partition_chosen_on_the_command_line_leaves_out_the_other_ones_options() -> None:
    file = {"partition": {"name": "dirichlet", "clients": 6, "alpha": 1.0}}
    settings, notices = override(file, ["--partition.name", "iid"])
    assert Config.of(settings).settings["partition"] == {"name": "iid", "clients": 6}
    assert "partition.alpha, set for 'dirichlet'" in notices[0]
    assert override({"model": {"head": {"way": 7}}}, ["--model.head", "none"])[1]


def test_the_order_of_the_words_does_not_matter() -> None:
    words = ["--partition.alpha", "2.0", "--partition.name", "dirichlet"]
    assert chosen(*words) == chosen(*words[2:], *words[:2])


def test_a_slip_in_the_file_is_not_dropped_with_the_other_kind() -> None:
    file = {"partition": {"name": "dirichlet", "alhpa": 1.0}}
    assert "'partition.alhpa'" in refusal(file, "--partition.name", "iid")


# Words for what does not fit.


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["--episode.shot", "5.5"],
            ["episode.shot is 5.5; expected a whole number of at least 1."],
        ),
        (
            ["--episode.shot", "true"],
            ["episode.shot is true; expected a whole number of at least 1."],
        ),
        (
            ["--episode.shot", "'5'"],
            ["is '5'; expected a whole number of at least 1. Leave out the quotes."],
        ),
        (
            ["--episode.way", "x"],
            ["is 'x'; expected a whole number or a list of 2 whole numbers, such as [1, 2]"],
        ),
        (["--split.random", "[1, 2]"], ["is [1, 2]; expected a list of 3 whole numbers"]),
        (["--run.rounds", "null"], ["run.rounds is null; expected a whole number of at least 1."]),
        (["--run.rounds", "{a: 1}"], ["run.rounds is {'a': 1}", "no options below it"]),
        (["--run", "5"], ["run is 5; expected keys and values below it: run.allocator,"]),
        (["--method.optimizer", "adamw"], ["Set method.optimizer.name. Valid: sgd, adam."]),
        (
            ["--method.optimizer.learning_rate", "1"],
            ["'method.optimizer.learning_rate'. Valid: method.optimizer.lr,"],
        ),
        (["--method.optimizer.lrr", "1"], ["Did you mean 'method.optimizer.lr'?"]),
        (["--foo", "{}"], ["there is no option 'foo'"]),
        (["--method.optimizer.name", "adm"], ["Did you mean 'adam'? Valid: adam, sgd."]),
        (["--method", "{name: [fl_proto]}"], ["method.name is ['fl_proto']", "fl_proto"]),
        (["--data.name", "npz"], ["data.path is not set", "--data.path VALUE"]),
        (["--data.channels", "2", "--data.name=folder", "--data.path=x"], ["expected 1 or 3"]),
        (["--seed", "x"], ["seed is 'x'; expected a whole number"]),
        (["--name", "a" * 101], ["up to 100 letters"]),
        (["rounds"], ["'rounds' is not an option; expected --section.key VALUE"]),
        (["--seed", "--name", "x"], ["--seed has no value"]),
    ],
)
def test_a_value_that_does_not_fit_is_told_in_plain_words(
    words: list[str], expected: list[str]
) -> None:
    text = refusal({}, *words)
    for part in expected:
        assert part in text


@pytest.mark.parametrize(
    ("option", "value", "fits"),
    [
        ("episode.shot", "5", True),
        ("episode.shot", "5.5", False),
        ("episode.shot", "x", False),
        ("episode.shot", "[", False),
        ("episode.way", "[1, 2]", True),
        ("run.threads", "null", True),
        ("method.optimizer.lr", "1e-2", True),
        ("method.optimizer.lr", ".nan", False),
    ],
)
def test_quotes_are_to_be_left_out_only_where_the_value_then_fits(
    option: str, value: str, fits: bool
) -> None:
    text = refusal({}, f"--{option}", f"'{value}'")
    assert text.startswith(f"{option} is '{value}'; expected ")
    assert text.endswith("Leave out the quotes.") == fits


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--run.threads", "99999999999999999999"], "of at least 1 and at most 1024 or null."),
        (["--run.threads", "0"], "expected a whole number of at least 1"),
        (["--run.rounds", "0"], "run.rounds is 0; expected a whole number of at least 1"),
        (["--seed", "99999999999999999999"], "expected a whole number of 64 bits"),
        (["--seed", "-99999999999999999999"], "expected a whole number of 64 bits"),
        (
            ["--test.episodes", "99999999999999999999999"],
            "expected a whole number of at most 1000000",
        ),
        (["--seed", "9" * 3000], "a number of 9966 bits"),
        (["--model.backbone", "{name: mlp, hidden: [100000000000000]}"], "and at most 65536"),
        (["--model.pixel_mean", ".nan"], "model.pixel_mean is nan; expected a finite number"),
        (["--method.optimizer.lr", ".inf"], "expected a finite number"),
        (["--method", "{name: fedfsl_naive, inner: {lr: .inf}}"], "method.inner.lr is inf"),
        (["--split.users", "[.nan, 0.1, 0.1]"], "expected a list of 3 finite numbers"),
        (["--partition", "{name: dirichlet, alpha: 0}"], "partition.alpha is 0; expected a number"),
        (["--partition", "{name: dirichlet, redraws: -1}"], "a whole number of at least 0"),
        (["--partition", "{name: shards, shards: 0}"], "a whole number of at least 1 or null"),
        (["--data", "{name: omniglot, size: 2000}"], "of at least 1 and at most 1024."),
        (["--data", "{name: folder, path: x, size: 10000}"], "of at least 1 and at most 8192 or"),
        (["--data", "{name: hf, path: x, image: x, channels: 4}"], "is 4; expected 1 or 3."),
        (["--data", "{name: sent140, users: 0}"], "data.users is 0; expected a whole number of at"),
        (["--episode.augment.jitter", "1.0"], "expected a number of at least 0 and below 1."),
        (["--test.group.spare", "-1"], "test.group.spare is -1; expected a whole number of at"),
    ],
)
def test_numbers_have_bounds(words: list[str], expected: str) -> None:
    assert expected in refusal({}, *words)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Config.of("digits"), "settings are 'digits'; expected keys and values"),
        (lambda: Config.of(None), "settings are None; expected keys and values"),
        (lambda: PreparedRun({}), "config is a dict; expected an object of type Config. Make one"),
        (
            lambda: Experiment({}, "runs/x"),
            "prepared is a dict; expected an object of type PreparedRun",
        ),
        (lambda: load(3), "path is 3; expected a path as text"),
    ],
)
def test_objects_of_another_type_are_refused_with_the_way_to_make_one(
    call: Callable[[], Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        call()


def test_an_empty_name_on_the_command_line_is_told_as_it_was_given() -> None:
    settings, _ = override({}, ["--name", ""])
    with pytest.raises(ConfigError, match="name is ''; expected up to 100 letters"):
        Config.of(settings)


def test_values_from_python_are_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"lr is inf; expected a finite number"):
        InnerLoop(lr=float("inf"))
    for options in ({"pixel_mean": float("nan")}, {"pixel_std": float("inf")}):
        with pytest.raises(ConfigError, match="finite"):
            Model(MLP(), None, (8, 8, 1), **options)
    with pytest.raises(ConfigError, match=r"hidden is \[\]: without a layer"):
        Proto(Model(MLP(hidden=()), None, (8, 8, 1)))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--method", "fedfsl_naive", "--method.lr", "1"],
         "Did you mean 'method.inner.lr' or 'method.optimizer.lr'? Valid: method.common_questions"),
        (["--method.lr", "1"], "Did you mean 'method.optimizer.lr'?"),
        (["--lr", "5"], "Did you mean 'method.optimizer.lr'?"),
        (["--.lr", "3"], "Did you mean 'method.optimizer.lr'?"),
        (["--method.optimizer.rl", "1"], "Did you mean 'method.optimizer.lr'?"),
        (["--nmae", "x"], "Did you mean 'name'?"),
        (["--methd", "fl_proto"], "there is no option 'methd'. Did you mean 'method'?"),
        (["--partitoin.name", "iid"], "Did you mean 'partition.name'?"),
        (["--methd.local_stps", "3"], "Did you mean 'method.local_steps'?"),
        (["--method.nme", "fl_proto"], "Did you mean 'method.name'?"),
        (["--...", "3"], "there is no option '...'"),
        (["--partition.alpha", "3"],
         "'partition.alpha' belongs to partition 'dirichlet' or 'clusters', not to 'iid', which "
         "has partition.clients. Remove it, or set partition.name to 'dirichlet'."),
        (["--method.inner", "3"], "'method.inner' belongs to method 'fedfsl_naive'"),
    ],
)  # fmt: skip
def test_an_unknown_option_gets_the_nearest_ones_however_deep(
    words: list[str], expected: str
) -> None:
    assert expected in refusal({}, *words)


# Defaults.


def test_a_partition_without_a_number_of_clients_has_ten() -> None:
    assert chosen()["partition"] == {"name": "iid", "clients": 10}
    assert chosen("--partition", "shards")["partition"]["clients"] == 10
    assert chosen("--partition", "users")["partition"]["clients"] is None
    assert chosen("--partition", "clusters")["partition"]["clients"] == 30


def test_an_empty_section_is_one_with_defaults(tmp_path: Path) -> None:
    assert Config.of(read(tmp_path, "run:\nmodel:\n")).settings == Config.of({}).settings


@pytest.mark.parametrize(
    ("method", "policy"),
    [
        ({"name": "fl_proto"}, "running"),
        ({"name": "fedfsl_naive"}, "support"),
        ({"name": "fsl_local"}, "support"),
        ({"name": "fsl_local", "learner_name": "proto"}, "running"),
        ({"name": "fedavg_probe"}, "running"),
        ({"name": "fedbabu"}, "running"),
        ({"name": "fedmeta"}, "support"),
    ],
)
def test_batch_norm_at_test_is_the_methods_choice_and_is_written_down(
    tmp_path: Path, method: dict[str, Any], policy: str
) -> None:
    config = Config.of({"method": method})
    assert config.settings["model"]["norm_policy"] == policy
    images = Dataset("i", np.zeros((2, 8, 8, 1), np.uint8), np.arange(2), ("a", "b"))
    made: Any = config.method(config.model.build(images), (0, 1), 3)
    assert made.model.norm_policy == policy
    assert getattr(made, "classes", (0, 1)) == (0, 1)
    config.write(tmp_path / "config.yaml")
    assert f"norm_policy: {policy}" in (tmp_path / "config.yaml").read_text()
    asked = Config.of({"method": method, "model": {"norm_policy": "transductive"}})
    assert asked.settings["model"]["norm_policy"] == "transductive"


@pytest.mark.parametrize("method", ["f2l", *slow(*sorted(METHODS.keys() - {"f2l"}))])
def test_what_is_written_is_read_back_the_same(tmp_path: Path, method: str) -> None:
    made = Config.of({"name": "010", "method": method, "split": {"base": [0, 1]}, "seed": -3})
    made.write(tmp_path / "config.yaml")
    again = Config.of(load(tmp_path / "config.yaml"))
    assert again.settings == made.settings
    assert difference(made.settings, again.settings) is None
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == made.settings


def test_ways_to_split_exclude_each_other() -> None:
    text = refusal({}, "--split.random", "[1, 1, 1]", "--split.users", "[0.5, 0.2, 0.3]")
    assert "split.random and split.users exclude each other" in text


# Parts that a program replaces.


def test_settings_say_what_a_replaced_part_is() -> None:
    """So does what was made of the old part: the method has the new episode."""
    config = Config.of({"method": "fl_proto", "partition": {"name": "iid", "clients": 4}})
    changed = replace(
        config,
        name="other",
        seed=7,
        data=Npz("mine.npz"),
        partition=Shards(3),
        episode=EpisodeSpec(way=3),
        run=replace(config.run, rounds=9),
        model=replace(config.model, backbone=MLP(hidden=(8,)), head=None),
    )
    told = changed.settings
    assert (told["name"], told["seed"], told["run"]["rounds"]) == ("other", 7, 9)
    assert told["data"] == {"name": "npz", "path": "mine.npz"}
    assert told["partition"] == {"name": "shards", "clients": 3, "per_client": 2, "shards": None}
    assert told["model"]["backbone"]["name"] == "mlp"
    assert told["model"]["head"] == {"name": "none"}
    assert Config.of(told).settings == told
    model = changed.model.of((4, 4, 1), None)
    assert changed.method(model, (0, 1, 2), 3).episode == EpisodeSpec(way=3)  # type: ignore[attr-defined]
    assert config.settings == Config.of(config.settings).settings


def test_settings_replaced_without_their_parts_are_refused() -> None:
    config = replace(Config.of({}), seed=1)
    other = Config.of({"seed": 2}).settings
    with pytest.raises(ConfigError, match=r"settings were replaced.*Config\.of\(settings\)"):
        replace(config, settings=other)
    assert replace(config, settings=other, seed=2).settings == other
    assert config.with_threads(3).settings["run"]["threads"] == 3


def test_a_part_that_settings_cannot_name_is_refused() -> None:
    class Mine(Iid):
        """A partition that is not registered."""

    config = Config.of({})
    with pytest.raises(ConfigError, match="partition is of type Mine, which no settings can name"):
        replace(config, partition=Mine(3))
    with pytest.raises(ConfigError, match=r"method is of type function.*Register the method"):
        replace(config, method=lambda *_: None)  # type: ignore[arg-type, return-value]


def test_data_of_a_program_are_recorded_by_their_hash() -> None:
    dataset = Digits().load(None)
    mine = {"name": "memory", "dataset": "digits", "digest": dataset.digest}
    for config in (
        Config.of({}).with_data(dataset),
        replace(Config.of({}), data=dataset),  # type: ignore[arg-type]
    ):
        assert config.settings["data"] == mine
        assert config.data.load(None) is dataset
    alone = Config.of({"data": mine})
    assert alone.settings["data"] == mine
    with pytest.raises(
        DataError, match=rf"'digits' was passed in Python, SHA-256 {dataset.digest}"
    ):
        alone.data.load(None)
