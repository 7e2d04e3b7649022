"""The plan of a private run: checked before round 1, with the noise and what every round costs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from fedshot.config.load import Config
from fedshot.config.schema import RunOptions
from fedshot.core import records, storage
from fedshot.core.errors import CheckpointError, ConfigError
from fedshot.core.extras import require
from fedshot.core.records import Whole
from fedshot.core.seeds import Key
from fedshot.core.text import count
from fedshot.data.partitions.resampled import Resampled
from fedshot.privacy.accounting import Accountant
from fedshot.privacy.differential import LEAST_NOISE, ClientLevel, Mechanism, Privacy
from fedshot.privacy.private_clients import PrivateClients, rehearse
from fedshot.privacy.secure_sums.client_noise import ClientNoise, NoisyClients
from fedshot.protocol.clients import Clients
from fedshot.protocol.exchange import Fleet
from fedshot.protocol.method import Method

LEDGER = "privacy.json"
"""File of the rounds that a run with secret noise has begun."""


@dataclass(frozen=True)
class PrivacyPlan:
    """How a run adds noise, and what it spends.

    Args:
        mechanism: how contributions are bounded, and how much noise is added.
        accountant: counts the loss per round at client level, and per upload at example level.
        releases: exchanges of a round.
        by_client: whether clients are hidden; otherwise examples are, each uploaded once in a run.
        budget: the most epsilon that the run may spend; None for no limit.
        secure: whether clients add the noise, inside secure sums.
    """

    mechanism: Mechanism
    accountant: Accountant
    releases: int
    by_client: bool
    budget: float | None = None
    secure: bool = False

    def epsilon(self, rounds: int, repeated: int = 0) -> float:
        """Return epsilon after `rounds` rounds, and `repeated` repetitions with fresh noise."""
        if not self.by_client:
            rounds = min(rounds, 1)
        return self.accountant.epsilon(rounds + repeated)

    def to_json(self, rounds: int, repeated: int = 0) -> dict[str, Any]:
        """Return the entry "privacy" of a private run's result.json."""
        return {
            "level": "client" if self.by_client else "example",
            "epsilon": self.epsilon(rounds, repeated),
            "delta": self.accountant.delta,
            "noise": self.accountant.noise,
            "releases": self.releases,
        }


def planned(
    config: Config,
    method: Method[Any],
    clients: Sequence[int],
    examples: int,
    key: Key,
    *,
    own_tests: bool,
) -> PrivacyPlan | None:
    """Return the plan of a run; None without privacy.

    Args:
        config: the configuration.
        method: its method.
        clients: the clients that take part.
        examples: number of their examples.
        key: key of the method's initial state.
        own_tests: whether clients are tested on their own examples.

    Raises:
        ConfigError: dp-accounting is not installed; the method, the data or the choice of the
            round is not covered; delta is too large; or all rounds spend more than privacy.epsilon.
    """
    options, run = config.privacy, config.run
    if options is None:
        return None
    require("privacy", "privacy")
    _check_sampling(run, options)
    by_client = isinstance(options, ClientLevel)
    level, units = ("client", len(clients)) if by_client else ("example", examples)
    if units and options.delta > 1 / units:  # a server without the data counts no examples
        raise ConfigError(
            f"privacy.delta is {options.delta}, above 1 / {units:,}: with that delta the run may "
            f"publish all that it knows of one {level}. Set privacy.delta to {1 / units:.1g} or "
            "much less."
        )
    if method.traits.subtracts_own:
        raise ConfigError(
            f"privacy is set, and the clients of {method.name} subtract their own models from the "
            "mean, which privacy clips and weighs alike. Set method.reference to 'global'."
        )
    if isinstance(config.partition, Resampled):
        raise ConfigError(
            "privacy is set, and partition 'resampled' gives a client other examples in every "
            f"round, so there is no {level} to hide. Choose another partition."
        )
    if own_tests and run.choose != "last":
        raise ConfigError(
            f"privacy is set, and run.choose is {run.choose!r}, but the split has no classes of "
            "the server's own: the round would be chosen by clients' examples, and the choice gets "
            "no noise. Set run.choose to 'last', or name validation classes in split.validation."
        )
    if run.secure_sums:
        _check_client_noise(options)
    if isinstance(options, ClientLevel):
        mechanism = options.mechanism(1.0)
    elif (sensitivity := method.example_sensitivity) is not None:
        mechanism = Mechanism(1.0, sensitivity=sensitivity)
    else:
        raise ConfigError(
            "privacy.name is 'example', and nothing bounds what one example changes in the uploads "
            f"of {method.name}: they are not sums over examples, each of bounded size. Set "
            "privacy.name to 'client', which hides a client with all its examples; or choose "
            "fedncm, fedcgs or fed3r, with method.normalize true."
        )
    releases = rehearse(method, clients, mechanism, key)
    # With secure sums the server knows who takes part, so sampling hides nothing.
    cohort = len(clients) if run.secure_sums else run.cohort or len(clients)
    probability = min(cohort, len(clients)) / len(clients)
    accountant = Accountant(options.noise or 1.0, options.delta)
    rounds = min(run.rounds, 1)
    if by_client:
        rounds = run.rounds
        accountant = replace(accountant, releases=releases, probability=probability,
                             fixed_of=len(clients) if mechanism.fixed else None)  # fmt: skip
    if options.noise is None:
        assert options.epsilon is not None
        accountant = accountant.calibrated(options.epsilon, rounds)
        accountant = replace(accountant, noise=max(accountant.noise, LEAST_NOISE))
    elif options.epsilon is not None and (spent := accountant.epsilon(rounds)) > options.epsilon:
        lasts = accountant.rounds_within(options.epsilon, rounds)
        fix = f"Set run.rounds to {lasts}, raise" if lasts else "Raise"
        raise ConfigError(
            f"privacy.epsilon is {options.epsilon:g}, and {count(rounds, 'round')} with "
            f"privacy.noise {options.noise:g} spend {spent:.3g}. {fix} privacy.noise, or leave it "
            "out for the least noise that keeps to epsilon."
        )
    mechanism = replace(mechanism, noise=accountant.noise)
    return PrivacyPlan(mechanism, accountant, releases, by_client, options.epsilon, run.secure_sums)


