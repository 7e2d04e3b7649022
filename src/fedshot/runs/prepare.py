"""Preparation of a run: data, partition, method and tests, checked before round 1."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from fedshot.config.load import Config
from fedshot.config.schema import RunOptions, not_honest
from fedshot.config.validation import with_option_path
from fedshot.core.errors import ConfigError, DataError, check_kind
from fedshot.core.machine import cores
from fedshot.core.seeds import Key
from fedshot.core.text import count, named_client
from fedshot.data.class_split import ClassSplit, RowSplit, some_names
from fedshot.data.copies import Copies
from fedshot.data.dataset import Dataset, Ints
from fedshot.data.encoders.encoded import encoded, encoded_digest
from fedshot.data.encoders.frozen import LoadedEncoder
from fedshot.data.encoders.module import ModuleEncoder
from fedshot.data.episodes.episode import Tasks
from fedshot.data.episodes.spec import EpisodeSpec
from fedshot.data.files.places import find_data_dir
from fedshot.data.partitions.partition import (
    ClientSplit,
    Partition,
    check_assigned,
    infeasible_clients,
)
from fedshot.data.partitions.pooled import Users
from fedshot.data.partitions.resampled import Resampled
from fedshot.data.sources.in_memory import InMemory
from fedshot.data.sources.sent140 import split_users
from fedshot.evaluation.episodic_test import EpisodicTest, TestOptions
from fedshot.fleets.attacks import Collusion
from fedshot.methods.user_methods import is_packaged
from fedshot.nn.models.cost import step_flops
from fedshot.nn.models.module_backbone import ModuleBackbone
from fedshot.privacy.differential import ExampleLevel
from fedshot.privacy.secure_sums.requirements import check_run
from fedshot.protocol.aggregators import PlainMean
from fedshot.protocol.method import Method
from fedshot.runs.dataset_info import DatasetInfo
from fedshot.runs.private_runs import planned

_BIG = 4 * 10**11  # FLOPs from which a step uses all cores; it takes over a second on one core
_FEW_LEVELS, _PIXEL_SAMPLE = 16, 50  # range of pixel values that is an error; images looked at
_SMALL = 3 * 10**8  # FLOPs below which Python's overhead dominates, so several workers do not help


def read_data(config: Config, data_dir: str | None = None) -> tuple[Config, Dataset]:
    """Return the configuration, with the hashes of data and encoder, and the dataset.

    If the configuration has an encoder, the dataset holds the encoder's features.

    Raises:
        DataError: the data are missing.
        ConfigError: the encoder cannot be loaded, or does not fit the data.
    """
    options, dataset = config.model.encoder, read_examples(config, data_dir)
    if isinstance(config.data, InMemory):  # its hash may be unknown until now
        config = config.with_data(dataset)
    if options is not None:
        encoder = _encoder(config, dataset, data_dir)
        return config.with_encoder(encoder.options), encoded(dataset, encoder)
    if dataset.kind == "raw text":
        raise ConfigError(
            f"{dataset.name} holds raw texts, which only model.encoder takes. Set model.encoder, "
            "or read the texts with word vectors."
        )
    return config, dataset


def with_modules(config: Config, encoder: Any, backbone: Any) -> Config:
    """Return the configuration with the modules that a Python program passes; None: no change."""
    if encoder is not None:
        options = config.model.encoder or ModuleEncoder()
        config = config.with_encoder(ModuleEncoder.holding(options, encoder))
    if backbone is not None:
        config = config.with_backbone(ModuleBackbone.holding(config.model.backbone, backbone))
    return config


def read_examples(config: Config, data_dir: str | None) -> Dataset:
    """Return the dataset, before an encoder (if any) turns its examples into features.

    Raises DataError if it is missing.
    """
    folder = find_data_dir(data_dir)
    return (
        config.data.load(folder) if config.model.encoder is None else config.data.load_raw(folder)
    )


def data_digest(config: Config, data_dir: str | None) -> str:
    """Return the hash of the dataset of `read_data`, without computing features.

    Raises what `read_data` raises.
    """
    dataset = read_examples(config, data_dir)
    if config.model.encoder is None:
        return dataset.digest
    return encoded_digest(dataset, _encoder(config, dataset, data_dir))


def _encoder(config: Config, dataset: Dataset, data_dir: str | None) -> LoadedEncoder:
    assert config.model.encoder is not None
    device = str(config.run.devices[0])
    return config.model.encoder.load(dataset.kind, device, find_data_dir(data_dir))


class FederatedDataset:
    """A dataset with its split and partition.

    `rows` are the dataset's base (training), validation and novel (test) rows, divided by class as
    in `split`, or by user if `split` is None. `clients` are the clients that can form an episode;
    `left_out` has the reason for each client that cannot. Without novel rows, `own_tests` is true:
    clients are tested on examples of their own classes that the partition sets aside.

    Raises:
        DataError: the data is missing or too small.
        ConfigError: options contradict each other.
    """

    def __init__(self, config: Config, data_dir: str | None = None) -> None:
        check_kind("config", config, Config, "Make one with Config.of(settings).")
        _check_combination(config)
        self.config = config
        self.key = Key(config.seed)
        self._load(config, data_dir)

    def _load(self, config: Config, data_dir: str | None) -> None:
        """Load the dataset, split it and assign it to the clients."""
        config, self.dataset = read_data(config, data_dir)
        self.config = config
        # A random split is drawn from split.seed, or else from test.seed, so that all training
        # seeds share one test.
        test_key = Key(config.test.seed)
        splits = test_key if config.split.seed is None else Key(config.split.seed)
        self.split: ClassSplit | None = None
        if config.split.users is not None:
            shares = config.split.users
            self.rows = RowSplit(*split_users(self.dataset, shares, splits.at("split")))
        else:
            self.split = config.split.of(self.dataset, self.dataset.standard, splits)
            self.rows = RowSplit.of_classes(self.dataset, self.split)
        # Without novel rows, the partition defines the tests and is drawn from test.seed, so
        # that all training seeds share one test.
        self.own_tests = not len(self.rows.novel)
        self.partition_key = (test_key if self.own_tests else self.key).at("partition")
        with with_option_path("partition", type(config.partition)):
            self.client_split = self._assigned(self.rows.base, self.partition_key, config.episode)
        if self.own_tests:
            self._check_own_tests()
        self._check_groups()
        self.left_out = infeasible_clients(
            self.dataset, self.client_split.train, config.training_episode, divides=config.divides
        )
        self.clients = [c for c in range(len(self.client_split.train)) if c not in self.left_out]

    def _first(self, left_out: dict[int, str]) -> str:
        names = self.client_names
        shown = [f"client {named_client(c, names)} {why}" for c, why in sorted(left_out.items())]
        more = f"; and {len(shown) - 3} more" if len(shown) > 3 else ""
        return "; ".join(shown[:3]) + more

    def _assigned(self, rows: Ints, key: Key, spec: EpisodeSpec) -> ClientSplit:
        """Return the partition of some rows of the dataset."""
        split = self.config.partition.assign(self.dataset, rows, key, spec)
        check_assigned(self.config.settings["partition"]["name"], split, rows)
        return split

    @cached_property
    def base_classes(self) -> tuple[int, ...]:
        """The class numbers of the training classes."""
        return self.classes_of(self.rows.base)

    def classes_of(self, rows: Ints) -> tuple[int, ...]:
        """Return the sorted class numbers that occur in these rows of the dataset."""
        return tuple(np.unique(self.dataset.y[rows]).tolist())

    @cached_property
    def partition_digest(self) -> str:
        """The SHA-256 of the training partition."""
        return self.client_split.train.digest

    @cached_property
    def copies(self) -> Copies:
        """The examples that occur more than once in the data for training, validation and test."""
        parts = [self.rows.base, self.rows.validation, self.rows.novel]
        if self.own_tests:
            dealt = (self.client_split.train, self.client_split.validation, self.client_split.test)
            parts = [part.indices for part in dealt if part is not None]
        return Copies.of(self.dataset, parts)

    def dataset_info(self) -> DatasetInfo:
        """Return the information about the data that a run stores in its folder."""
        dealt = len(self.client_split.train)
        return DatasetInfo.of(self.dataset, self.rows, dealt, self.clients, self.client_names)

    @cached_property
    def client_names(self) -> tuple[str, ...]:
        """The names of the clients by number; empty unless each is a user whom the data name."""
        names, partition = self.dataset.user_names, self.config.partition
        if not names or self.dataset.users is None or not isinstance(partition, Users):
            return ()
        users = np.unique(self.dataset.users[self.rows.base]).tolist()
        return tuple(names[user] for user in users) if partition.clients is None else ()

    def notices(self) -> list[str]:
        """Return messages for the user before round 1."""
        found = not_honest(self.config.settings)
        found += [f"{self.dataset.name}: {remark}" for remark in self.dataset.remarks]
        if self.copies.identical:
            found.append(f"{self.dataset.name}: {self.copies}")
        rows = np.concatenate([self.rows.base, self.rows.validation, self.rows.novel])
        if self.dataset.kind == "images" and len(rows):
            seen = [self.dataset.pixels[i] for i in rows[:: 1 + len(rows) // _PIXEL_SAMPLE]]
            low, high = min(int(x.min()) for x in seen), max(int(x.max()) for x in seen)
            if high - low < _FEW_LEVELS:
                found.append(
                    f"{self.dataset.name}: pixels have values from {low} to {high} only, of 0 to "
                    "255; scale the images"
                )
        unused = np.setdiff1d(self.dataset.y, self.dataset.y[rows])
        if self.split is not None and len(unused):
            found.append(
                f"{self.dataset.name}: {count(len(unused), 'class is', 'classes are')} in no part "
                f"of the split: {some_names(self.dataset.class_names, unused.tolist())}"
            )
        spec, dealt = self.config.training_episode, self.client_split.train
        resampled = isinstance(self.config.partition, Resampled)
        if spec is not None and len(self.rows.base) and not resampled:
            trained = dealt.classes_of_any(self.dataset, spec.min_images, self.clients)
            lost = np.setdiff1d(self.base_classes, trained).tolist()
            if lost:
                found.append(
                    f"{self.dataset.name}: {count(len(lost), 'class is', 'classes are')} in no "
                    f"training episode, which needs {spec.min_images} examples of a class at one "
                    f"client: {some_names(self.dataset.class_names, lost)}"
                )
        users, partition = self.dataset.users, type(self.config.partition)
        ignores = partition is not Users and partition.__module__.startswith("fedshot.")
        if users is not None and users.min() < users.max() and ignores:
            found.append(
                f"{self.dataset.name}: partition "
                f"{self.config.settings['partition']['name']!r} ignores the users; set "
                "partition.name to 'users' to make each of them a client"
            )
        if self.left_out:
            found.append(f"left out: {self._first(self.left_out)}")
        if self.left_out and self.config.test.pool == "clients":
            found.append(
                "test.pool is 'clients': the test leaves these clients out, too, so seeds that "
                "leave out different clients have different tests"
            )
        if self.own_tests and self.client_split.validation is None:
            found.append("no images are set aside for validation: the last round is tested")
        by_validation = self.config.run.choose == "validation"
        if by_validation and not self.own_tests and not len(self.rows.validation):
            found.append("no validation classes: the last round is tested")
        if not self.own_tests and self.client_split.test is not None:
            held = sum(len(rows) for rows in self.client_split.test)
            found.append(
                f"the partition sets {held} images aside for the clients' own tests; they are not "
                "used, because the split has novel classes"
            )
        return found

    def _check_groups(self) -> None:
        """Raise ConfigError if examples of one group might be in both support and query.

        Examples of a group (`Dataset.groups`) are nearly identical.
        """
        if self.dataset.groups is None:
            return
        conflicts = {
            "partition.name is 'resampled'": isinstance(self.config.partition, Resampled),
            f"method {self.config.settings['method']['name']!r} divides a client's examples":
                self.config.divides,
            "the split has no novel classes, so clients are tested on their own": self.own_tests,
            f"test.group.clients is {self.config.test.group.clients}":
                self.config.test.group.clients > 0,
        }  # fmt: skip
        _refuse(
            conflicts,
            f"{self.dataset.name} has groups",
            "; groups then cannot be kept on one side of support and query. Remove the groups from "
            "the data, or choose another method, partition or test.",
        )

    def _check_own_tests(self) -> None:
        kind = self.config.settings["partition"]["name"]
        if self.client_split.test is None:
            raise DataError(
                f"the split has no novel classes, and partition {kind!r} sets no images aside to "
                "test clients on. Name novel classes in split.novel, or set partition.name to "
                "'pathological' or 'clusters'."
            )
        if len(self.rows.validation):
            raise DataError(
                "the split has validation classes and no novel ones: clients are then tested and "
                "validated on images of their own classes. Move the validation classes to "
                "split.base, and set partition.validation."
            )
        test = self.config.test
        unused = {
            "test.first_client_only": (test.first_client_only, "true"),
            "test.pool": (test.pool == "clients", "'clients'"),
            "test.group.clients": (test.group.clients > 0, str(test.group.clients)),
        }
        for option, (used, value) in unused.items():
            if used:
                raise ConfigError(
                    f"{option} is {value}, and the split has no novel classes: every client is "
                    "tested on images of its own, in one episode. Omit the option, or name novel "
                    "classes in split.novel."
                )


class PreparedRun(FederatedDataset):
    """A federated dataset with a method and its tests.

    Raises:
        DataError, ConfigError: as `FederatedDataset`, and if the method, the model or the tests do
            not suit the data.
    """

    def __init__(self, config: Config, data_dir: str | None = None) -> None:
        super().__init__(config, data_dir)
        config = self.config
        if isinstance(config.model.backbone, ModuleBackbone):  # its hash may be unknown until now
            config = config.with_backbone(config.model.backbone.recorded())
        model = config.model.build(self.dataset)
        spec = config.episode
        flops = step_flops(model, spec.max_way * (spec.shot + spec.query))
        self.config = config = config.with_threads(threads_for(flops, config.run.threads))
        self.workers = workers_for(flops, config.run, text=self.dataset.is_text)
        self.method: Method[Any] = config.method(
            model, self.base_classes, len(self.client_split.train)
        )
        spec.augment.check(self.dataset)
        if spec.min_way < 2:
            raise ConfigError(
                f"episode.way is {spec.way}; with one class every prediction is right and nothing "
                "is learnt. Expected at least 2."
            )
        if config.run.fleet == "vectorised" and not model.backbone.vmappable:
            kind = config.settings["model"]["backbone"]["name"]
            cell = ", or model.backbone.kernel to 'cell'" if kind != "module" else ""
            raise ConfigError(
                f"run.fleet is 'vectorised', and {config.settings['method']['name']} with the "
                f"backbone {kind!r} cannot be vectorised: it computes with the weights of one "
                f"model only. Set run.fleet to 'threads'{cell}."
            )
        traits = self.method.traits
        _check_compressed_uploads(config, self.method)
        if config.run.fleet == "vectorised" and traits.unstackable:
            raise ConfigError(
                f"run.fleet is 'vectorised', and {traits.unstackable}, or run.fleet to 'threads'."
            )
        if traits.base_classes_only and self._tests_novel_classes():
            labels = " with episode.labels 'global'" if config.episode.labels == "global" else ""
            raise ConfigError(
                f"method {config.settings['method']['name']!r}{labels} can predict only classes "
                "that it has trained on, but the split has novel classes. Name only base classes "
                "in split.base, and set partition.name to 'pathological' or 'clusters'; or divide "
                "the data by user instead of by class, with split.users."
            )
        _check_way("episode.way", config.episode.max_way, traits.max_way)
        if config.attack is not None and config.attack.poisons_data and traits.resampled:
            raise ConfigError(
                f"attack.name is {config.settings['attack']['name']!r}, which changes what a "
                "client holds, and under partition 'resampled' all clients draw from one pool. "
                "Choose another partition or attack."
            )
        if config.episode.labels == "global":
            self._check_global_labels()
        self._check_clients()
        examples = int(self.client_split.train.sizes[self.clients].sum())
        self.privacy = planned(
            config, self.method, self.clients, examples, self.key.at("init"),
            own_tests=self.own_tests,
        )  # fmt: skip
        if self.privacy is not None:
            self.config = config.with_noise(self.privacy.accountant.noise)
        self.validation: EpisodicTest | None = None
        if self.own_tests:
            assert self.client_split.test is not None
            self.test = self._own_class_test("test", self.client_split.test)
            if self.client_split.validation is not None:
                self.validation = self._own_class_test("validation", self.client_split.validation)
            return
        self._check_test("test.way", config.test)
        if len(self.rows.validation):
            self.validation = self._test("validation")
        self.test = self._test("novel")

    def _tests_novel_classes(self) -> bool:
        """Whether validation or test has classes that are not base classes."""
        tested = np.concatenate([self.rows.validation, self.rows.novel])
        return not self.own_tests and not set(self.classes_of(tested)) <= {*self.base_classes}

    def notices(self) -> list[str]:
        """Return messages for the user before round 1, with warnings of the method."""
        found = [*super().notices(), *self.method.traits.warnings]
        if self.privacy is not None and self.own_tests:
            found.append("epsilon covers the training; scores of clients' own tests get no noise")
        cohort = self.config.run.cohort or len(self.clients)
        if self.privacy is not None and self.privacy.secure and cohort < len(self.clients):
            found.append(
                "with run.secure_sums the server knows who takes part, so a sampled cohort spends "
                "as much epsilon as all clients"
            )
        return found

    def episodic_test(self, options: TestOptions) -> EpisodicTest:
        """Return a test on the novel rows of the dataset, with these options."""
        if self.own_tests:
            if options != self.config.test:
                raise ConfigError(
                    "clients are tested on images of their own classes, which the partition "
                    "fixes: the test cannot have another shape or seed. Omit the options."
                )
            return self.test
        self._check_test("way", options)
        return self._novel_class_test(options)

    def _novel_class_test(self, options: TestOptions) -> EpisodicTest:
        if options.pool == "shared":
            return self._drawn("novel", options, options.episodes)
        spec = self._shape(options)
        key = Key(options.seed).at("partition", "novel")
        held = self._assigned(self.rows.novel, key, spec).train
        if len(held) != len(self.client_split.train):
            raise ConfigError(
                f"test.pool is 'clients', and the partition divides the novel examples among "
                f"{len(held)} clients, but the training examples among "
                f"{len(self.client_split.train)}. Set partition.clients, or test.pool to 'shared'."
            )
        lacking = {c: text for c, text in infeasible_clients(self.dataset, held, spec).items()
                   if c in self.clients}  # fmt: skip
        if lacking:
            raise DataError(
                f"test.pool is 'clients', and some clients have too few novel examples for their "
                f"own test: {self._first(lacking)}. Lower test.way, test.shot or test.query, use "
                "fewer clients, or set test.pool to 'shared'."
            )
        pools, key = [held[c] for c in self.clients], Key(options.seed).at("exam", "novel")
        tasks = Tasks.draw_round_robin(self.dataset, pools, spec, options.episodes, key)
        return EpisodicTest(self.dataset, tasks)

    def _test(self, part: Literal["validation", "novel"]) -> EpisodicTest:
        options = self.config.test
        try:
            if part == "novel":
                return self._novel_class_test(options)
            return self._drawn(part, options, options.validation_episodes)
        except DataError as error:
            raise DataError(f"the {part} classes cannot fill the test: {error}") from None

    def _drawn(
        self, part: Literal["validation", "novel"], options: TestOptions, episodes: int
    ) -> EpisodicTest:
        rows: Ints = getattr(self.rows, part)
        classes, spec = self.classes_of(rows), self._shape(options)
        key = Key(options.seed).at("exam", part)
        return EpisodicTest.draw(self.dataset, classes, spec, episodes, key, rows, options.group)

    def _shape(self, options: TestOptions) -> EpisodeSpec:
        """Return the shape of test episodes; they have labels as in training, `episode.labels`."""
        return replace(options.spec, labels=self.config.episode.labels)

    def _own_class_test(self, part: str, held: Partition) -> EpisodicTest:
        key = Key(self.config.test.seed).at("exam", "own", part)
        episodic_test = EpisodicTest.own(
            self.dataset, self.client_split.train, held, self.clients, key
        )
        widest = episodic_test.ways[1]
        option = "the largest number of classes of a client"
        _check_way(option, widest, self.method.traits.max_test_way)
        return episodic_test

    def _check_test(self, option: str, test: TestOptions) -> None:
        """Raise ConfigError if the method does not support a test.

        `option` is what the message calls the number of classes, such as "test.way".
        """
        _check_way(option, test.spec.max_way, self.method.traits.max_test_way)
        self.method.check_group(test.group)

    def _check_global_labels(self) -> None:
        """Raise ConfigError unless the method has an output for each base class."""
        if not self.method.traits.base_classes_only:
            raise ConfigError(
                "episode.labels is 'global', but method "
                f"{self.config.settings['method']['name']!r} does not have an output for each "
                "class of the dataset; FedFSL's methods, fedmeta, and fsl_local with MAML can have "
                "them. Set episode.labels to 'shuffled' or 'fixed'."
            )
        most, width = max(self.base_classes), self.method.traits.max_way
        if width is not None and width <= most:
            raise ConfigError(
                f"episode.labels is 'global' and model.head.way is {width}, but the base classes "
                f"have numbers up to {most}. Set model.head.way to {most + 1}."
            )

    def _check_clients(self) -> None:
        run, spec, n = self.config.run, self.config.episode, len(self.client_split.train)
        if run.secure_sums:
            check_run(self.method, min(run.cohort or n, len(self.clients)))
        larger = ", or raise partition.alpha" if hasattr(self.config.partition, "alpha") else ""
        fix = f"Lower episode.way, episode.shot or episode.query, or use fewer clients{larger}."
        if self.left_out and (run.infeasible_clients == "refuse" or not self.clients):
            without = " Or set run.infeasible_clients to 'leave_out' to continue without them."
            raise DataError(
                f"{len(self.left_out)} of {n} clients cannot form {spec.whole_text}: "
                f"{self._first(self.left_out)}. {fix}{without if self.clients else ''}"
            )
        if run.cohort is not None and run.cohort > len(self.clients):
            raise ConfigError(
                f"run.cohort is {run.cohort}, but only {len(self.clients)} clients take part. "
                "Lower it, or omit it to use all of them."
            )
        asked, waits = run.cohort or len(self.clients), run.clock.wait_for
        least = 0.0 if run.clock.asynchronous else run.quorum
        if waits is not None and not least * asked <= waits <= asked:
            share = f", and at least the share {least} of them, run.quorum" if least else ""
            raise ConfigError(
                f"run.clock.wait_for is {waits}; expected at most the {asked} clients of a cohort"
                f"{share}."
            )
        if run.clock.asynchronous:
            self._check_asynchronous()
        if waits is not None and run.secure_sums and waits < run.secure_threshold * asked:
            raise ConfigError(
                f"run.clock.wait_for is {waits}, but secure sums need the share "
                f"{run.secure_threshold} of {asked} clients, run.secure_threshold. Raise wait_for."
            )
        if run.cohort is not None and run.cohort < n and self.method.traits.resampled:
            raise ConfigError(
                f"run.cohort is {run.cohort}, but partition 'resampled' divides every episode's "
                f"images among {n} clients; those of clients outside the cohort would be lost. "
                f"Set partition.clients to {run.cohort}, or omit run.cohort."
            )

    def _check_asynchronous(self) -> None:
        """Raise ConfigError for what asynchronous rounds do not support."""
        traits, name = self.method.traits, self.config.settings["method"]["name"]
        hint = (
            ""
            if traits.gathers is not None or is_packaged(type(self.method))
            else "; if it only averages, its traits must say so: return replace(super().traits, "
            "sends_changes=True)"
        )
        reasons = {
            f"method {name!r}, with these options, does more in a round than average clients' "
            f"changes of the model{hint}":
                not traits.sends_changes or traits.gathers is not None,
            f"the clients of {name!r} subtract their own upload from the mean that they receive, "
            "and an asynchronous mean may not contain it": traits.subtracts_own,
            "run.secure_sums is true: a secure sum is that of clients that are asked together":
                self.config.run.secure_sums,
            "privacy is set: epsilon holds for cohorts that are sampled from all clients":
                self.config.privacy is not None,
            "attack is one in which clients copy an upload computed from those of others, which "
            "they would have to know before these reply": isinstance(self.config.attack, Collusion),
        }  # fmt: skip
        _refuse(
            reasons,
            "run.clock.asynchronous is true",
            ". Set run.clock.asynchronous to false, or change the other option.",
        )


def _refuse(conflicts: dict[str, bool], option: str, fix: str) -> None:
    """Raise ConfigError for the first conflict of `option` that is met."""
    for conflict, met in conflicts.items():
        if met:
            raise ConfigError(f"{option}, and {conflict}{fix}")


def _check_way(option: str, way: int, widest: int | None) -> None:
    """Raise ConfigError if `way` is larger than `widest`, the number of outputs of the head.

    `option` is what the message calls `way`.
    """
    if widest is not None and way > widest:
        raise ConfigError(
            f"{option} is {way}; model.head.way is {widest}, the number of classes that the "
            f"head can predict. Set model.head.way to {way}."
        )


def threads_for(flops: int, asked: int | None) -> int:
    """Return the number of intra-op threads for local steps of `flops` operations.

    It is `asked` unless that is None. Steps below 400 GFLOP are fastest with one thread and one
    worker per core; a larger step can use all cores by itself. The number is not chosen by timing,
    because the bits of results depend on it.
    """
    if asked is not None:
        return asked
    return cores() if flops >= _BIG else 1


def workers_for(flops: int, run: RunOptions, *, text: bool) -> int:
    """Return how many clients, or stacks of clients, run at once; results do not depend on it.

    `flops` is the number of operations of a local step; `text` says whether the model takes texts.
    """
    if run.fleet == "sequential" or run.device != "cpu":
        return 1
    if run.workers is not None:
        return run.workers
    assert run.threads is not None
    if run.fleet == "threads" and flops < _SMALL and not text:
        return 1
    return max(1, cores() // run.threads)


def _check_combination(config: Config) -> None:
    """Raise ConfigError for options that exclude each other, as both change how replies are added.

    Such options are secure sums, differential privacy, attacks and robust aggregation.
    """
    chosen = [
        name
        for name, used in {
            "run.secure_sums": config.run.secure_sums,
            "privacy": config.privacy is not None,
            "attack": config.attack is not None,
            "aggregate": config.aggregate != PlainMean(),
        }.items()
        if used
    ]
    together = (["run.secure_sums", "privacy"], ["attack", "aggregate"])
    if len(chosen) > 1 and chosen not in together:
        raise ConfigError(
            f"{chosen[0]} and {chosen[-1]} are both set. Secure sums hide single uploads, which "
            "attacks and robust aggregation need, and privacy clips them. Only run.secure_sums and "
            "privacy go together, and attack and aggregate. Remove one."
        )


def _check_compressed_uploads(config: Config, method: Method[Any]) -> None:
    """Raise ConfigError for options that uploads may not be compressed with."""
    if config.compress.up is None:
        return
    reasons = {
        "run.secure_sums is true: a masked sum adds an integer for each entry of a tensor, which "
        "only int8 and int4 give": config.run.secure_sums and config.compress.up.most is None,
        "privacy and run.secure_sums are set, too: clients add their noise to integers of 8 bytes, "
        "and epsilon is not shown for shorter ones": config.run.secure_sums
        and config.privacy is not None,
        "privacy.name is 'example': rounding changes an upload by more than what one example "
        "changes, for which the noise is computed": isinstance(config.privacy, ExampleLevel),
        f"the clients of {method.name} subtract their own models from the mean, which has their "
        "compressed uploads": method.traits.subtracts_own,
        "attack is one in which clients copy an upload computed from those of others, which are "
        "compressed": isinstance(config.attack, Collusion),
    }  # fmt: skip
    _refuse(
        reasons,
        "compress.up is set",
        ". Set compress.up.name to none, or remove the other option; compress.down may stay.",
    )
