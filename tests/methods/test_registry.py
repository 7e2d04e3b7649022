"""Names of methods: each has one class."""

from __future__ import annotations

from dataclasses import dataclass

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


def test_the_methods_of_the_package_are_registered_by_their_names() -> None:
    assert all(name == method.name for name, method in METHODS.items())
    assert len(METHODS) >= 29
