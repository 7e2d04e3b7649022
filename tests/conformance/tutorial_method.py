"""The method of the tutorial, as it stands in its file."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from fedshot.methods.registry import METHODS

FILE = Path(__file__).parents[2] / "examples" / "fl_proto_momentum.py"


def own_method() -> type[Any]:
    """Load it, and take its name out of the methods again: it is the example's alone."""
    spec = importlib.util.spec_from_file_location(FILE.stem, FILE)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[FILE.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    method: type[Any] = METHODS.pop(module.FLProtoMomentum.name)
    return method


FLProtoMomentum = own_method()
