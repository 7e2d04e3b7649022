"""What the commands of `fedshot flower` refuse before they begin."""

from __future__ import annotations

import argparse
import errno
import importlib.metadata
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedshot.cli.main import main
from fedshot.config.load import Config
from fedshot.core.errors import AbsentError, BusyError, CheckpointError, ConfigError
from fedshot.core.serialised import CodecError, Limits

pytest.importorskip("flwr", reason="the extra `flower` is not installed")
import httpx

from fedshot.cli import flower
from fedshot.deploy.flower import flower_runs, local
from fedshot.deploy.flower.data_files import clients_in, notes_of, read_shards
from fedshot.deploy.flower.keys import CA_KEY, load_public_keys, make_node_key, make_server_keys
from fedshot.deploy.flower.processes import ChildError, Children
from fedshot.deploy.flower.server_folder import (
    CERTIFICATE,
    KEY,
    ServerFolder,
    check_free,
    check_secure,
    exposure_notice,
    free_port,
    is_loopback,
    make_private_folder,
    split_address,
    write_secret,
)
from fedshot.runs.prepare import PreparedRun
from system.runs import SMALL

pytestmark = pytest.mark.flower
NODE = ["node", "--server", "127.0.0.1:1", "--data", "x"]


@pytest.mark.parametrize("action", ["run", "server"])
def test_without_flower_it_says_how_to_install_it(
    action: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flwr", None)
    assert main(["flower", action]) == 2
    assert "pip install 'fedshot[flower]'" in capsys.readouterr().err


def test_another_version_of_flower_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "1.43.0")
    assert main(["flower", "up"]) == 2
    assert "flwr is 1.43.0; fedshot works with 1.41 and 1.42" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--deadline", "0.5"], "--deadline is 0.5; expected 1 second to a week"),
        (["up", "--nodes", "0"], "--nodes is 0; expected 1 to 100"),
        (["run", "--rounds", "5"], "there is no option"),
        (["keys"], "give --server with its host names, --node with a file for its key, or --admit"),
        (["keys", "--clients", "0-3", "--node", "x.key"], "only --admit takes --clients"),
        (["keys", "--admit", "x.pub"], "--admit needs --clients"),
        (["keys", "--admit", "no.pub", "--clients", "0"], "no.pub is not a public key"),
        (
            ["run", "--norm-multiple", "0.5"],
            "norm_multiple is 0.5; expected a finite number of at least 1",
        ),
        (["node", "--server", "here", "--data", "x"], "'here' is not an address"),
        ([*NODE, "--ca", "y"], "--ca needs --key"),
        (["node", "--server", "127.0.0.1:1", "--data", "nowhere"], "nowhere holds no client"),
        (
            ["server", "--folder", "nowhere", "--port", str(free_port())],
            "fedshot flower keys --server 127.0.0.1",
        ),
        (["run", "--folder", "nowhere"], "is not a server folder"),
        (["server", "--most-mb", "0"], "--most-mb is 0; expected 1 to"),
        (["server", "--port", "70000"], "--port is 70000; expected 1 to 65535"),
        ([*NODE, "--workers", "0"], "--workers is 0"),
        ([*NODE, "--device", "gpu"], "--device is 'gpu'; expected 'cpu', 'cuda'"),
        ([*NODE, "--device", "cuda:99"], "--device is 'cuda:99', and torch sees"),
        (["partition", "--to", "dealt", "--nodes", "99", "--data.name", "digits"], "--nodes is 99"),
        (["up", "--nodes", "99", "--data.name", "digits"], "would hold no client"),
        (["keys", "--server", "é.org"], "'é.org' is not a host name or address"),
        (["keys", "--server", "10.0.0.1:9092"], "Leave the port out"),
        (["keys", "--server", "a.org", "--days", "10000000"], "--days is 10000000; expected 1 to"),
        (["keys", "--node", "x.pub"], "x.pub is the name of the public key. Name the key x.key"),
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


