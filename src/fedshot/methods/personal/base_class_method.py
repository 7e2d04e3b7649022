"""What methods share that train one classifier over the base classes, and test clients on these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fedshot.learners.classification import Classifier
from fedshot.nn.models.model import Model


class AmongBaseClasses:
    """A mixin for a method with these two fields: no dataclass, so their order is the method's."""

    knows_base_alone: ClassVar[bool] = True

    model: Model
    classes: tuple[int, ...]

    @staticmethod
    def norm_policy(options: Mapping[str, Any]) -> str:
        """Return the batch norm at test: the statistics of a client's own samples."""
        del options
        return "support"

    @property
    def learner(self) -> Classifier:
        """What the clients train."""
        return Classifier(self.model, len(self.classes))

    @property
    def transductive(self) -> bool:
        """Whether predictions for one query depend on the others."""
        return self.model.norm_policy == "transductive"

    @property
    def max_way(self) -> int | None:
        """None: any number of the base classes."""
        return None
