"""What is fixed before round 1: the data, who holds it, the method, the tests.

Everything that cannot work is refused here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from fedshot.config import Config
from fedshot.data import (
    ClassSplit,
    Deal,
    EpisodeSpec,
    Rows,
    find_data_dir,
    split_users,
    unable,
)
from fedshot.errors import ConfigError, DataError
from fedshot.evaluation import Exam, ExamOptions
from fedshot.keys import Key
from fedshot.machine import cores
from fedshot.nn.cost import step_flops
from fedshot.protocol import Method
from fedshot.sections import RunOptions

_BIG = 10**11  # FLOPs of a step that is given all cores: some half a second on one of them
_SMALL = 3 * 10**8  # of a step as short as the Python around it, which one thread runs at a time


class Arrangement:
    """The data, its split, and who holds what.

    `rows` are the dataset's rows to train, choose and test on, by `split`, or by user where that is
    None. `clients` can form an episode; `left_out` cannot, with the reason.

    Raises:
        DataError: the data is missing or too small for what is asked.
        ConfigError: options that contradict each other.
    """

    def __init__(self, config: Config, data_dir: str | None = None) -> None:
        self.config = config
        self.key = Key(config.seed)
        self._arrange(config, data_dir)

    def _arrange(self, config: Config, data_dir: str | None) -> None:
        """Load, split and deal."""
        self.dataset = config.data.load(find_data_dir(data_dir))
        # The test's seed, not training's, draws a random split: all training seeds sit one test.
        drawn = Key(config.test.seed)
        self.split: ClassSplit | None = None
        if config.split.users is not None:
            shares = config.split.users
            self.rows = Rows(*split_users(self.dataset, shares, drawn.at("split")))
        else:
            self.split = config.split.of(self.dataset, config.data.split(self.dataset), drawn)
            self.split.check(self.dataset)
            self.rows = Rows.of_classes(self.dataset, self.split)
        self.deal: Deal = config.partition.deal(
            self.dataset, self.rows.base, self.key.at("partition"), config.episode
        )
        self.left_out = unable(self.dataset, self.deal.train, config.episode)
        self.clients = [c for c in range(len(self.deal.train)) if c not in self.left_out]

    @property
    def base_classes(self) -> tuple[int, ...]:
        """The numbers of the classes to train on."""
        return tuple(np.unique(self.dataset.y[self.rows.base]).tolist())

    def notices(self) -> list[str]:
        """Return what a person should know before round 1."""
        found = []
        if self.left_out:
            found.append(f"left out: {_first(self.left_out)}")
        if not len(self.rows.validation):
            found.append("no validation classes: the last round is tested")
        if self.deal.test is not None:
            held = sum(len(rows) for rows in self.deal.test)
            found.append(
                f"the partition sets {held} images aside as the clients' own tests, which no "
                "method uses yet"
            )
        return found


class Setting(Arrangement):
    """An arrangement with a method and its tests.

    Raises:
        DataError, ConfigError: as `Arrangement`, and when method, model or tests do not fit.
    """

    def __init__(self, config: Config, data_dir: str | None = None) -> None:
        super().__init__(config, data_dir)
        model = config.model.build(self.dataset)
        spec = config.episode
        flops = step_flops(model, spec.max_way * (spec.shot + spec.query))
        self.config = config = config.with_threads(threads_for(flops, config.run.threads))
        self.workers = workers_for(flops, config.run, text=self.dataset.is_text)
        self.method: Method[Any] = config.method(model, self.base_classes)
        if config.run.fleet == "vectorised" and not model.backbone.vmappable:
            kind = config.settings["model"]["backbone"]["name"]
            raise ConfigError(
                f"run.fleet is 'vectorised', and {config.settings['method']['name']} with the "
                f"backbone {kind!r} cannot be stacked: its torch kernel takes the weights of one "
                "model. Set run.fleet to 'threads', or model.backbone.kernel to 'cell'."
            )
        self._check_way("episode.way", config.episode.max_way)
        self._check_clients()
        self.validation = (
            self._exam("validation", self.rows.validation, config.test.validation_episodes)
            if len(self.rows.validation)
            else None
        )
        self.test = self._exam("novel", self.rows.novel, config.test.episodes)

    def exam(self, options: ExamOptions) -> Exam:
        """Draw a test of another shape from what is novel."""
        self._check_way("way", options.way)
        key = Key(options.seed).at("exam", "novel")
        return _draw(self, self.rows.novel, options.spec, options.episodes, key)

    def _exam(self, part: str, rows: Any, episodes: int) -> Exam:
        options = self.config.test
        self._check_way("test.way", options.way)
        try:
            key = Key(options.seed).at("exam", part)
            return _draw(self, rows, options.spec, episodes, key)
        except DataError as error:
            raise DataError(f"the {part} classes cannot fill the test: {error}") from None

    def _check_way(self, option: str, way: int) -> None:
        widest = self.method.max_way
        if widest is not None and way > widest:
            raise ConfigError(
                f"{option} is {way}; model.head.way is {widest}, and a head cannot tell more "
                f"classes apart than it has outputs. Set model.head.way to {way}."
            )

    def _check_clients(self) -> None:
        run, spec, n = self.config.run, self.config.episode, len(self.deal.train)
        fix = "Lower episode.way, episode.shot or episode.query, or use fewer clients."
        if self.left_out and (run.unable == "refuse" or not self.clients):
            without = " Or set run.unable to 'leave_out' to go on without them."
            raise DataError(
                f"{len(self.left_out)} of {n} clients cannot form a {spec} episode: "
                f"{_first(self.left_out)}. {fix}{without if self.clients else ''}"
            )
        if run.cohort is not None and run.cohort > len(self.clients):
            raise ConfigError(
                f"run.cohort is {run.cohort}; {len(self.clients)} clients take part. Lower it, or "
                "leave it out for all of them."
            )


def threads_for(flops: int, asked: int | None) -> int:
    """Return the intra-op threads for steps of so many FLOPs: those asked for, else by rule.

    Never by timing, which would give one seed two answers: a step below 100 GFLOP is quickest with
    a worker for each core, a longer one keeps all cores busy by itself in half the memory.
    """
    if asked is not None:
        return asked
    return cores() if flops >= _BIG else 1


def workers_for(flops: int, run: RunOptions, *, text: bool) -> int:
    """Return how many clients run at once; bits do not depend on it."""
    if run.fleet != "threads":
        return 1
    if run.workers is not None:
        return run.workers
    assert run.threads is not None
    if flops < _SMALL and not text:
        return 1
    return max(1, cores() // run.threads)


def _draw(setting: Setting, rows: Any, spec: EpisodeSpec, episodes: int, key: Key) -> Exam:
    classes = np.unique(setting.dataset.y[rows]).tolist()
    spec = replace(spec, labels=setting.config.episode.labels)
    return Exam.draw(setting.dataset, classes, spec, episodes, key, rows)


def _first(left_out: dict[int, str]) -> str:
    shown = [f"client {c} {reason}" for c, reason in sorted(left_out.items())]
    more = f"; and {len(shown) - 3} more" if len(shown) > 3 else ""
    return "; ".join(shown[:3]) + more