@pytest.mark.parametrize("wait", ["nan", "-1", "inf"])
def test_no_run_waits_for_ever(
    wait: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    server = ServerFolder(tmp_path / "server")
    server.token()
    server.write_address("127.0.0.1", 1, secure=False, limits=Limits())
    words = ["run", "--folder", "server", "--wait", wait, "--data.name", "digits"]
    assert main(["flower", *words]) == 2
    assert "--wait is" in capsys.readouterr().err
    assert not list(tmp_path.rglob("flower.json")), "which `resume` would take for a run on nodes"


def test_keys_are_replaced_together_and_never_over_others(tmp_path: Path) -> None:
    make_server_keys(tmp_path / "server", ["a.org", "::1", "*.b.org"])
    before = {name: (tmp_path / "server" / name).read_bytes() for name in (KEY, CERTIFICATE)}
    make_server_keys(tmp_path / "server", ["a.org"])
    for name, old in before.items():
        assert (tmp_path / "server" / name).read_bytes() != old
    held = {path.name: path.read_bytes() for path in (tmp_path / "server").iterdir()}
    (tmp_path / "server" / CA_KEY).rename(tmp_path / "off-line")
    with pytest.raises(ConfigError, match="Bring it back from where you keep it"):
        make_server_keys(tmp_path / "server", ["a.org"])
    now = {path.name: path.read_bytes() for path in (tmp_path / "server").iterdir()}
    assert now == {name: data for name, data in held.items() if name != CA_KEY}
    (tmp_path / "b.pub").write_text("another's")
    with pytest.raises(ConfigError, match="belongs to another key"):
        make_node_key(tmp_path / "b.key")
    assert (tmp_path / "b.pub").read_text() == "another's"
    assert not (tmp_path / "b.key").exists()


def test_secrets_are_written_whole_for_their_owner_and_through_no_link(tmp_path: Path) -> None:
    elsewhere, path = tmp_path / "elsewhere", tmp_path / "secret"
    elsewhere.write_text("mine")
    path.symlink_to(elsewhere)
    write_secret(path, b"a secret")
    assert elsewhere.read_text() == "mine"
    assert not path.is_symlink()
    path.chmod(0o644)
    write_secret(path, b"another")
    assert path.read_bytes() == b"another"
    assert path.stat().st_mode & 0o777 == 0o600
    assert {p.name for p in tmp_path.iterdir()} == {"elsewhere", "secret"}


def test_what_clients_send_is_written_to_no_disk(tmp_path: Path) -> None:
    words = ServerFolder(tmp_path).command("127.0.0.1", 1, secure=False, limits=Limits())
    assert "--database" not in words
    assert not [word for word in words if str(tmp_path) in word]


def test_what_an_earlier_try_left_is_not_taken_for_dealt(tmp_path: Path) -> None:
    """Of another seed, or half of it: unless the run has begun, `up` writes them again."""
    first, second = (PreparedRun(Config.of({**SMALL, "seed": seed})) for seed in (0, 1))
    folder = tmp_path / "flower"
    local.prepare(folder, first, 2)
    first_key = (folder / "server" / "nodes" / "node-0.pub").read_bytes()
    (folder / "server" / "nodes" / "node-0.pub").unlink()
    clients = clients_in(folder / "node-1" / "data")
    local.prepare(folder, second, 2)
    held = read_shards(folder / "node-1" / "data")
    assert held.notes["deal"] == notes_of(second.dataset, second.client_split.train)["deal"]
    assert list(held.clients) == clients
    assert load_public_keys(folder / "server" / "nodes")["node-0"] == first_key
    (folder / "node-1" / "data").rename(folder / "node-1" / "data.partial")
    local.prepare(folder, second, 2, begun=True)
    assert clients_in(folder / "node-1" / "data") == clients
    assert not (folder / "node-1" / "data.partial").exists()
    for name in ("", "server", "node-0", "node-1"):
        assert (folder / name).stat().st_mode & 0o777 == 0o700


def test_keys_of_earlier_nodes_that_cannot_be_deleted_end_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would still be admitted."""
    prepared = PreparedRun(Config.of(SMALL))
    local.prepare(tmp_path, prepared, 2)

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(PermissionError):
        local.prepare(tmp_path, prepared, 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", "has no 'run'"),
        ('{"run": "a", "server": "s", "nodes": 0, "deadline": 9}', "has no 'life'"),
        ('{"run": 5}', "run is 5; input should be a valid string"),
        ("[]", "input should be a valid dictionary"),
    ],
)
def test_a_damaged_flower_json_is_named(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "flower.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"flower\.json is damaged: .*{words}"):
        flower_runs.Deployment.read(tmp_path)


class Nowhere:
    """An operator of a server without nodes."""

    limits, ca = Limits(), None

    @contextmanager
    def grid(self) -> Iterator[Nowhere]:
        yield self

    def get_nodes(self) -> list[Any]:
        return []


def test_a_run_that_never_began_leaves_nothing_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else `resume` of a later run on this machine would look for nodes."""
    monkeypatch.setattr(flower_runs, "operator_of", lambda _: Nowhere())
    prepared, folder, deployment = (
        PreparedRun(Config.of(SMALL)),
        tmp_path / "run",
        flower_runs.Deployment.new("s", 0, 9),
    )

    def opened(deployment: flower_runs.Deployment) -> Any:
        return flower_runs.open_experiment(
            prepared, folder, deployment, ServerFolder(tmp_path), [].append, wait=0.0
        )

    with pytest.raises(AbsentError, match="no node holds client"), opened(deployment):
        pass
    assert not (folder / "flower.json").exists()
    monkeypatch.setattr(flower_runs, "wait_for_clients", lambda *_: None)
    with opened(deployment):
        first = flower_runs.Deployment.read(folder).life
    assert not (folder / "flower.json").exists()
    with opened(deployment):
        (folder / "config.yaml").write_text("")  # it has begun
    copy = flower_runs.Deployment.read(folder)
    assert copy.life >= first
    with opened(copy):
        later = flower_runs.Deployment.read(folder).life
    assert later > copy.life
    monkeypatch.setattr(flower_runs.time, "time", lambda: later + 5.5)
    with opened(copy):  # the folder was restored from a copy
        assert flower_runs.Deployment.read(folder).life == later + 5


@pytest.mark.parametrize(("end", "retryable"), [("exit(2)", False), ("kill(getpid(), 9)", True)])
def test_a_node_that_ends_while_it_is_waited_for_ends_the_waiting(
    end: str, retryable: bool, tmp_path: Path
) -> None:
    """A node that refuses would refuse again; one that was killed for lack of memory may not."""

    class Nobody:
        def missing(self, clients: list[int]) -> list[int]:
            return clients

    with Children() as children:
        program = f"from os import *; print('its data are of another deal', flush=True); {end}"
        words = [sys.executable, "-c", program]
        children.start("node-0", words, tmp_path / "node-0.log")
        with pytest.raises(ChildError, match=r"node-0 has ended(.|\n)*of another deal") as error:
            flower_runs.wait_for_clients(Nobody(), [0], 60.0, print, children.check)  # type: ignore[arg-type]
        assert error.value.retryable == retryable


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
    assert split_address("10.0.0.1:9092") == ("10.0.0.1", 9092)
    assert split_address("[::1]:80") == ("::1", 80)
    for text in ("10.0.0.1", ":80", "a:b", "a:0", "a:70000", "a:²", "a:٣٤", "a:" + "1" * 5000):
        with pytest.raises(ConfigError, match="expected host:port"):
            split_address(text)
    assert 0 < free_port() < 65536


def test_a_port_that_is_taken_is_named_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match="no server can listen") as told:
            check_free("127.0.0.1", port)
    assert str(told.value).count(str(port)) == 1
    check_free("127.0.0.1", port)


