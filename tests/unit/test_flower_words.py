"""What the commands of `fedshot flower` refuse before they begin."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

import pytest

from fedshot.cli import main
from fedshot.errors import ConfigError

pytest.importorskip("cryptography", reason="the extra `flower` is not installed")
from fedshot.deploy.flower.home import (
    Home,
    check_secure,
    free_port,
    is_loopback,
    split,
)


@pytest.mark.parametrize("action", ["run", "up", "server"])
def test_without_flower_it_says_how_to_install_it(
    action: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert main(["flower", action]) == 2
    assert "pip install 'fedshot[flower]'" in capsys.readouterr().err


def test_another_version_of_flower_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "1.43.0")
    assert main(["flower", "up"]) == 2
    assert "flwr is 1.43.0; fedshot works with 1.41 and 1.42" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="Flower is not installed")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--deadline", "0.5"], "--deadline is 0.5; expected 1 second to a week"),
        (["up", "--nodes", "0"], "--nodes is 0; expected 1 to 100"),
        (["up", "--run.fleet", "vectorised"], "run.fleet is 'vectorised'"),
        (["run", "--rounds", "5"], "there is no option"),
        (["keys"], "say --server with its names, or --node"),
        (["node", "--server", "here", "--data", "x"], "'here' is no address"),
        (["node", "--server", "127.0.0.1:1", "--data", "x", "--ca", "y"], "--ca without --key"),
        (["node", "--server", "127.0.0.1:1", "--data", "nowhere"], "nowhere holds no client"),
        (["server", "--folder", "nowhere"], "fedshot flower keys --server 127.0.0.1"),
        (["run", "--folder", "nowhere"], "is no folder of a server"),
    ],
)
def test_what_cannot_work_is_refused_in_words(
    words: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["flower", *words]) == 2
    assert said in capsys.readouterr().err


def test_plain_text_stays_on_this_machine_unless_told_otherwise() -> None:
    assert is_loopback("127.0.0.1")
    assert is_loopback("::1")
    assert is_loopback("localhost")
    for host in ("10.0.0.1", "0.0.0.0", "::", "example.org", "localhost.example.org"):
        assert not is_loopback(host)
        with pytest.raises(ConfigError, match="is not this machine"):
            check_secure(host, secure=False, insecure=False)
        check_secure(host, secure=True, insecure=False)
        check_secure(host, secure=False, insecure=True)
    check_secure("127.0.0.1", secure=False, insecure=False)


def test_addresses() -> None:
    assert split("10.0.0.1:9092") == ("10.0.0.1", 9092)
    assert split("[::1]:80") == ("::1", 80)
    for text in ("10.0.0.1", ":80", "a:b", "a:0", "a:70000"):
        with pytest.raises(ConfigError, match="expected host:port"):
            split(text)
    assert 0 < free_port() < 65536


def test_a_token_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    home = Home(tmp_path / "server")
    token = home.token()
    assert len(token) == 64
    assert home.token() == token
    assert Home(tmp_path / "other").token() != token
    assert (tmp_path / "server" / "token").stat().st_mode & 0o077 == 0
