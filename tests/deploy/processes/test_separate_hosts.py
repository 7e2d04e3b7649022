"""Hosts that are really apart: three network namespaces, and a link that is cut for a minute."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from . import registered_method
from .local_federation import LONG, alone, flower, newest, until, written
from .test_killed import PRIVATE, merged, records, rounds

CUT = 30.0  # longer than Flower waits for a node: two heartbeats
SERVER, HOSTS = "fedshot-s", {"fedshot-a": "10.77.1", "fedshot-b": "10.77.2"}

pytestmark = pytest.mark.slow


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[None]:
    """A server's namespace and two nodes', each with a cable to the server."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("making network namespaces needs root, on Linux with iproute2")
    with ExitStack() as stack:
        for name in (SERVER, *HOSTS):
            try:
                ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespace can be made here: {error.stderr.decode()}")
            stack.callback(ip, "netns", "delete", name)
            ip("-n", name, "link", "set", "lo", "up")
        for name, net in HOSTS.items():
            far = f"veth-{name[-1]}"
            ip("link", "add", far, "netns", SERVER, "type", "veth",
               "peer", "name", "eth0", "netns", name)  # fmt: skip
            ip("-n", SERVER, "address", "add", f"{net}.1/24", "dev", far)
            ip("-n", name, "address", "add", f"{net}.2/24", "dev", "eth0")
            ip("-n", SERVER, "link", "set", far, "up")
            ip("-n", name, "link", "set", "eth0", "up")
        yield


class At:
    """Programs on one host, ended with the test."""

    def __init__(self, stack: ExitStack, logs: Path) -> None:
        self.stack, self.logs = stack, logs

    def start(self, host: str, log: str, *words: object) -> subprocess.Popen[str]:
        """Start fedshot on a host."""
        file = self.stack.enter_context((self.logs / log).open("a"))
        process = subprocess.Popen(
            ["ip", "netns", "exec", host,
             sys.executable, registered_method.__file__, *map(str, words)],
            stdout=file, stderr=file, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.stack.callback(_end, process)
        return process


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(LONG)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def test_a_host_that_was_cut_off_for_a_minute_takes_part_again(hosts: None, tmp_path: Path) -> None:
    change = merged(PRIVATE, {"name": "apart", "run": {"rounds": 5000, "cohort": None}})
    config, folder, home = written(tmp_path, change), tmp_path / "runs" / "apart", tmp_path / "home"
    with ExitStack() as stack:
        at = At(stack, tmp_path)
        flower("keys", "--server", *(f"{net}.1" for net in HOSTS.values()), "--folder", home)
        flower("partition", "--config", config, "--nodes", 2, "--to", tmp_path / "dealt")
        for name in HOSTS:
            here = "0,2,4" if name == "fedshot-a" else "1,3,5"
            flower("keys", "--node", tmp_path / f"{name}.key")
            flower("keys", "--admit", tmp_path / f"{name}.pub", "--folder", home, "--clients", here)
        at.start(SERVER, "server.log", "flower", "server", "--host", "0.0.0.0", "--folder", home)
        until(lambda: "listening" in (tmp_path / "server.log").read_text(), "the server")
        for i, (name, net) in enumerate(HOSTS.items()):
            words = ("flower", "node", "--server", f"{net}.1:9092", "--ca", home / "ca.pem",
                     "--key", tmp_path / f"{name}.key", "--data", tmp_path / "dealt" / f"node-{i}",
                     "--state", tmp_path / f"{name}-state")  # fmt: skip
            at.start(name, f"{name}.log", *words)
        run = at.start(
            SERVER, "run.log", "flower", "run", "--config", config, "--out", tmp_path / "runs",
            "--folder", home, "--tests", tmp_path / "dealt" / "server", "--deadline", 8,
        )  # fmt: skip
        until(lambda: rounds(folder) >= 2, "two rounds")
        assert _faulty(folder) == set()
        ip("-n", "fedshot-b", "link", "set", "eth0", "down")
        cut, before = time.monotonic(), rounds(folder)
        until(lambda: _faulty(folder, since=before) == {1, 3, 5}, "rounds without b")
        until(lambda: time.monotonic() > cut + CUT, "the cut")
        assert rounds(folder) > before + 1, "the others go on"
        ip("-n", "fedshot-b", "link", "set", "eth0", "up")
        until(lambda: _faulty(folder, since=rounds(folder) - 2) == set(), "b again")
        run.send_signal(signal.SIGINT)
        assert run.wait(LONG) == 130, (tmp_path / "run.log").read_text()
        last = rounds(folder) + 2
        text = (folder / "config.yaml").read_text().replace("rounds: 5000", f"rounds: {last}")
        (folder / "config.yaml").write_text(text)
        ended = at.start(SERVER, "run.log", "resume", folder)
        assert ended.wait(LONG) == 0, (tmp_path / "run.log").read_text()
    assert "unanswered" not in (tmp_path / "run.log").read_text(), "the chosen round is kept by all"
    faults = {(r["round"], fault["client"]) for r in records(folder) for fault in r["faults"]}
    assert {client for _, client in faults} == {1, 3, 5}
    here = alone(tmp_path / "alone", change, {"run": {"rounds": last}}, faults=faults)
    states = newest(tmp_path.glob("fedshot-*-state/*/clients/*"))
    assert states == newest((here.folder / "clients").glob("*"))


def _faulty(folder: Path, since: int = 0) -> set[int]:
    """Return the clients that were lost in the rounds after one."""
    return {fault["client"] for r in records(folder) if r["round"] > since for fault in r["faults"]}