def _check_sampling(run: RunOptions, options: Privacy) -> None:
    """Raise ConfigError if replies that count are not those of clients sampled from all."""
    one_more = isinstance(options, ClientLevel) and options.sampling == "poisson"
    if run.clock.wait_for is not None and one_more and not run.secure_sums:
        raise ConfigError(
            "privacy is set with sampling 'poisson', and run.clock.wait_for: one client more may "
            "push another out of the first replies, which changes the sum by two clips, not one. "
            "Set privacy.sampling to 'fixed', or use run.clock.deadline."
        )
    if run.clock.availability is not None:
        raise ConfigError(
            "privacy is set, and run.clock.availability: epsilon holds for cohorts that are "
            "sampled from all clients, not only from those online. Remove one of them."
        )


def _check_client_noise(options: Privacy) -> None:
    """Raise ConfigError for options that clients who add the noise do not support."""
    if not isinstance(options, ClientLevel):
        raise ConfigError(
            "privacy.name is 'example', and run.secure_sums is true: clients add noise only to "
            "contributions of bounded size, which are clipped. Set privacy.name to 'client', or "
            "run.secure_sums to false."
        )
    if options.quantile is not None:
        raise ConfigError(
            f"privacy.quantile is {options.quantile}, and run.secure_sums is true: the clients "
            "clip, and nothing tells the server how many had a norm above the clip. Remove "
            "privacy.quantile, or set run.secure_sums to false."
        )


def client_noise(config: Config, clients: int, *, secret: bool = False) -> ClientNoise | None:
    """Return the noise that clients add in secure sums; None if they add none.

    Args:
        config: the configuration of a prepared run.
        clients: the number of all clients.
        secret: whether the noise is drawn from the operating system.

    Raises ConfigError if privacy.noise is missing, or there are too many clients.
    """
    options = config.privacy
    if not (config.run.secure_sums and isinstance(options, ClientLevel)):
        return None
    if options.noise is None:
        raise ConfigError("clients add the noise, and privacy.noise is missing. Set it.")
    mechanism = options.mechanism(options.noise, secret=secret)
    cohort = min(config.run.cohort or clients, clients)
    return ClientNoise(mechanism, config.run.secure_threshold, clients, cohort)


class _Ledger(TypedDict):
    begun: Whole


class PrivacyLedger:
    """What a run has spent, and the clients of its rounds.

    Noise that follows from the run's seed is the same when a round is repeated after a crash, which
    then costs nothing. Secret noise is not: a run with it writes down every round before it begins,
    and counts repeated rounds, too. `clips` are the clips that have adapted, by name.

    Args:
        plan: the plan of the run; None without privacy.
        folder: folder of the run.
        secret: whether noise and cohorts are drawn from the operating system.
    """

    def __init__(self, plan: PrivacyPlan | None, folder: Path, *, secret: bool) -> None:
        self._plan, self._path = plan, folder / LEDGER
        self._secret = secret and plan is not None
        self.clips: dict[str, float] = {}

    def _repeated(self, round: int) -> int:
        """Return how many rounds were begun but lost in a crash; `round` rounds are complete.

        Raises CheckpointError if the file that counts them is missing or damaged.
        """
        if not self._secret:
            return 0
        if not self._path.exists():
            if round:
                raise CheckpointError(
                    f"{self._path} is missing, which counts the rounds whose noise was drawn. "
                    "Without it epsilon could be too small. Restore it from a copy, or start a new "
                    "run."
                )
            return 0
        begun: int = records.read(self._path, _Ledger, records.COPY)["begun"]
        return max(0, begun - round)

    def epsilon(self, round: int) -> float | None:
        """Return epsilon after a round; None without privacy."""
        return None if self._plan is None else self._plan.epsilon(round, self._repeated(round))

    def spent(self, round: int) -> dict[str, Any]:
        """Return the entry "privacy" of result.json after a round; {} without privacy."""
        return {} if self._plan is None else self._plan.to_json(round, self._repeated(round))

    def charge(self, round: int) -> None:
        """Count a round that is about to begin. Raises ConfigError if the budget is spent."""
        if self._plan is None or not self._secret:
            return  # the plan has checked that all rounds keep to the budget
        repeated = self._repeated(round - 1)
        spent, budget = self._plan.epsilon(round, repeated), self._plan.budget
        if budget is not None and spent > budget:
            raise ConfigError(
                f"privacy.epsilon is {budget:g}, and round {round} would spend {spent:.3g}: "
                f"{count(repeated, 'round')} had to be repeated. The run ends with round "
                f"{round - 1}: set run.rounds to {round - 1}, and resume it for its test."
            )
        content = json.dumps(_Ledger(begun=round + repeated))
        storage.write_bytes(self._path, content.encode(), sync=True)

    def clients(self, fleet: Fleet, ids: Sequence[int], **options: Any) -> Clients:
        """Return the clients of a round; `options` are those of `Clients`."""
        if self._plan is None:
            return Clients(fleet, ids, **options)
        mechanism = replace(self._plan.mechanism, secret=self._secret)
        of = NoisyClients if self._plan.secure else PrivateClients
        return of(fleet, ids, mechanism, self._plan.releases, clips=self.clips, **options)
