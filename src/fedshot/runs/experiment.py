"""A run: training with records, checkpoints and a result.

`Experiment.run()` yields one record per round; to stop training early, stop iterating. If the
process is killed at any time, `run()` of a new `Experiment` on the same folder continues from the
last complete round, with bitwise equal results. Opening an experiment changes nothing on the disk,
so a run can be evaluated while it trains.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from fedshot import __version__
from fedshot.config.load import Config
from fedshot.config.registry import difference, is_diagnostic, plugins_in
from fedshot.config.schema import RunOptions, not_honest
from fedshot.core import tree
from fedshot.core.devices import described
from fedshot.core.errors import (
    BusyError,
    CheckpointError,
    FedshotError,
    QuorumError,
    as_path,
    check_kind,
)
from fedshot.core.locks import Lock
from fedshot.core.machine import keep_freed_memory
from fedshot.core.text import count, joined, named_client
from fedshot.core.tree import Tree
from fedshot.data.sources.in_memory import InMemory
from fedshot.evaluation.backdoor_test import TriggeredEpisodes, success_rate
from fedshot.evaluation.episodic_test import EpisodicTest, Score, ValidationResult, score
from fedshot.evaluation.raw_baselines import raw_baselines
from fedshot.fleets.asynchronous import Asynchronous
from fedshot.fleets.attacks import Backdoor
from fedshot.fleets.client_checks import checked_init, checked_round
from fedshot.fleets.client_times import Availability, ClockOptions, speeds, times_digest
from fedshot.fleets.clock import Clock
from fedshot.fleets.compressing import ClientSide, Compressed
from fedshot.fleets.guard import Guard
from fedshot.fleets.host import Host
from fedshot.fleets.liars import Colluding, Liars
from fedshot.fleets.meter import Meter
from fedshot.fleets.private import PrivateStore
from fedshot.fleets.sequential import Sequential
from fedshot.fleets.streams import Streams
from fedshot.fleets.threads import Threads
from fedshot.fleets.unreliable import Chances, Unreliable, by_chance
from fedshot.fleets.vectorised import Vectorised
from fedshot.fleets.worker_processes import Processes
from fedshot.methods import user_methods as own
from fedshot.protocol.aggregators import PlainMean, most_dishonest
from fedshot.protocol.clients import Clients, reduce_replies
from fedshot.protocol.exchange import Exchange, Fleet, Outcome
from fedshot.protocol.robust_reducers import Aggregation
from fedshot.runs import dataset_info, run_folder, trust
from fedshot.runs.prepare import PreparedRun
from fedshot.runs.private_runs import PrivacyLedger, client_noise
from fedshot.runs.recorder import Record, Recorder, Stop

# Settings that may change on resuming, since they do not affect what a round computes.
MAY_CHANGE = (
    "run.rounds", "run.quorum", "run.below_quorum", "run.checkpoint_every", "run.fleet",
    "run.workers", "run.allocator", "model.encoder.cache",
)  # fmt: skip

_TRIGGERED = 200  # episodes of a test of a backdoor


class Experiment:
    """A run in a folder.

    Args:
        prepared: the prepared run.
        folder: folder of the run; created when the run starts.
        remote_fleet: takes this machine's fleet and returns the fleet to use, for clients that run
            on other machines.
        around: takes the fleet whose replies are counted and decoded, and returns the one to use.
        keep_validated: keep the checkpoints of all validated rounds, not only of the chosen and
            the last round.
        anew: start over in place of the folder's run, which has trained no round: see `discard`.

    Raises:
        CheckpointError: the folder holds a run with another configuration or other data, a damaged
            checkpoint, or records without checkpoints.
    """

    def __init__(
        self,
        prepared: PreparedRun,
        folder: Path | str,
        remote_fleet: Callable[[Fleet], Fleet] = lambda here: here,
        *,
        around: Callable[[Fleet], Fleet] = lambda fleet: fleet,
        keep_validated: bool = False,
        anew: bool = False,
    ) -> None:
        check_kind(
            "prepared", prepared, PreparedRun, "Make one with PreparedRun(Config.of(settings))."
        )
        folder = as_path("folder", folder)
        self.prepared, self.folder, self._keep_validated = prepared, folder, keep_validated
        self.config, self.method = prepared.config, prepared.method
        self.recorder = Recorder(folder)
        self.checkpoints = run_folder.checkpoints(folder)
        attack, clients = self.config.attack, len(prepared.client_split.train)
        self.liars = Liars(attack, prepared.key, clients) if attack is not None else None
        host = Host(
            self.method,
            prepared.dataset,
            prepared.client_split.train,
            PrivateStore(folder / "clients"),
            prepared.key.at("clients"),
            self.config.run.devices,
            self.liars,
            ClientSide(self.config.compress),
        )
        fleet: Fleet = fleet_for(host, self.config.run, prepared.workers)
        if self.liars is not None:
            fleet = Colluding(fleet, self.liars)
        self._combine: Callable[[Fleet, Exchange], Outcome] = reduce_replies
        self._ranges: dict[str, float] = {}  # of compressed uploads in secure sums
        if self.config.run.secure_sums:
            from fedshot.privacy.secure_sums.masking_clients import MaskingClients, simulated
            from fedshot.privacy.secure_sums.public_ranges import PublicRanges
            from fedshot.privacy.secure_sums.server_sum import SecureSums

            noise, up = client_noise(self.config, clients), self.config.compress.up
            ranges = None if up is None else PublicRanges(up, self._ranges)
            fleet = MaskingClients(fleet, simulated, noise)
            self._combine = SecureSums(self.config.run.secure_threshold, noise, ranges)
        remote = remote_fleet(fleet)
        self._ledger = PrivacyLedger(prepared.privacy, folder, secret=remote is not fleet)
        self.meter = Meter(remote)
        self._compressed = Compressed(self.meter, self.config.compress)
        fleet = around(self._compressed)
        chances = self.config.run.unreliable
        if chances != Chances():
            plan = by_chance(prepared.key.at("unreliable"), **asdict(chances))
            fleet = Unreliable(fleet, plan)
        self.clock = self._clock_around(guard := Guard(fleet), prepared)
        self.fleet: Fleet = self.clock or guard
        self._aggregation: Aggregation | None = None
        if self.liars is not None or self.config.aggregate != PlainMean():
            self._aggregation = Aggregation(self.config.aggregate, folder)
        self.server: Tree = checked_init(self.method, prepared.key.at("init"))
        self.round, self.best_round = 0, 0
        self.baselines: dict[str, Score] = {}  # on the test; set by `result`
        self._best: ValidationResult | None = None
        self._private = self._in_flight = ""
        self._lock: Lock | None = None
        self._last_end: float | None = None  # of the previous round, by the monotonic clock
        self._anew = anew
        self.begun = not anew and bool(
            self.checkpoints.rounds()
        )  # has a checkpoint to continue from
        if self.begun:
            self._read()
        elif not anew and (
            trained := max((r["round"] for r in self.recorder.records()), default=0)
        ):
            raise self._lost(f", and records of {count(trained, 'round')}")

    def run(self) -> Iterator[Record]:
        """Train the remaining rounds and yield a record for each.

        Raises BusyError if another process trains in the same folder or the folder is deleted, and
        CheckpointError if the run already has more rounds than run.rounds.
        """
        if self.config.run.allocator == "keep":
            keep_freed_memory()
        with self.alone() as self._lock:
            self.refresh()
            if self.round > self.config.run.rounds:
                raise CheckpointError(
                    f"{self.folder} has trained {count(self.round, 'round')}, but run.rounds is "
                    f"{self.config.run.rounds}. Set it to {self.round} or more."
                )
            self._begin()
            self._last_end = None
            if not self.begun:
                yield self._recorded(lambda: self._close(Record(0), 0.0))
            while self.round < self.config.run.rounds:
                self.round += 1
                yield self._recorded(self._one_round)

    def _recorded(self, one_round: Callable[[], Record]) -> Record:
        """Run a round; if an error ends it, write the error to stopped.json."""
        try:
            with self.config.run.arithmetic():
                return one_round()
        except (FedshotError, OSError, MemoryError) as error:
            reason = str(error).removeprefix(f"round {self.round}: ") or type(error).__name__
            stop: Stop = {"round": self.round, "reason": reason}
            with suppress(OSError, BusyError):  # of a full disk, or a folder that is gone
                if self._lock is not None:
                    self._lock.check()
                self.recorder.write(run_folder.STOPPED, stop, sync=False)
            raise

    @property
    def spent(self) -> dict[str, Any]:
        """The entry "privacy" of result.json so far: level, epsilon, etc.; {} without privacy."""
        return self._ledger.spent(self.round)

    def discard(self) -> None:
        """Delete the run that this one replaces, if any; the caller holds the folder's lock."""
        if self._anew:
            run_folder.clear(self.folder)
        self._anew = False

    def alone(self) -> AbstractContextManager[Lock]:
        """Lock the run's folder, so that only this process trains in it: see `run_folder.alone`."""
        return run_folder.alone(self.folder)

    def notices(self) -> list[str]:
        """Return messages for the user before a run starts or resumes."""
        found = self.prepared.notices()
        if self.liars is not None:
            named = joined([
                f"client {named_client(one, self.prepared.client_names)}"
                for one in sorted(self.liars.clients)
            ])  # fmt: skip
            found.append(
                f"attack.name is {self.config.settings['attack']['name']!r}; dishonest from round "
                f"{self.liars.attack.from_round} on: {named or 'no client'}"
            )
            fraction = getattr(self.config.aggregate, "fraction", None)
            liars, clients = len(self.liars.clients), len(self.prepared.client_split.train)
            if fraction is not None and liars > (f := most_dishonest(fraction, clients)):
                found.append(
                    f"{liars} of {clients} clients are dishonest; with aggregate.fraction "
                    f"{fraction:g} the aggregation is made for {f}."
                )
        resumes = self.begun and self.round < self.config.run.rounds
        if resumes and (changes := self.recorder.changes(self.round, self._environment)):
            found.append(
                f"from round {self.round + 1} on, results may differ bitwise from an uninterrupted "
                f"run: {'; '.join(changes)}."
            )
        return found

    def refresh(self) -> None:
        """Read the last checkpoint if another process has trained since.

        Raises CheckpointError if the run's checkpoints are gone.
        """
        held = self.checkpoints.rounds()
        if self.begun and not held:
            raise self._lost()
        if held and (not self.begun or held[-1] != self.round):
            self._read()
            self.begun = True

    def result(self) -> Score:
        """Test the chosen round and write result.json.

        The file is written before the raw baselines are computed, and again to include them.
        """
        found, traffic = self._counted(self.prepared.test, self.chosen(), self.best_round)
        marks = not_honest(self.config.settings)
        result = {
            "test": found.to_json(),
            "rounds": self.round,
            "round": self.best_round,
            **self._protocol(),
            "bytes_down": self.meter.total("train", "down"),
            "bytes_up": self.meter.total("train", "up"),
            "ledger": traffic,
            "seed": self.config.seed,
            **({} if self.clock is None else {"hours": self.clock.now / 3600}),
            **({"privacy": spent} if (spent := self.spent) else {}),
            **({"not_honest": marks} if marks else {}),
            **self._attack_result(),
        }
        self.recorder.write(run_folder.RESULT, result, sync=True)
        self.baselines = self.raw_baselines(self.prepared.test)
        result["baselines"] = {name: one.to_json() for name, one in self.baselines.items()}
        self.recorder.write(run_folder.RESULT, result, sync=True)
        return found

    def raw_baselines(self, episodic_test: EpisodicTest) -> dict[str, Score]:
        """Return the score of each raw baseline on a test, by name.

        Raw baselines classify pixels, word vectors or word counts without a trained encoder.
        """
        with self.config.run.arithmetic():
            return raw_baselines(self.prepared.dataset, episodic_test)

    def _protocol(self) -> dict[str, Any]:
        """Return the entries of result.json that describe the test and the choice of the round."""
        own, test = self.prepared.own_tests, self.prepared.test
        validated = any(record["validation"] for record in self.recorder.records())
        by = "test classes" if self._validation is test else "validation"
        return {
            "chosen_by": by if validated and self._chooses else "last round",
            "own": own,
            "split": "classes" if self.config.split.users is None else "users",
            "shape": {"way": list(test.ways), "shot": None if own else self.config.test.shot},
        }

    def _attack_result(self) -> dict[str, Any]:
        """Return the dishonest clients and the success rate of a backdoor, for result.json."""
        if self.liars is None:
            return {}
        found: dict[str, Any] = {"liars": sorted(self.liars.clients)}
        if isinstance(self.liars.attack, Backdoor):
            found["backdoor"] = self._backdoor_success()
        return {"attack": found}

    def _backdoor_success(self) -> float | None:
        """Return the share of the other classes' triggered queries that are assigned to class 0.

        The model is that of the chosen round. Returns None if there are no such queries.
        """
        device, test = self.config.run.devices[0], self.prepared.test
        server, clients = self.chosen(), self._clients(self.best_round, "evaluate")
        key = self.prepared.key.at("round", self.best_round, "backdoor")
        triggered = TriggeredEpisodes(
            test.eval_episodes.on(device), self.prepared.dataset, _TRIGGERED
        )
        ledger = self.meter.to_json()
        try:
            with self.config.run.arithmetic():
                predictions = self.method.evaluate(tree.to(server, device), clients, triggered, key)
        finally:
            self.meter.load_json(ledger)
        return success_rate(predictions, test)

    @property
    def _chooses(self) -> bool:
        """Whether validation chooses the round to test."""
        return self._validation is not None and self.config.run.choose != "last"

    @property
    def _validation(self) -> EpisodicTest | None:
        """The test that is evaluated during training and may choose the round to test."""
        peeks = self.config.run.choose == "best_on_test_classes"
        return self.prepared.test if peeks else self.prepared.validation

    def evaluate(self, episodic_test: EpisodicTest) -> Score:
        """Evaluate the chosen round on a test; the run and its count of bytes do not change.

        The chosen round is the round with the best validation accuracy, or without validation the
        last round that has a checkpoint. Raises CheckpointError if that checkpoint is missing.
        """
        return self.evaluate_state(episodic_test, self.chosen(), self.best_round)

    def chosen(self) -> Tree:
        """Return the server's state after the chosen round; make the clients' states then readable.

        Raises CheckpointError if the checkpoint of the round does not exist.
        """
        if not run_folder.begun(self.folder):
            raise CheckpointError(
                f"{self.folder} holds no run yet: no round has been trained. Train first with "
                "`run()` of this experiment, as in `for record in experiment.run(): ...`."
            )
        server, notes = self.checkpoints.read(self.best_round, self.server)
        self.fleet.open(self.best_round, notes["private"])
        return server

    def evaluate_untrained(self, episodic_test: EpisodicTest) -> Score:
        """Evaluate the method's initial state on a test, as a baseline."""
        first = self.method.init(self.prepared.key.at("init"))
        return self.evaluate_state(episodic_test, first, -1)

    def evaluate_state(self, episodic_test: EpisodicTest, server: Tree, round: int) -> Score:
        """Evaluate `server` as the state after `round`; the run's byte counts do not change."""
        return self._counted(episodic_test, server, round)[0]

    def _counted(
        self, episodic_test: EpisodicTest, server: Tree, round: int
    ) -> tuple[Score, list[dict[str, Any]]]:
        """Return a server state's score, and the bytes of its evaluation as rows of ledger.json."""
        ledger, clients = self.meter.to_json(), self._clients(round, "evaluate")
        self.meter.load_json([])
        try:
            with self.config.run.arithmetic():
                found = self._evaluate(episodic_test, server, round, clients)
            return found, self.meter.to_json()
        finally:
            self.meter.load_json(ledger)

    def _one_round(self) -> Record:
        clients = self._clients(self.round, "train")
        self._ledger.charge(self.round)
        start, skipped = time.perf_counter(), None
        metrics: dict[str, float] = {}
        measured = [] if self._aggregation is None else self._aggregation.measured
        measured.clear()
        try:
            self.server, metrics = checked_round(
                self.method, self.server, clients, self.prepared.key.at("round", self.round)
            )
        except QuorumError as error:
            self.fleet.void(self.round)
            if self.config.run.below_quorum == "stop":
                raise
            skipped = error.reason
        metrics = {**metrics, **{f"clip_{name}": clip for name, clip in self._ledger.clips.items()}}
        record = Record(
            self.round, metrics, faults=_faults(clients), skipped=skipped,
            exchanges=clients.exchanges, extreme=trust.extreme(measured), late=_late(clients),
        )  # fmt: skip
        if self.liars is not None:
            self.liars.check_changed()
        if skipped is None:
            self._compressed.check_used()
        return self._close(record, time.perf_counter() - start)

    def _clock_around(self, fleet: Fleet, prepared: PreparedRun) -> Clock | None:
        """Return the clock around a fleet; None for a run without simulated time."""
        options, key = self.config.run.clock, prepared.key.at("clock")
        if options == ClockOptions():
            return None
        train, method = prepared.client_split.train, self.config.settings["method"]
        trace = options.availability
        sizes, steps = train.sizes, method.get("prepare_steps") or method.get("local_steps") or 1
        self._times = times_digest(options)
        arguments = (
            fleet,
            self.meter,
            options,
            speeds(options, len(train), key),
            lambda client: float(sizes[client] if options.unit == "example" else steps),
            None if trace is None else Availability.read(Path(trace), len(train)),
        )
        if not options.asynchronous:
            return Clock(*arguments)
        at_once = self.config.run.cohort or len(prepared.clients)
        return Asynchronous(at_once, self.checkpoints.folder, *arguments)

    def _liars_in(self, round: int) -> frozenset[int]:
        lie = self.liars is not None and round >= self.liars.attack.from_round
        return self.liars.clients if self.liars is not None and lie else frozenset()

    def _close(self, record: Record, seconds: float) -> Record:
        """Validate if due, then record and checkpoint the round."""
        run, round, episodic_test = self.config.run, record.round, self._validation
        last = round == run.rounds
        due = round % run.checkpoint_every == 0 or last or round == 0
        validation, faults = None, record.faults
        if due and not self._chooses:
            self.best_round = round
        if episodic_test is not None and (round % run.validate_every == 0 or last):
            clients = self._clients(round, "evaluate")
            try:
                validation = self._evaluate(episodic_test, self.server, round, clients)
            except QuorumError:  # the round itself still counts
                if run.below_quorum == "stop":
                    raise
            faults += _faults(clients)
            result = ValidationResult.of(validation) if validation else None
            if self._chooses and (result.beats(self._best) if result else self._best is None):
                self.best_round, self._best = round, result
        before, self._last_end = self._last_end, time.monotonic()
        done = replace(
            record,
            faults=faults,
            validation=validation,
            best_round=self.best_round,
            bytes_down=self.meter.total("train", "down"),
            bytes_up=self.meter.total("train", "up"),
            seconds=seconds,
            elapsed=None if before is None else self._last_end - before,
            ended=datetime.now(UTC).isoformat(timespec="milliseconds"),
            epsilon=self._ledger.epsilon(round),
            simulated=None if self.clock is None else self.clock.now,
        )
        if self._lock is not None:
            self._lock.check()  # so that no two processes write to one folder
        if self._aggregation is not None and round:
            trust.append(self.folder, round, self._liars_in(round), self._aggregation.measured)
        self.recorder.append(done)
        if due or round == self.best_round or (validation and self._keep_validated):
            self._save()
        return done

    def _lost(self, besides: str = "") -> CheckpointError:
        return CheckpointError(
            f"{self.checkpoints.folder} holds no checkpoint any more{besides}. Restore it from a "
            "copy, or start a new run under another name."
        )

    def _begin(self) -> None:
        """Prepare the folder for training: delete everything after the last complete round."""
        if self.round < self.config.run.rounds:
            (self.folder / run_folder.RESULT).unlink(missing_ok=True)  # a result of fewer rounds
        (self.folder / run_folder.STOPPED).unlink(missing_ok=True)
        self.config.write(self.folder / run_folder.CONFIG)
        if not self.begun or not (self.folder / dataset_info.FILE).exists():
            self.prepared.dataset_info().write(self.folder)
        last = self.round if self.begun else -1
        self.fleet.rewind(last, self._private)
        if isinstance(self.clock, Asynchronous) and last < self.config.run.rounds:
            self.clock.load(last, self._in_flight)
        self.recorder.rewind(last)
        trust.rewind(self.folder, last)
        if self.begun:
            self._after_checkpoint()  # the process may have been killed before this
        self._best = self._best_so_far() if self.begun else None
        if last < self.config.run.rounds:  # else there is nothing to train
            changed = None
            if self.begun:  # a changed fleet is noted in the environment
                before = self.checkpoints.notes(self.round)["config"]
                changed = difference(
                    before, self.config.settings, except_for=["run.fleet"], diagnostics=True
                )
            self.recorder.note_environment(last, self._environment, changed)

    @property
    def _environment(self) -> dict[str, Any]:
        """Facts that depend on the run, not the machine: threads, fleet, devices, plugins, etc."""
        run = self.config.run
        mine: dict[str, Any] = {"intra_op_threads": run.threads, "fleet": run.fleet}
        if run.device != "cpu":
            mine |= {"devices": described(run.devices), "tf32": run.tf32,
                     "deterministic": run.deterministic}  # fmt: skip
        if found := plugins_in(self.config.settings):
            mine["plugins"] = found
        return mine | own.noted(self.config.settings["method"]["name"])

    def _best_so_far(self) -> ValidationResult | None:
        """Return the validation result of the chosen round, if validation chooses the round.

        None if that round was not validated.
        """
        every = {r["round"]: r["validation"] for r in self.recorder.records() if r["validation"]}
        best = every.get(self.best_round) if self._chooses else None
        return None if best is None else ValidationResult.from_json(best)

    def _save(self) -> None:
        held = self.checkpoints.rounds()
        self.recorder.flush()
        self._private = self.fleet.seal(self.round, {*held, self.best_round})
        if isinstance(self.clock, Asynchronous):
            self._in_flight = self.clock.save(self.round, {*held, self.best_round})
        notes = {
            "round": self.round,
            "fedshot": __version__,
            "config": self.config.settings,
            "dataset": self.prepared.dataset.digest,
            "deal": self.prepared.partition_digest,
            "best": [self.best_round, self._best.accuracy if self._best else -1.0],
            "ledger": self.meter.to_json(),
            "private": self._private,
            **({"clips": self._ledger.clips} if self._ledger.clips else {}),
            **({"ranges": self._ranges} if self._ranges else {}),
            **({} if self.clock is None else {"clock": self.clock.now, "times": self._times}),
            **({"in_flight": self._in_flight} if self._in_flight else {}),
        }
        self.checkpoints.write(self.round, self.server, notes)
        self._after_checkpoint()
        self.begun = True

    def _after_checkpoint(self) -> None:
        """Write the ledger of the last checkpoint, and delete the checkpoints not needed now."""
        self.recorder.write("ledger.json", self.meter.to_json(), sync=False)  # as in notes
        held = self.checkpoints.rounds()
        keep = {self.best_round, *held[-2:]}
        if self._keep_validated:
            keep |= {round for round in held if round % self.config.run.validate_every == 0}
        self.checkpoints.prune(keep)

    def _read(self) -> None:
        """Read the last checkpoint, without changing anything on the disk."""
        self.round = self.checkpoints.rounds()[-1]
        notes = self.checkpoints.notes(self.round)
        check_belongs(self.folder, notes, self.config)
        if notes["dataset"] != self.prepared.dataset.digest:
            raise CheckpointError(
                f"{self.folder} was started on other data: the hash of dataset "
                f"{self.prepared.dataset.name!r} differs. Restore the data, or start a new run."
            )
        self._check_classes()
        if notes["deal"] != self.prepared.partition_digest:
            raise CheckpointError(
                f"{self.folder} was started with another partition of its data: its hash differs. "
                "Restore the data's split and the version of numpy, or start a new run."
            )
        self.server, _ = self.checkpoints.read(self.round, self.server)
        self.best_round = notes["best"][0]
        self.meter.load_json(notes["ledger"])
        self._private, self._in_flight = notes["private"], notes.get("in_flight", "")
        self._ledger.clips = notes.get("clips", {})
        self._ranges.clear()
        self._ranges |= notes.get("ranges", {})
        if self.clock is not None:
            self.clock.now = notes["clock"]
            if notes["times"] != self._times:
                raise CheckpointError(
                    f"{self.folder} was started with other files of run.clock.speeds or "
                    "run.clock.availability. Restore them from a copy, or start a new run."
                )
        self.fleet.open(self.round, self._private)

    def _check_classes(self) -> None:
        """Raise CheckpointError if the split has other classes than when the run started.

        Base classes are not compared on a server without training data.
        """
        info = dataset_info.stored(self.folder)
        if info is None:
            return
        held = (info["base"], info["validation"], info["novel"])
        names = self.prepared.dataset.class_names
        now = dataset_info.split_classes(self.prepared.dataset, self.prepared.rows)
        for part, before, after in zip(("base", "validation", "novel"), held, now, strict=True):
            if before == list(after) or (part == "base" and not (before and after)):
                continue
            shown = [
                ", ".join(map(repr, [names[c] for c in one if c < len(names)][:5]))
                for one in (before, after)
            ]
            raise CheckpointError(
                f"{self.folder} started with other {part} classes ({shown[0] or 'none'}) than the "
                f"split has now ({shown[1] or 'none'}). Restore the version of numpy, or start a "
                "new run."
            )

    def _evaluate(
        self, episodic_test: EpisodicTest, server: Tree, round: int, clients: Clients
    ) -> Score:
        key = self.prepared.key.at("round", round, "exam")
        device = self.config.run.devices[0]
        server = tree.to(server, device)
        eval_episodes = episodic_test.eval_episodes.on(device)
        predictions = self.method.evaluate(server, clients, eval_episodes, key)
        return score(predictions, episodic_test, transductive=self.method.traits.transductive)

    def _clients(self, round: int, phase: Literal["train", "evaluate"]) -> Clients:
        run, everyone = self.config.run, self.prepared.clients
        alone = phase == "evaluate" and self.config.test.first_client_only
        cohort, buffer = run.cohort, None
        if phase == "train" and self.clock is not None:
            everyone = list(self.clock.online(everyone))
            if isinstance(self.clock, Asynchronous):
                cohort, buffer = self.clock.to_start, self.clock.buffer
        return self._ledger.clients(
            self.fleet,
            everyone[:1] if alone else everyone,
            cohort=cohort,
            quorum=run.quorum if phase == "train" else 0.0,  # scores count lost episodes
            round=round,
            phase=phase,
            combine=self._combine,
            aggregation=self._aggregation,
            buffer=buffer,
        )


