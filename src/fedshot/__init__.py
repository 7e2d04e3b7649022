"""Federated few-shot learning: train across clients, recognise new classes from a few examples."""

import importlib

TYPE_CHECKING = False  # type checkers take it for true; `typing` would take longest to import
if TYPE_CHECKING:
    from fedshot.api.comparing import Comparison, compare
    from fedshot.api.listing import Listing, datasets, methods, options
    from fedshot.api.memory_data import as_dataset
    from fedshot.api.training import train
    from fedshot.api.training_run import RunResult, TrainingRun, open_run
    from fedshot.core.errors import (
        BusyError,
        CheckpointError,
        ConfigError,
        DataError,
        FedshotError,
        InputError,
        QuorumError,
    )
    from fedshot.data.dataset import Dataset
    from fedshot.use.classifier import FewShotClassifier

__version__ = "0.1.0"
__all__ = [
    "BusyError", "CheckpointError", "Comparison", "ConfigError", "DataError", "Dataset",
    "FedshotError", "FewShotClassifier", "InputError", "Listing", "QuorumError", "RunResult",
    "TrainingRun", "__version__", "as_dataset", "compare", "datasets", "methods", "open_run",
    "options", "train",
]  # fmt: skip

_MODULES = {  # where the public names are defined; the modules are imported on first use
    "fedshot.api.comparing": {"Comparison", "compare"},
    "fedshot.api.listing": {"Listing", "datasets", "methods", "options"},
    "fedshot.api.memory_data": {"as_dataset"},
    "fedshot.api.training": {"train"},
    "fedshot.api.training_run": {"RunResult", "TrainingRun", "open_run"},
    "fedshot.core.errors": {
        "BusyError", "CheckpointError", "ConfigError", "DataError", "FedshotError", "InputError",
        "QuorumError",
    },
    "fedshot.data.dataset": {"Dataset"},
    "fedshot.use.classifier": {"FewShotClassifier"},
}  # fmt: skip
_OWNERS = {name: module for module, names in _MODULES.items() for name in names}

if not TYPE_CHECKING:  # a type checker would accept every name

    def __getattr__(name):
        if name not in _OWNERS:
            raise AttributeError(f"module 'fedshot' has no attribute {name!r}")
        return getattr(importlib.import_module(_OWNERS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
