"""What methods share that train one classifier over the base classes and test clients on these."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, TypeVar

from fedshot.core.tree import Tree
from fedshot.learners.classification import Classifier
from fedshot.protocol.method import Method, Traits

S = TypeVar("S", bound=Tree)


class AmongBaseClasses(Method[S]):
    """A method with a classifier over the base classes, tested on images of the clients' own."""

    test_norm: ClassVar[str] = "support"  # the statistics of a client's own samples

    classes: tuple[int, ...]

    @property
    def traits(self) -> Traits:
        """What the method can do and what it needs."""
        return replace(super().traits, base_classes_only=True)

    @property
    def learner(self) -> Classifier:
        """What the clients train."""
        return Classifier(self.model, len(self.classes))
