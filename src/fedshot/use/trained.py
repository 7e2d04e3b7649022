"""The chosen round of a finished or unfinished run, opened for predictions.

Only the run's folder is needed, no training data. Predictions come from the method's `evaluate`, in
the arithmetic of the run, so an episode of the run's test gets the same prediction as in the test.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedshot.core import tree
from fedshot.core.devices import CPU
from fedshot.core.errors import CheckpointError, ConfigError, DataError, as_path
from fedshot.core.seeds import Key
from fedshot.core.text import named_client, typed
from fedshot.core.tree import Tree
from fedshot.data.dataset import Features
from fedshot.data.encoders.encoded import features_of
from fedshot.data.encoders.frozen import Block, LoadedEncoder
from fedshot.data.episodes.episode import ClientData
from fedshot.data.files.places import find_data_dir
from fedshot.fleets.guard import Guard
from fedshot.fleets.host import Host
from fedshot.fleets.private import PrivateStore
from fedshot.learners.learner import EvalEpisode
from fedshot.nn.models.cost import step_flops
from fedshot.protocol.clients import Clients
from fedshot.protocol.method import Prediction
from fedshot.runs import run_folder
from fedshot.runs.dataset_info import DatasetInfo
from fedshot.runs.experiment import check_belongs, fleet_for
from fedshot.runs.prepare import FederatedDataset, threads_for, with_modules, workers_for

_BEFORE = 0  # the round before training


class TrainedRun:
    """The chosen round of a run: the best round on validation, or else the last saved round.

    Args:
        folder: the run's folder.
        data_dir: folder of datasets, for methods whose predictions need the clients' data.
        encoder: the module of `model.encoder`, if it was passed to the run in Python.
        backbone: the module of `model.backbone`, if it was passed to the run in Python.

    Raises:
        CheckpointError: the folder has no run or no checkpoint yet, or a file is missing or
            damaged.
    """

    def __init__(
        self, folder: Path | str, data_dir: str | None = None, *, encoder: Any = None,
        backbone: Any = None,
    ) -> None:  # fmt: skip
        self.folder, self._data_dir = as_path("folder", folder), data_dir
        config = run_folder.configuration(self.folder, any_device=True)
        self.config = with_modules(config, encoder, backbone)
        self.checkpoints = run_folder.checkpoints(self.folder)
        rounds = self.checkpoints.rounds()
        if not rounds:
            raise CheckpointError(
                f"{self.folder} has no checkpoint yet. Run `fedshot resume {typed(self.folder)}`."
            )
        last = self.checkpoints.notes(rounds[-1])
        self.trained_rounds: int = rounds[-1]
        self.round: int = last["best"][0]
        self.dataset_info = self._info(last["dataset"])
        check_belongs(self.folder, last, self.config, any_device=True)
        model = self.config.model.of(self.dataset_info.shape, self.dataset_info.table)
        spec = self.config.episode
        flops = step_flops(model, spec.max_way * (spec.shot + spec.query))
        self.config = self.config.with_threads(threads_for(flops, self.config.run.threads))
        self.method = self.config.method(model, self.dataset_info.base, self.dataset_info.dealt)
        self.model = model
        self._key = Key(self.config.seed)
        self._host = _Hosts(self)
        workers = workers_for(flops, self.config.run, text=self.dataset_info.is_text)
        self._fleet = Guard(fleet_for(self._host, self.config.run, workers))
        self._first = self.method.init(self._key.at("init"))
        self.server, notes = self.checkpoints.read(self.round, self._first)
        self._fleet.open(self.round, notes["private"])
        self.banked = "/" in notes["private"]  # the server keeps a bank of clients' models
        self._lock = Lock()  # torch's threads and rounding are global
        self._warn()

    def _warn(self) -> None:
        """Log a warning if the run has not finished, or its model is that before training."""
        warn, rounds = logging.getLogger("fedshot").warning, self.config.run.rounds
        if self.trained_rounds < rounds:
            warn("%s has trained %d of %d rounds", self.folder, self.trained_rounds, rounds)
        if self.round == _BEFORE:
            warn("%s predicts with the model of round 0, before training", self.folder)

    @property
    def keeps_private(self) -> bool:
        """Whether each client has its own state: a private one, or one that the server stores."""
        return self.banked or bool(tree.leaves(self._first_private))

    @cached_property
    def _first_private(self) -> Tree:
        return self.method.init_client(self.dataset_info.clients[0], self._key.at("clients"))

    def private(self, client: int) -> Tree:
        """Return the private state of a client after the chosen round."""
        return self._host.private(client, (self.round, 0))

    def remembered(self, client: int) -> Tree:
        """Return the state that the server stores for a client after the chosen round, or `{}`."""
        found: dict[str, Any] = {}
        for path, leaf in (self._fleet.bank.load(client, (self.round, 0)) or {}).items():
            *parents, name = path.split("/")
            node = found
            for parent in parents:
                node = node.setdefault(parent, {})
            node[name] = leaf
        return found

    def client_number(self, client: int | str) -> int:
        """Return the number of the client that is given by its number or its name.

        Raises ConfigError unless this client has its own trained model.
        """
        client = self.dataset_info.client_number(client)
        if not self.keeps_private:
            raise ConfigError(
                f"client is {client}, but the clients of {self.method.name} keep no models: the "
                "server's model predicts. Leave client out."
            )
        kept = self._host.store.load(client, (self.round, 0))
        trained = kept is not None or bool(self.remembered(client))
        if not trained and self.round != _BEFORE:
            raise ConfigError(
                f"client {client} was in no cohort up to the chosen round, {self.round}, so its "
                "model is untrained. Choose another client."
            )
        return client

    def logits(
        self, eval_episodes: Sequence[EvalEpisode], client: int | None = None
    ) -> list[Tensor]:
        """Return the logits [queries, way] of each episode.

        Args:
            eval_episodes: episodes of any way and shot, up to the method's `max_way`.
            client: the client whose model predicts, for methods whose clients keep models.

        Raises ConfigError if `client` is None but the method needs it, or given but not needed.
        """
        predictions = self.evaluate(eval_episodes, client)
        by_client = any(p.client is not None for p in predictions)
        if client is None and by_client:
            info = self.dataset_info
            first = ", ".join(named_client(c, info.client_names) for c in info.clients[:3])
            raise ConfigError(
                f"{self.method.name} predicts with the models of its clients. Set client to one "
                f"of {first}, ..."
            )
        if client is not None and not by_client:
            raise ConfigError(
                f"{self.method.name} predicts with the server's model. Leave client out."
            )
        found = {p.eval_episode: p.logits for p in predictions}
        if len(found) != len(eval_episodes):
            raise CheckpointError(
                f"{self.folder}: the model gave no usable prediction. Use another run."
            )
        return [found[u] for u in range(len(eval_episodes))]

    def evaluate(
        self, eval_episodes: Sequence[EvalEpisode], client: int | None = None
    ) -> list[Prediction]:
        """Return the method's predictions as in the test, by all clients or only by `client`."""
        ids = self.dataset_info.clients if client is None else (client,)
        clients = Clients(self._fleet, ids, quorum=0.0, round=self.round, phase="evaluate")
        key = self._key.at("round", self.round, "exam")
        with self._lock, self.config.run.arithmetic():
            server = tree.to(self.server, self.config.run.devices[0])
            return self.method.evaluate(server, clients, eval_episodes, key)

    @cached_property
    def encoder(self) -> LoadedEncoder:
        """The frozen encoder of `model.encoder`.

        Raises ConfigError if the run has none, or if it cannot be loaded or differs from the run's.
        """
        options = self.config.model.encoder
        if options is None:
            raise ConfigError(f"{self.folder} was trained without model.encoder.")
        kind, device = self.dataset_info.example_kind, str(self.config.run.devices[0])
        return options.load(kind, device, find_data_dir(self._data_dir))

    def encode(self, examples: Block) -> Features:
        """Return the features, float32 [n, d], of images or raw texts."""
        with self._lock:
            return np.concatenate(list(features_of(examples, self.encoder)))

    @cached_property
    def federated(self) -> FederatedDataset:
        """The run's data, split among the clients. Raises DataError if the data are missing."""
        return self.checked(FederatedDataset(self.config, self._data_dir))

    def checked(self, found: FederatedDataset) -> FederatedDataset:
        """Return the data. Raises DataError if they are not those of the run."""
        if found.dataset.digest != self.dataset_info.digest:
            raise DataError(
                f"{self.folder} was trained on other data: the hash of dataset "
                f"{self.dataset_info.name!r} differs. Restore the data."
            )
        return found

    def _info(self, digest: str) -> DatasetInfo:
        info = DatasetInfo.read(self.folder)
        if info.digest != digest:
            raise CheckpointError(
                f"{self.folder}: the dataset info of {info.name!r} does not belong to the "
                "checkpoint. Restore the folder from a copy."
            )
        return info


class _Hosts(Host):
    """The host of a run's clients, which reads their data only when the data are used."""

    def __init__(self, run: TrainedRun) -> None:
        super().__init__(
            run.method,
            None,  # type: ignore[arg-type]  # only `data`, overridden below, would read both
            None,  # type: ignore[arg-type]
            PrivateStore(run.folder / "clients"),
            Key(run.config.seed).at("clients"),
            run.config.run.devices,
        )
        self._run = run

    def data(self, client: int, device: torch.device = CPU) -> ClientData:
        del device
        return _LazyData(self._run, client)  # type: ignore[return-value]


class _LazyData:
    """A client's data, read on first access."""

    def __init__(self, run: TrainedRun, client: int) -> None:
        self._run, self._client = run, client

    def __getattr__(self, name: str) -> Any:
        federated = self._run.federated
        rows = federated.client_split.train[self._client]
        return getattr(ClientData(federated.dataset, rows), name)
