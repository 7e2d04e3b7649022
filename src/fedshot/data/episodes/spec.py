"""What an episode looks like: how many classes, and how many images of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedshot.core.errors import DataError
from fedshot.core.ranges import AtLeast1
from fedshot.data.episodes.augment import Augment

Labels = Literal["shuffled", "fixed", "global"]


@dataclass(frozen=True)
class EpisodeSpec:
    """The shape of an N-way, K-shot episode in training.

    Args:
        way: classes, N; a pair means a random number between them, ends included.
        shot: support examples of each class, K.
        query: queries of each class.
        queries: "exact" gives every class that many. "up_to" is for small clients: a class gives
            what it has left after the shots, one at least.
        labels: which class of an episode is number 0: by chance, "shuffled", or in the order of the
            dataset, "fixed", so that where training and test have the same classes a head can know
            them. With "global" the order is that, too, and a head has an output for every class of
            the dataset, of which an episode uses those of its own: clients of other classes do not
            train one output for two.
        classes: "exact" asks for `way` classes. "up_to": a client with fewer gives all that it has,
            two at least; with a way as large as any client's an episode is of all its classes.
        augment: what is changed at random in the images; those of tests are left as they are.

    >>> print(EpisodeSpec(way=5, shot=1, query=15))
    5-way 1-shot, 15 queries
    """

    way: int | tuple[int, int] = 5
    shot: AtLeast1 = 1
    query: AtLeast1 = 15
    queries: Literal["exact", "up_to"] = "exact"
    labels: Labels = "shuffled"
    classes: Literal["exact", "up_to"] = "exact"
    augment: Augment = Augment()

    def __post_init__(self) -> None:
        if isinstance(self.way, tuple) and len(self.way) != 2:
            raise DataError(f"way is {self.way}; expected a number, or a pair such as (3, 7)")
        if not 1 <= self.min_way <= self.max_way:
            raise DataError(
                f"way is {self.way}; expected at least 1, and the smaller end of a pair first"
            )
        for name in ("shot", "query"):
            if getattr(self, name) < 1:
                raise DataError(f"{name} is {getattr(self, name)}; an episode needs at least 1")
        if self.queries not in ("exact", "up_to"):
            raise DataError(f"queries is {self.queries!r}; expected 'exact' or 'up_to'")
        if self.classes not in ("exact", "up_to"):
            raise DataError(f"classes is {self.classes!r}; expected 'exact' or 'up_to'")
        if self.labels not in ("shuffled", "fixed", "global"):
            raise DataError(f"labels is {self.labels!r}; expected 'shuffled', 'fixed' or 'global'")

    @property
    def min_way(self) -> int:
        """The fewest classes an episode can have."""
        return self.way[0] if isinstance(self.way, tuple) else self.way

    @property
    def max_way(self) -> int:
        """The most classes an episode can have."""
        return self.way[1] if isinstance(self.way, tuple) else self.way

    @property
    def ordered(self) -> bool:
        """Whether an episode's classes come in the order of the dataset."""
        return self.labels != "shuffled"

    @property
    def fewest(self) -> int:
        """Classes that whoever gives an episode must have."""
        return min(2, self.max_way) if self.classes == "up_to" else self.max_way

    @property
    def needed(self) -> int:
        """Images that a class must have to take part."""
        return self.shot + (self.query if self.queries == "exact" else 1)

    @property
    def divided(self) -> int:
        """Images of a class of which one is a support, where all are divided shot to query."""
        return -(-(self.shot + self.query) // self.shot)

    @property
    def is_random_way(self) -> bool:
        """Whether episodes differ in their number of classes."""
        return self.min_way != self.max_way

    @property
    def way_text(self) -> str:
        """The way in words, as in `5-way` or `3-to-7-way`."""
        ends = f"{self.min_way}-to-{self.max_way}" if self.is_random_way else str(self.max_way)
        return f"{ends}-way"

    @property
    def episode_text(self) -> str:
        """An episode in words, as in `a 5-way episode`."""
        if self.classes == "up_to":
            return f"an episode of up to {self.max_way} classes"
        return f"a {self.way_text} episode"

    @property
    def whole_text(self) -> str:
        """An episode in full, as in `a 5-way 1-shot, 15 queries episode`."""
        return f"an episode of {self}" if self.classes == "up_to" else f"a {self} episode"

    def __str__(self) -> str:
        way = f"up to {self.way_text}" if self.classes == "up_to" else self.way_text
        most = "up to " if self.queries == "up_to" else ""
        noun = "query" if self.query == 1 else "queries"
        return f"{way} {self.shot}-shot, {most}{self.query} {noun}"

    def shortage(self, able: int) -> str:
        """Say what `able` large enough classes lack, as in `has 3 classes ..., ... needs 5`."""
        classes = "1 class" if able == 1 else f"{able} classes"
        return (
            f"has {classes} with at least {self.needed} examples, "
            f"{self.episode_text} needs {self.fewest}"
        )