def fleet_for(host: Host, run: RunOptions, workers: int) -> Sequential:
    """Return the fleet that the options of a run select."""
    assert run.threads is not None, "PreparedRun sets it"
    if run.fleet == "vectorised":
        return Vectorised(host, run.chunk, workers, run.threads)
    if run.fleet == "threads" and run.device != "cpu":
        return Streams(host)
    if workers > 1:
        kind = Processes if run.fleet == "processes" else Threads
        return kind(host, workers, run.threads)
    return Sequential(host)


def check_belongs(
    folder: Path, notes: dict[str, Any], config: Config, *, any_device: bool = False
) -> None:
    """Raise CheckpointError unless a checkpoint belongs to a run with this configuration.

    With `any_device`, `run.device` may differ.
    """
    old, new = (one["data"].get("digest") for one in (notes["config"], config.settings))
    if isinstance(config.data, InMemory) and old and new and old != new:
        raise CheckpointError(
            f"the data in memory are not those that {folder} was started on, or are in another "
            f"order: their SHA-256 was {old[:12]}, is {new[:12]}. Pass the run's "
            "data, or start a new run under another name."
        )
    may_differ = (*MAY_CHANGE, "run.device") if any_device else MAY_CHANGE
    changed = difference(notes["config"], config.settings, except_for=may_differ)
    if changed:
        may = sorted({*MAY_CHANGE, *is_diagnostic(config.settings)})
        raise CheckpointError(
            f"{folder} was started with another configuration: {changed}. Restore it, or start a "
            f"new run under another name. ({', '.join(may)} may change.)"
        )


def _faults(clients: Clients) -> tuple[dict[str, Any], ...]:
    return tuple(
        {"client": c, "kind": f.kind, "reason": f.reason}
        for c, f in clients.faults
        if f.kind != "late"
    )


def _late(clients: Clients) -> tuple[int, ...]:
    return tuple(sorted({c for c, f in clients.faults if f.kind == "late"}))
