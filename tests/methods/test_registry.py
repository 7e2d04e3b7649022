"""Names of methods: each has one class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

from fedshot.core.errors import ConfigError
from fedshot.methods.base.fl_proto import FLProto
from fedshot.methods.registry import METHODS, register


def test_a_second_method_of_a_name_is_refused_with_both_places() -> None:
    @dataclass(frozen=True)
    class Again(FLProto):
        """Another class with the name of FL-Proto."""

    both = r"FLProto \(.*fl_proto\.py, line \d+\) and .*Again \(.*test_registry\.py, line \d+\)"
    with pytest.raises(ConfigError, match=f"two methods have the name 'fl_proto': {both}"):
        register(Again)
    assert METHODS["fl_proto"] is FLProto


def test_a_method_that_is_defined_again_replaces_the_earlier_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def defined() -> type[FLProto]:  # a cell of a notebook
        @register
        @dataclass(frozen=True)
        class Mine(FLProto):
            """A method."""

            name: ClassVar[str] = "mine"

        return Mine

    monkeypatch.delitem(METHODS, "mine", raising=False)
    first, second = defined(), defined()
    assert METHODS.pop("mine") is second is not first
