"""How a run was tested: a description that is shown beside its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from fedshot.config.schema import not_honest
from fedshot.config.settings import at
from fedshot.core.records import Share, Whole
from fedshot.evaluation.episodic_test import ScoreJson
from fedshot.fleets.meter import LedgerLine
from fedshot.runs.recorder import Round


class _Shape(TypedDict):
    way: NotRequired[Annotated[list[Whole], Field(min_length=1)] | Whole | None]
    shot: NotRequired[Whole | None]


class _Spent(TypedDict):
    level: Literal["client", "example"]
    epsilon: Annotated[float, Field(ge=0)]
    delta: Annotated[float, Field(gt=0, lt=1)]


class AttackJson(TypedDict):
    """The dishonest clients, and the share of triggered queries that take a backdoor's class."""

    liars: list[Whole]
    backdoor: NotRequired[Share | None]


class ResultJson(TypedDict):
    """The keys of result.json that are read."""

    test: ScoreJson
    baselines: NotRequired[dict[str, ScoreJson]]
    rounds: NotRequired[Round]
    round: NotRequired[Round]
    chosen_by: NotRequired[str]
    own: NotRequired[bool]
    shape: NotRequired[_Shape]
    bytes_down: NotRequired[Whole]
    bytes_up: NotRequired[Whole]
    ledger: NotRequired[list[LedgerLine]]
    hours: NotRequired[Annotated[float, Field(ge=0)]]
    privacy: NotRequired[_Spent]
    attack: NotRequired[AttackJson]


@dataclass(frozen=True)
class TestProtocol:
    """How a run was tested, according to its files.

    Args:
        own: whether each client was tested on images of its own classes, in one episode; None if
            unknown.
        users: whether the data were split by user, not by class, so that no tested user took part
            in training.
        way: (fewest, most) classes of an episode; None if unknown.
        shot: support examples per class; None if unknown or if clients use all training examples.
        marks: reasons why the result is not a fair estimate, from `not_honest`.
        classes: names of the tested classes; empty if unknown.
    """

    own: bool | None = None
    users: bool = False
    way: tuple[int, int] | None = None
    shot: int | None = None
    marks: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, settings: Mapping[str, Any], result: Mapping[str, Any] | None = None
    ) -> TestProtocol:
        """Return the test described by a run's settings and its result.json."""
        result = result or {}
        users = at(settings, "split.users") is not None
        own = result.get("own")
        shape = result.get("shape", {})
        way = shape.get("way", None if own else at(settings, "test.way"))
        shot = shape.get("shot", None if own else at(settings, "test.shot"))
        pair = (way, way) if isinstance(way, int) else way and (way[0], way[-1])
        return cls(own, users, pair, shot, tuple(not_honest(settings)))

    @property
    def shape(self) -> str:
        """The shape of an episode, such as "3- to 7-way 1-shot"; "" if unknown."""
        if self.way is None:
            return ""
        least, most = self.way
        way = f"{most}-way" if least == most else f"{least}- to {most}-way"
        return way if self.shot is None else f"{way} {self.shot}-shot"

    @property
    def unit(self) -> str:
        """The unit over which mean and interval are taken: "client" or "episode"."""
        return "client" if self.own else "episode"

    @property
    def where(self) -> str:
        """Description of where the test examples come from; "" if unknown."""
        if self.own is None:
            return ""
        if self.own:
            return "images of the clients' own classes that were set aside"
        if self.users:
            return "examples of users who took no part in training"
        return "classes that no client trained on"

    def on(self, n: int) -> str:
        """Describe a test of n clients or episodes, as in "1,000 5-way 1-shot test episodes"."""
        if self.own:
            shape = f" ({self.shape})" if self.shape else ""
            return f"{n:,} client{'s' * (n != 1)}, tested on {self.where}{shape}"
        shape = f"{self.shape} " if self.shape else ""
        return f"{n:,} {shape}test episodes{f' of {self.where}' if self.where else ''}"

    def unlike(self, other: TestProtocol) -> str:
        """Return the first known difference between two tests, such as their shapes; "" if none."""
        if None not in (self.own, other.own) and (self.own, self.users) != (other.own, other.users):
            return f"{self.where}, and {other.where}"
        if self.way and other.way and (self.way, self.shot) != (other.way, other.shot):
            return f"{self.shape}, and {other.shape}"
        if self.classes and other.classes and self.classes != other.classes:
            return "other classes"
        return ""


def chose_by_test(settings: Mapping[str, Any]) -> bool:
    """Return whether a run chooses its round by the accuracy on the test itself."""
    return bool(at(settings, "run.choose") == "best_on_test_classes")


def alike(tests: Sequence[TestProtocol]) -> TestProtocol:
    """Return what several protocols have in common; fields that differ are unknown.

    The result has the marks of all protocols.
    """
    if not tests:
        return TestProtocol()
    first, *others = tests
    same = all(t.own == first.own and t.users == first.users for t in others)
    shapes = same and all((t.way, t.shot) == (first.way, first.shot) for t in others)
    marks = tuple(dict.fromkeys(mark for t in tests for mark in t.marks))
    return TestProtocol(
        first.own if same else None,
        first.users and same,
        first.way if shapes else None,
        first.shot if shapes else None,
        marks,
        first.classes if all(t.classes == first.classes for t in others) else (),
    )
