"""With secure sums, a method gives the bits of its plain run, or is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="secure sums need the extra `secure`")

from conformance.cases import FLOWER, METHODS
from fedshot.conformance.checks import REFERENCE, THREADS, VECTORISED
from fedshot.conformance.federation import Federation, FleetCase, RunTensors, assert_same
from fedshot.core.errors import ConfigError
from fedshot.fleets.unreliable import Unreliable
from fedshot.privacy.secure_sums.masking_clients import (
    KEYS,
    SHARES,
    UNMASK,
    MaskingClients,
    simulated,
)
from fedshot.privacy.secure_sums.neighbourhoods import needed
from fedshot.privacy.secure_sums.requirements import needs_each
from fedshot.privacy.secure_sums.server_sum import SecureSums
from fedshot.protocol.exchange import Exchange, Fleet

PAGE = Path(__file__).parents[2] / "docs" / "privacy.md"
THRESHOLD = 0.66
EVERYONE = range(6)
VICTIMS = {0: (), 1: (3,), 2: (1, 4)}  # `needed` of 6 clients are 4
WORK = "the work"
QUICK = ("fedncm", WORK, 2)
LOSING = ("fl_proto", "fedfsl_mi", "f2l", "frl", "fedncm")


def losing(stage: str, victims: tuple[int, ...]) -> Callable[[Fleet], Fleet]:
    """Return a wrapper that loses clients at a step of the first exchange."""

    def lost(exchange: Exchange, client: int) -> bool:
        name = WORK if exchange.work.method is not None else exchange.work.name
        return exchange.version == (1, 0) and name == stage and client in victims

    return lambda fleet: Unreliable(fleet, lambda *asked: "drop" if lost(*asked) else None)


def trained(
    named: str,
    where: FleetCase,
    folder: Path,
    lose: Callable[[Fleet], Fleet] = lambda fleet: fleet,
    *,
    secure: bool,
) -> RunTensors:
    """Return everything after a round, or two if no client is lost."""

    def masking(fleet: Fleet) -> Fleet:  # the node of the Flower fleet masks itself
        return lose(fleet if where is FLOWER else MaskingClients(fleet, simulated))

    run = Federation(
        METHODS[named], where, folder,
        around=masking if secure else lose,
        combine=SecureSums(THRESHOLD) if secure else None,
    )  # fmt: skip
    return run.train(1, choose=EVERYONE).everything()


@cache
def refused_methods() -> set[str]:
    """Return the methods that the page on privacy names as refused."""
    named = PAGE.read_text().partition("**Refused**: ")[2].partition(", whose server")[0]
    return set(re.findall(r"`(\w+)`", named))


@pytest.mark.slow
@pytest.mark.parametrize("case", METHODS)
def test_a_method_gives_its_bits_or_is_refused_as_the_page_says(case: str, tmp_path: Path) -> None:
    name, gathers = METHODS[case].name, METHODS[case].traits.gathers
    if case == "synthetic":  # a method of a user, who did not state it
        gathers = ("count_images", "sketch")
    refused = name in refused_methods() or case in ("fedfsl_prox, common questions", "synthetic")
    assert refused == (gathers is not None)
    if gathers is not None:
        with pytest.raises(ConfigError) as error:
            trained(case, REFERENCE, tmp_path, secure=True)
        assert str(error.value) == str(needs_each(name, *gathers))
        return
    plain = trained(case, REFERENCE, tmp_path / "plain", secure=False)
    assert_same(trained(case, REFERENCE, tmp_path / "secure", secure=True), plain)


def marks(named: str, stage: str, n: int) -> list[pytest.MarkDecorator]:
    """Return the marks of a loss: one is quick, and losses of one client are exhaustive."""
    if (named, stage, n) == QUICK:
        return []
    return [pytest.mark.slow, *([pytest.mark.exhaustive] if n == 1 else [])]


@pytest.mark.parametrize(
    ("named", "stage", "n_lost"),
    [
        pytest.param(named, stage, n, marks=marks(named, stage, n))
        for named in LOSING
        for stage in (KEYS, SHARES, WORK, UNMASK)
        for n in VICTIMS
        if n or stage == KEYS
    ],
)
def test_whoever_is_lost_the_bits_are_those_of_the_plain_run(
    named: str, stage: str, n_lost: int, tmp_path: Path
) -> None:
    assert len(EVERYONE) - max(VICTIMS) == needed(THRESHOLD, len(EVERYONE))
    victims = VICTIMS[n_lost]
    plain = losing(WORK, () if stage == UNMASK else victims)
    expected = trained(named, REFERENCE, tmp_path / "plain", plain, secure=False)
    found = trained(named, REFERENCE, tmp_path / "secure", losing(stage, victims), secure=True)
    assert_same(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("named", ["fl_proto", "f2l", "frl", "fedncm"])
@pytest.mark.parametrize("where", [THREADS, VECTORISED, FLOWER], ids=lambda where: where.name)
@pytest.mark.parametrize("stage", [WORK, pytest.param(UNMASK, marks=pytest.mark.exhaustive)])
def test_every_fleet_gives_its_bits(
    named: str, where: FleetCase, stage: str, tmp_path: Path
) -> None:
    victims = VICTIMS[2]
    plain = losing(WORK, () if stage == UNMASK else victims)
    expected = trained(named, where, tmp_path / "plain", plain, secure=False)
    found = trained(named, where, tmp_path / "secure", losing(stage, victims), secure=True)
    assert_same(RunTensors(found, REFERENCE), RunTensors(expected, REFERENCE))
