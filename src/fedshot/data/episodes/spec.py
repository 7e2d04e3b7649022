"""The shape of an episode: the number of classes, and the number of images of each class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedshot.core.errors import DataError
from fedshot.core.ranges import AtLeast1
from fedshot.core.text import count
from fedshot.data.episodes.augment import Augment

Labels = Literal["shuffled", "fixed", "global"]


@dataclass(frozen=True)
class EpisodeSpec:
    """The shape of an N-way, K-shot episode in training.

    Args:
        way: number of classes, N; a pair is the range, ends included, from which N is drawn.
        shot: number of support examples of each class, K.
        query: number of queries of each class.
        queries: "exact" requires `query` queries of every class. "up_to", for small clients, allows
            fewer, but at least one, if a class has too few images left after the support.
        labels: the order in which an episode's classes are numbered. "shuffled": at random.
            "fixed": as in the dataset, so that a head can learn classes that training and test
            share. "global": as in the dataset, with a head that has one output for every class of
            the dataset. An episode then uses only the outputs of its own classes, so that different
            classes never train the same output.
        classes: "exact" requires `way` classes. "up_to" lets a client with fewer classes use all of
            them, but at least two.
        augment: random changes of training images; test images are not changed.

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

    @property
    def min_way(self) -> int:
        """The minimum number of classes of an episode."""
        return self.way[0] if isinstance(self.way, tuple) else self.way

    @property
    def max_way(self) -> int:
        """The maximum number of classes of an episode."""
        return self.way[1] if isinstance(self.way, tuple) else self.way

    @property
    def ordered(self) -> bool:
        """Whether an episode's classes have the order of the dataset."""
        return self.labels != "shuffled"

    @property
    def min_classes(self) -> int:
        """Minimum number of classes a client needs to form an episode."""
        return min(2, self.max_way) if self.classes == "up_to" else self.max_way

    @property
    def min_images(self) -> int:
        """Minimum number of images a class needs to be part of an episode."""
        return self.shot + (self.query if self.queries == "exact" else 1)

    @property
    def min_to_divide(self) -> int:
        """Minimum number of images of a class that give a client a support example.

        It applies to clients that divide all their images of a class in the ratio `shot` to
        `query`.
        """
        return -(-(self.shot + self.query) // self.shot)

    @property
    def is_random_way(self) -> bool:
        """Whether the number of classes is drawn for each episode."""
        return self.min_way != self.max_way

    @property
    def way_text(self) -> str:
        """The way as text, such as `5-way` or `3-to-7-way`."""
        ends = f"{self.min_way}-to-{self.max_way}" if self.is_random_way else str(self.max_way)
        return f"{ends}-way"

    @property
    def episode_text(self) -> str:
        """The way as a noun phrase, such as `a 5-way episode`."""
        if self.classes == "up_to":
            return f"an episode of up to {self.max_way} classes"
        return f"a {self.way_text} episode"

    @property
    def whole_text(self) -> str:
        """The whole shape as a noun phrase, such as `a 5-way 1-shot, 15 queries episode`."""
        return f"an episode of {self}" if self.classes == "up_to" else f"a {self} episode"

    def __str__(self) -> str:
        way = f"up to {self.way_text}" if self.classes == "up_to" else self.way_text
        most = "up to " if self.queries == "up_to" else ""
        noun = "query" if self.query == 1 else "queries"
        return f"{way} {self.shot}-shot, {most}{self.query} {noun}"

    def shortage(self, n: int) -> str:
        """Return why `n` classes with enough images are too few, as text that begins with "has"."""
        return (
            f"has {count(n, 'class', 'classes')} with at least {self.min_images} examples, but "
            f"{self.episode_text} needs {self.min_classes}"
        )
