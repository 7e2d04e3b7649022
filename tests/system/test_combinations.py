"""Options that change the sums of uploads: which may be combined."""

from __future__ import annotations

from itertools import combinations

import pytest

import fedshot as fs
from fedshot.core.errors import ConfigError

BASE = {
    "data": "digits",
    "partition": {"name": "iid", "clients": 5},
    "episode": {"way": 2, "shot": 1, "query": 1},
    "run.rounds": 1,
}
CHANGES = {
    "run.secure_sums": {"run.secure_sums": True},
    "privacy": {"privacy": {"name": "client", "noise": 1.0}},
    "attack": {"attack": {"name": "sign_flip", "fraction": 0.2}},
    "aggregate": {"aggregate": "median"},
}


@pytest.mark.parametrize(("first", "second"), [*combinations(CHANGES, 2)])
def test_only_attack_and_aggregate_go_together(first, second, tmp_path):
    settings = BASE | CHANGES[first] | CHANGES[second]
    if (first, second) == ("attack", "aggregate"):
        fs.train(**settings, out=tmp_path / "run", progress=False)
        return
    with pytest.raises(ConfigError, match=f"^{first} and {second} are both set"):
        fs.train(**settings, out=tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()
