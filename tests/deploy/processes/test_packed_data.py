"""Hosts that pack what each has: as if all data were in one place, of the same bits."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from fedshot.data.dataset import Dataset
from fedshot.data.sources.digits import Digits
from fedshot.deploy.flower.data_files import clients_in

from .local_federation import LONG, alone, flower, own_port, program, until, weights, written

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
ORDER = sorted(NAMES)
SPLIT = {"base": NAMES[:5], "validation": NAMES[5:7], "novel": NAMES[7:]}
CLIENTS = 4  # two at each of two hosts, of which the last has no image of one of the classes


def digits() -> Dataset:
    """The digits by their names, which are in another order than their numbers."""
    held = Digits().load(None)
    y = np.array([ORDER.index(NAMES[c]) for c in held.y])
    rows = np.argsort(y, kind="stable")
    return Dataset("digits", held.pixels[rows], y[rows], tuple(ORDER))


def owners(data: Dataset) -> Any:
    """The client who holds each image, if a host has it and not the server."""
    found = np.arange(len(data)) % CLIENTS
    lacked = (data.y == ORDER.index("three")) & (found == CLIENTS - 1)
    trained = np.isin(data.y, [ORDER.index(name) for name in SPLIT["base"]])
    return np.where(trained, np.where(lacked, 0, found), 0)


def saved(path: Path, data: Dataset, rows: Any, users: Any = None) -> dict[str, Any]:
    """Write images of a host, who knows the classes that it has, and return its settings."""
    there = np.unique(data.y[rows])
    names = np.array([data.class_names[c] for c in there])
    parts = {} if users is None else {"users": users}
    y = np.searchsorted(there, data.y[rows])
    np.savez(path, x=data.pixels[rows], y=y, class_names=names, **parts)
    return {"data": {"name": "npz", "path": str(path)}}


def test_packed_data_train_to_the_bits_of_all_data_in_one_place(tmp_path: Path) -> None:
    data, home, port = digits(), tmp_path / "home", own_port()
    held = owners(data)
    split = {part: list(names) for part, names in SPLIT.items()}
    shared = {
        "name": "packed", "split": split, "run": {"cohort": 3}, "episode": {"way": 4},
        "method": {"name": "fsl_local", "learner_name": "proto", "local_steps": 2},
    }  # fmt: skip
    config = written(tmp_path, shared, {"partition": {"name": "iid", "clients": CLIENTS}})
    trained = np.isin(data.y, [ORDER.index(name) for name in SPLIT["base"]])
    pack = ("pack", "--config", config, "--data.name", "npz", "--data.path")
    for client in range(CLIENTS):
        rows = np.flatnonzero(trained & (held == client))
        path = saved(tmp_path / f"{client}.npz", data, rows)["data"]["path"]
        flower(*pack, path, "--client", client, "--to", tmp_path / f"host-{client % 2}")
    path = saved(tmp_path / "new.npz", data, np.flatnonzero(~trained))["data"]["path"]
    flower(*pack, path, "--tests", "--to", tmp_path / "tests")
    assert clients_in(tmp_path / "host-1") == [1, 3]
    flower("keys", "--server", "127.0.0.1", "--folder", home)
    with ExitStack() as stack:

        def start(log: str, *words: object) -> Any:
            file = stack.enter_context((tmp_path / log).open("w"))
            process = program("flower", *words, stdout=file, stderr=file)
            stack.callback(process.wait, LONG)
            stack.callback(process.terminate)
            return process

        start("server.log", "server", "--folder", home, "--port", port)
        until(lambda: "listening" in (tmp_path / "server.log").read_text(), "the server")
        for name in ("host-0", "host-1"):
            flower("keys", "--node", tmp_path / f"{name}.key")
            flower("keys", "--admit", tmp_path / f"{name}.pub", "--folder", home,
                   "--clients", f"{name[-1]},{int(name[-1]) + 2}", "--examples", 400)  # fmt: skip
            start(f"{name}.log", "node", "--server", f"127.0.0.1:{port}", "--ca", home / "ca.pem",
                  "--key", tmp_path / f"{name}.key", "--data", tmp_path / name,
                  "--state", tmp_path / f"{name}-state")  # fmt: skip
        words = ("--config", config, "--out", tmp_path / "runs", "--folder", home)
        flower("run", *words, "--tests", tmp_path / "tests", "--deadline", LONG,
               "--wait", LONG)  # fmt: skip
    there = tmp_path / "runs" / "packed"
    whole = saved(tmp_path / "whole.npz", data, np.arange(len(data)), held)
    here = alone(tmp_path / "alone", shared, whole, {"partition": {"name": "users"}})
    assert weights(there) == weights(here.folder)
    found = json.loads((there / "result.json").read_text())["test"]
    assert found["per_episode"] == list(here.result().per_episode)
