"""Options that change the sums of uploads: which may be combined."""

from __future__ import annotations

from itertools import combinations

import pytest

from fedshot.config.load import Config
from fedshot.core.errors import ConfigError
from fedshot.runs.prepare import PreparedRun

BASE = {
    "data": "digits",
    "partition": {"name": "iid", "clients": 5},
    "episode": {"way": 2, "shot": 1, "query": 1},
    "model": {"backbone": "mlp"},
    "run": {"rounds": 1},
}
CHANGES = {
    "run.secure_sums": {"run": {"secure_sums": True}},
    "privacy": {"privacy": {"name": "client", "noise": 1.0}},
    "attack": {"attack": {"name": "sign_flip", "fraction": 0.2}},
    "aggregate": {"aggregate": "median"},
}


@pytest.mark.parametrize(("first", "second"), [*combinations(CHANGES, 2)])
def test_only_two_pairs_go_together(first, second):
    config = Config.of(BASE | CHANGES[first] | CHANGES[second])
    if (first, second) == ("run.secure_sums", "privacy"):
        for extra in ("cryptography", "dp_accounting"):
            pytest.importorskip(extra, reason="it needs the extras `secure` and `privacy`")
    if (first, second) in (("run.secure_sums", "privacy"), ("attack", "aggregate")):
        assert PreparedRun(config).clients == [0, 1, 2, 3, 4]
        return
    with pytest.raises(ConfigError, match=f"^{first} and {second} are both set"):
        PreparedRun(config)
