"""A run: from a configuration to records, checkpoints and a result.

`Experiment.run()` yields one record per round. Stopping is not calling `next`; there are no
callbacks. Whatever instant a process dies at, `run()` of a new `Experiment` on the same folder goes
on from the last complete round and ends in the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fedshot.checkpoint import Checkpoints
from fedshot.config import Chances, Config, difference
from fedshot.data import Deal, find_data_dir, unable
from fedshot.errors import CheckpointError, ConfigError, DataError, QuorumError
from fedshot.evaluation import Exam, ExamOptions, Score, score
from fedshot.fleets import (
    Guard,
    Host,
    Meter,
    PrivateStore,
    Sequential,
    Unreliable,
    by_chance,
)
from fedshot.keys import Key
from fedshot.protocol import Clients, Fleet, Method
from fedshot.recorder import Record, Recorder, environment
from fedshot.tree import Tree


class Setting:
    """What is fixed before round 1: data, split, partition, clients that take part, method.

    Everything that cannot work is refused here.

    Raises:
        DataError: the data is missing or too small for what is asked.
        ConfigError: options that contradict each other.
    """

    def __init__(self, config: Config, data_dir: str | None = None) -> None:
        self.config = config
        self.key = Key(config.seed)
        self.dataset = config.data.load(find_data_dir(data_dir))
        self.split = config.split.of(self.dataset, config.data.split(self.dataset), self.key)
        self.split.check(self.dataset)
        self.method: Method[Any] = config.method(config.model.build(self.dataset))
        _check_way(self.method, config)
        base = self.dataset.images_of(self.split.base)
        self.deal: Deal = config.partition.deal(
            self.dataset, base, self.key.at("partition"), config.episode
        )
        self.left_out = unable(self.dataset, self.deal.train, config.episode)
        self.clients = self._able()
        self.validation = self._exam("validation", config.test.validation_episodes)
        self.test = self._exam("novel", config.test.episodes)

    def exam(self, options: ExamOptions) -> Exam:
        """Draw a test of another shape from the novel classes."""
        key = Key(options.seed).at("exam", "novel")
        return Exam.draw(self.dataset, self.split.novel, options.spec, options.episodes, key)

    def _exam(self, part: str, episodes: int) -> Exam | None:
        classes = getattr(self.split, part)
        if not classes:
            return None
        options = self.config.test
        key = Key(options.seed).at("exam", part)
        try:
            return Exam.draw(self.dataset, classes, options.spec, episodes, key)
        except DataError as error:
            raise DataError(f"the {part} classes cannot fill the test: {error}") from None

    def _able(self) -> list[int]:
        run, n = self.config.run, len(self.deal.train)
        shown = [f"client {c} {reason}" for c, reason in sorted(self.left_out.items())]
        few = "; ".join(shown[:3]) + (f"; and {len(shown) - 3} more" if len(shown) > 3 else "")
        fix = "Lower episode.way, episode.shot or episode.query, or use fewer clients."
        if shown and run.unable == "refuse":
            raise DataError(
                f"{len(shown)} of {n} clients cannot form a {self.config.episode} episode: {few}. "
                f"{fix} Or set run.unable to 'leave_out' to go on without them."
            )
        if len(shown) == n:
            raise DataError(f"no client can form a {self.config.episode} episode: {few}. {fix}")
        return [c for c in range(n) if c not in self.left_out]


def _check_way(method: Method[Any], config: Config) -> None:
    way = max(config.episode.max_way, config.test.way)
    if method.max_way is not None and method.max_way < way:
        raise ConfigError(
            f"model.head.way is {method.max_way}; the widest episode has {way} classes. Set "
            f"model.head.way to {way}."
        )


class Experiment:
    """A run in a folder.

    Args:
        setting: what is fixed before round 1.
        folder: where the run lives; made when it does not exist.

    Raises:
        CheckpointError: the folder holds a run of another configuration or other data, or a
            damaged checkpoint.
    """

    def __init__(self, setting: Setting, folder: Path) -> None:
        self.setting, self.folder = setting, folder
        self.config, self.method = setting.config, setting.method
        torch.set_num_threads(self.config.run.threads)
        self.recorder = Recorder(folder)
        self.checkpoints = Checkpoints(folder / "checkpoints")
        self.store = PrivateStore(folder / "clients")
        host = Host(
            self.method, setting.dataset, setting.deal.train, self.store, setting.key.at("clients")
        )
        self.meter = Meter(Sequential(host))
        self.fleet: Fleet = Guard(self._rehearsed(self.meter))
        self.server: Tree = self.method.init(setting.key.at("init"))
        self.round, self.best_round = 0, 0
        self._best_accuracy = -1.0
        if self.checkpoints.rounds():
            self._resume()
        else:
            folder.mkdir(parents=True, exist_ok=True)
            self.config.write(folder / "config.yaml")
            self.store.rewind(-1)
            self.recorder.rewind(-1)
        self.recorder.write("environment.json", environment())

    def run(self) -> Iterator[Record]:
        """Train the rounds that are left, yielding a record for each."""
        if self.round == 0 and not self.checkpoints.rounds():
            yield self._close(Record(0), 0.0)
        while self.round < self.config.run.rounds:
            self.round += 1
            yield self._one_round()

    def result(self) -> Score:
        """Answer the test with the chosen round, and write result.json."""
        found = self.answer(self.setting.test) if self.setting.test else None
        assert found is not None
        self.recorder.write(
            "result.json",
            {
                "test": found.to_json(),
                "round": self.best_round,
                "chosen_by": "validation" if self.setting.validation else "last round",
                "bytes_down": self.meter.total("train", "down"),
                "bytes_up": self.meter.total("train", "up"),
                "seed": self.config.seed,
            },
        )
        return found

    def answer_untrained(self, exam: Exam) -> Score:
        """Let the method sit an exam with what it starts from: a floor."""
        return self._sit(exam, self.method.init(self.setting.key.at("init")), 0)

    def answer(self, exam: Exam) -> Score:
        """Let the chosen round sit an exam: the best on validation, else the last."""
        server, _ = self.checkpoints.read(self.best_round, self.server)
        return self._sit(exam, server, self.best_round)

    def _rehearsed(self, fleet: Fleet) -> Fleet:
        trouble = self.config.run.unreliable
        if trouble == Chances():
            return fleet
        key = self.setting.key.at("unreliable")
        plan = by_chance(key, drop=trouble.drop, delay=trouble.delay, corrupt=trouble.corrupt)
        return Unreliable(fleet, plan)

    def _one_round(self) -> Record:
        run, round = self.config.run, self.round
        clients = self._clients(round, "train")
        start, skipped = time.perf_counter(), None
        metrics: dict[str, float] = {}
        try:
            self.server, found = self.method.round(
                self.server, clients, self.setting.key.at("round", round)
            )
            metrics = dict(found)
        except QuorumError as error:
            self.fleet.void(round)
            if run.below_quorum == "stop":
                raise
            skipped = str(error)
        faults = tuple({"client": c, "kind": f.kind, "reason": f.reason} for c, f in clients.faults)
        record = Record(round, metrics, faults=faults, skipped=skipped)
        return self._close(record, time.perf_counter() - start)

    def _close(self, record: Record, seconds: float) -> Record:
        """Validate where it is due, and make the round last."""
        run, round, exam = self.config.run, record.round, self.setting.validation
        last = round == run.rounds
        validation = None
        if exam is None:
            self.best_round = round
        elif round % run.validate_every == 0 or last:
            validation = self._sit(exam, self.server, round)
            if validation.accuracy > self._best_accuracy:
                self.best_round, self._best_accuracy = round, validation.accuracy
        done = Record(
            **{name: getattr(record, name) for name in ("round", "metrics", "faults", "skipped")},
            validation=validation,
            best_round=self.best_round,
            bytes_down=self.meter.total("train", "down"),
            bytes_up=self.meter.total("train", "up"),
            seconds=seconds,
        )
        self.recorder.append(done)
        if round % run.checkpoint_every == 0 or last or round in (0, self.best_round):
            self._save()
        return done

    def _save(self) -> None:
        held = self.checkpoints.rounds()
        private = self.store.seal({*held, self.best_round, self.round})
        notes = {
            "round": self.round,
            "config": self.config.settings,
            "dataset": self.setting.dataset.digest,
            "best": [self.best_round, self._best_accuracy],
            "ledger": self.meter.to_json(),
            "private": private,
        }
        self.checkpoints.write(self.round, self.server, notes)
        self.recorder.write("ledger.json", self.meter.to_json())
        self.checkpoints.prune({self.round, self.best_round, *held[-1:]})

    def _resume(self) -> None:
        last = self.checkpoints.rounds()[-1]
        notes = self.checkpoints.notes(last)
        changed = difference(notes["config"], self.config.settings)
        if changed:
            raise CheckpointError(
                f"{self.folder} was started with another configuration: {changed}. Put it back, "
                "or start a new run under another name."
            )
        if notes["dataset"] != self.setting.dataset.digest:
            raise CheckpointError(
                f"{self.folder} was started on other data: the hash of dataset "
                f"{self.setting.dataset.name!r} differs. Put the data back, or start a new run."
            )
        self.server, _ = self.checkpoints.read(last, self.server)
        self.round = last
        self.best_round, self._best_accuracy = notes["best"]
        self.meter.load_json(notes["ledger"])
        self.store.digest = notes["private"]
        self.store.rewind(last)
        self.recorder.rewind(last)

    def _sit(self, exam: Exam, server: Tree, round: int) -> Score:
        key = self.setting.key.at("round", round, "exam")
        answers = self.method.evaluate(server, self._clients(round, "evaluate"), exam, key)
        return score(answers, exam, transductive=self.method.transductive)

    def _clients(self, round: int, phase: Any) -> Clients:
        run = self.config.run
        return Clients(
            self.fleet,
            self.setting.clients,
            cohort=run.cohort,
            quorum=run.quorum,
            round=round,
            phase=phase,
        )


def exists(folder: Path) -> bool:
    """Whether a folder holds a run."""
    return (folder / "config.yaml").exists()
