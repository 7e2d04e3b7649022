"""Runs with compressed messages: bytes, files, resuming, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedshot.config.load import Config
from fedshot.core.errors import ConfigError, DivergenceError
from fedshot.runs.prepare import PreparedRun

from .runs import CHOOSING, SMALL, experiment, finished, last_hash, merged, stopped

PROTO: dict[str, Any] = {"method": {"name": "fl_proto", "local_steps": 1}}
F2L = {"method": {"name": "f2l", "local_steps": 1, "transformer": {"hidden": 8}}}
TOPK: dict[str, Any] = {"compress": {"up": {"name": "topk", "share": 0.1}, "down": "int8"}}
SECURE: dict[str, Any] = {"compress": {"up": "int8"}, "run": {"secure_sums": True}}


def test_the_ledger_counts_what_is_sent(tmp_path: Path) -> None:
    """The perceptron has one matrix, 64 to 16, and a bias."""
    done = finished(tmp_path, PROTO, TOPK, {"run": {"rounds": 2}})
    replies, n, vectors = 2 * 4, 64 * 16, 4 * 16
    found = {(row["direction"], row["part"]): row["bytes"] / replies
             for row in done.meter.to_json() if row["phase"] == "train"}  # fmt: skip
    assert found["down", "theta"] == n + 4 + vectors
    assert found["up", "theta"] == 102 * 6 + 4 + vectors


def test_the_ledger_counts_what_a_secure_run_sends(tmp_path: Path) -> None:
    """Of 4 clients an integer has 10 bits: 2 * 127 * 4 + 1 values are below 2**10."""
    pytest.importorskip("cryptography", reason="secure sums need the extra `secure`")
    done = finished(tmp_path, PROTO, SECURE, {"run": {"rounds": 3}})
    found = {(row["direction"], row["part"]): row["bytes"] / 4
             for row in done.meter.to_json() if row["phase"] == "train"}  # fmt: skip
    n, others = 64 * 16, 8 * (16 + 1) + 160 * 3  # bias, largest value; weight, two metrics
    assert found["up", "masked"] == (8 * n + others) + 2 * (n * 10 // 8 + others)
    assert found["down", "ranges"] == 2 * 8


@pytest.mark.parametrize(
    ("method", "options"),
    [(PROTO, TOPK), (F2L, TOPK), (PROTO, SECURE)],
    ids=["errors", "errors and models", "errors and ranges"],
)
def test_a_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(
    method: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    if options is SECURE:
        pytest.importorskip("cryptography", reason="secure sums need the extra `secure`")
    whole = finished(tmp_path / "whole", method, options, CHOOSING)
    stopped(tmp_path / "halves", 2, method, options, CHOOSING)
    rest = finished(tmp_path / "halves", method, options, CHOOSING)
    assert last_hash(rest.folder) == last_hash(whole.folder)
    states = sorted(path.relative_to(whole.folder) for path in whole.folder.glob("clients/*/r*"))
    assert states
    for path in states:
        assert (rest.folder / path).read_bytes() == (whole.folder / path).read_bytes()
    assert rest.result() == whole.result()


@pytest.mark.parametrize("compressed", [False, True])
def test_a_secure_run_that_diverges_says_so(compressed: bool, tmp_path: Path) -> None:
    """In round 2, where replies are rounded to a range far below what a client may send."""
    pytest.importorskip("cryptography", reason="secure sums need the extra `secure`")
    method = {"name": "fl_proto", "local_steps": 1, "optimizer": {"name": "sgd", "lr": 1e3}}
    changes = {"method": method, "run": {"secure_sums": True, "rounds": 12}}
    run = experiment(tmp_path, changes, SECURE if compressed else {})
    with pytest.raises(DivergenceError, match="round 2"):
        list(run.run())


def test_settings_without_compression_are_those_of_older_versions() -> None:
    assert "compress" not in Config.of(SMALL).settings
    config = Config.of(merged(SMALL, {"compress": {"up": "int4"}}))
    assert config.settings["compress"] == {
        "up": {"name": "int4", "parts": None}, "down": {"name": "none"}, "error_feedback": True,
    }  # fmt: skip
    assert Config.of(config.settings) == config


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "topk down": ({"compress": {"down": "topk"}}, "compress.down.name is 'topk'"),
    "a share of nothing": ({"compress": {"up": {"name": "topk", "share": 0}}}, "above 0"),
    "secure sums of a few entries": (
        {"run": {"secure_sums": True}, "compress": {"up": "topk"}}, "only int8 and int4 give"
    ),
    "noise by the clients": (
        {**SECURE, "privacy": {"name": "client", "noise": 1.0, "delta": 0.01}},
        "integers of 8 bytes",
    ),
    "privacy of examples": (
        {"method": "fedncm", "privacy": {"name": "example", "noise": 1.0},
         "compress": {"up": {"name": "int8", "parts": ["sums"]}}},
        "rounding changes an upload",
    ),
    "models that are subtracted": (
        {"method": {"name": "fedfsl_mi", "reference": "exclusive"}, "compress": {"up": "int8"}},
        "subtract their own models",
    ),
    "collusion": ({"attack": "min_max", "compress": {"up": "int8"}}, "those of others"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_compression_does_not_suit_is_refused(case: str) -> None:
    changes, reason = REFUSED[case]
    if "privacy" in changes:
        pytest.importorskip("dp_accounting", reason="it needs the extra `privacy`")
    if "run" in changes:
        pytest.importorskip("cryptography", reason="secure sums need the extra `secure`")
    with pytest.raises(ConfigError, match=reason):
        PreparedRun(Config.of(merged(SMALL, PROTO, changes)))


@pytest.mark.parametrize(
    "changes",
    [
        {"aggregate": "median"},
        {"attack": {"name": "sign_flip", "fraction": 0.2}, "aggregate": "median"},
        {"privacy": {"name": "client", "noise": 1.0, "clip": 0.1, "delta": 0.01}},
        {"run": {"unreliable": {"drop": 0.1, "corrupt": 0.1}, "quorum": 0.2}},
    ],
    ids=" and ".join,
)
def test_compression_goes_together_with_what_the_server_does(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    if "privacy" in changes:
        pytest.importorskip("dp_accounting", reason="it needs the extra `privacy`")
    done = finished(tmp_path / "run", PROTO, TOPK, changes)
    other = finished(tmp_path / "plain", PROTO, changes)
    assert done.meter.total("train", "up") < other.meter.total("train", "up") / 3
    assert last_hash(done.folder) != last_hash(other.folder)


def test_a_method_without_averages_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"compress\.up has no effect"):
        finished(tmp_path, {"method": {"name": "fedncm"}, "compress": {"up": "int8"}})