@pytest.mark.parametrize("code", [errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT])
def test_addresses_of_a_family_that_this_machine_lacks_are_passed_over(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(code, "no such family")

    monkeypatch.setattr(socket, "create_server", refuse)
    check_free("127.0.0.1", 80)


def test_a_token_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    home = ServerFolder(tmp_path / "server")
    token = home.token()
    assert len(token) == 64
    assert home.token() == token
    assert ServerFolder(tmp_path / "other").token() != token
    assert (tmp_path / "server" / "token").stat().st_mode & 0o077 == 0


def test_a_folder_of_ours_is_closed_and_one_that_was_there_is_left_alone(tmp_path: Path) -> None:
    make_private_folder(tmp_path / "a" / "new")
    (tmp_path / "old").mkdir(mode=0o755)
    make_private_folder(tmp_path / "old")
    assert (tmp_path / "a" / "new").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "old").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *(("server.json", text) for text in ("", "{", "[]", "{}", "[" * 10**5, "\xff",
          '{"host": "h", "port": "x", "secure": true, "message": 1}',
          '{"host": "h", "port": 1e999, "secure": true, "message": 1}',
          '{"host": "h/", "port": 1, "secure": true, "message": 1}')),
        *(("token", text) for text in ("", "short", "\xff" * 64)),
        *(("ca.pem", text) for text in ("", "-----BEGIN", "\xff")),
    ],
)  # fmt: skip
def test_a_damaged_file_of_a_server_is_named(tmp_path: Path, name: str, damage: str) -> None:
    home = ServerFolder(tmp_path)
    make_server_keys(tmp_path, ["127.0.0.1"])
    home.token()
    home.write_address("127.0.0.1", 1, secure=True, limits=Limits())
    local.operator_of(home)
    (tmp_path / name).write_bytes(damage.encode("latin-1"))
    with pytest.raises(ConfigError, match=f"{name} is (damaged|not a certificate)") as told:
        local.operator_of(home)
    assert len(str(told.value)) < 600


