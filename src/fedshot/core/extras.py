"""Optional dependencies: the packages that each extra of fedshot installs."""

from __future__ import annotations

import importlib.util
import traceback

from fedshot.core.errors import ConfigError
from fedshot.core.text import joined

PACKAGES = {
    "completion": ("shtab",),
    "encoders": ("peft", "sentence_transformers", "transformers"),
    "flower": ("prometheus_client", "flwr", "cryptography", "httpx"),
    "hf": ("datasets",),
    "pandas": ("pandas",),
    "optuna": ("optuna",),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "privacy": ("dp_accounting",),
    "reports": ("matplotlib", "plotly", "jinja2", "markupsafe"),
    "secure": ("cryptography",),
    "timm": ("timm", "torchvision"),
    "tracking": ("tensorboard", "wandb", "mlflow"),
}
"""Name of an extra -> names under which its packages are imported."""
_REQUIRED = ("torch", "numpy", "safetensors", "pydantic", "rich", "PIL", "sklearn", "scipy")


def require(extra: str, purpose: str, *packages: str) -> None:
    """Raise ConfigError if a package of an extra is not installed.

    Args:
        extra: name of the extra, a key of `PACKAGES`.
        purpose: what needs the packages, such as "an export to ONNX"; the subject of the error.
        packages: the packages of the extra that are needed; by default all.
    """
    missing = [name for name in packages or PACKAGES[extra] if not _installed(name)]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        raise ConfigError(
            f"{purpose} needs {joined(missing)}, which {are} not installed. Install the extra "
            f"`{extra}`: pip install 'fedshot[{extra}]'."
        )


def unusable(error: ImportError) -> str | None:
    """Return the package that fedshot was using when it failed; None if it is not a dependency."""
    dependencies = {*_REQUIRED, *(name for names in PACKAGES.values() for name in names)}
    for frame, _ in traceback.walk_tb(error.__traceback__):
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("fedshot", "importlib", "__main__"):
            return package if package in dependencies else None
    return None


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