@pytest.mark.skipif(os.name == "nt", reason="no such modes")
def test_a_secret_that_others_may_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    assert exposure_notice(path) == ""
    make_node_key(path)
    assert exposure_notice(path) == ""
    path.chmod(0o640)
    assert "can be read by other users (mode 0640)" in exposure_notice(path)


def test_no_python_file_of_the_working_folder_is_run_by_what_is_started(tmp_path: Path) -> None:
    """Of a server and of nodes, whose working folder is whatever folder somebody is in."""
    (tmp_path / "httpx.py").write_text("open('ran', 'w').close()")
    make_server_keys(tmp_path, ["127.0.0.1"])
    server = ServerFolder(tmp_path).command("127.0.0.1", 1, secure=True, limits=Limits())
    for words in (server, local.PROGRAM):
        code = [*words[: words.index("-m")], "-c", "import httpx; print(httpx.__file__)"]
        done = subprocess.run(code, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert "site-packages" in done.stdout
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "error",
    [
        httpx.ConnectError("all attempts failed"),
        httpx.ReadTimeout("timed out"),
        httpx.HTTPStatusError(
            "500 Internal Server Error",
            request=httpx.Request("POST", "https://here"), response=httpx.Response(500),
        ),
        CodecError("a response of 9999999 bytes"),
    ],
)  # fmt: skip
def test_a_server_that_cannot_register_its_nodes_ends_with_the_reason(
    error: Exception,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def register(_: Any) -> None:
        raise error

    make_server_keys(tmp_path, ["127.0.0.1"])
    idle = [sys.executable, "-c", "print('it listens', flush=True); input()"]
    monkeypatch.setattr(ServerFolder, "command", lambda *_, **__: idle)
    operator = SimpleNamespace(ready=lambda: True, register=register)
    monkeypatch.setattr(local, "operator_of", lambda _: operator)
    assert main(["flower", "server", "--folder", str(tmp_path), "--port", str(free_port())]) == 75
    said = capsys.readouterr().err
    assert f"the server did not register the nodes: {error}. Start it again" in said


def test_a_server_whose_folder_was_deleted_and_made_anew_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another server may hold the lock of the new folder."""
    folder = tmp_path / "server"

    def replace_folder(_: float) -> None:
        shutil.rmtree(folder)
        folder.mkdir()
        (folder / ".lock").touch()

    monkeypatch.setattr(local, "start_server", lambda *_, **__: SimpleNamespace(ended=False))
    monkeypatch.setattr(flower.time, "sleep", replace_folder)
    options = argparse.Namespace(
        folder=folder, host="127.0.0.1", port=1, insecure=True, most_mb=1, metrics=None
    )
    with pytest.raises(BusyError, match="server was deleted or replaced while this process"):
        flower.server(options)
