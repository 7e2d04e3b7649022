"""The devices that a run computes on, and how their arithmetic rounds."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fedshot.core.errors import ConfigError

CPU = torch.device("cpu")

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"  # with a fixed workspace, cuBLAS gives the same bits each time


def devices_of(names: str, option: str = "run.device") -> tuple[torch.device, ...]:
    """Return the devices in a list such as "cpu", "cuda" or "cuda:0,cuda:1".

    Raises ConfigError for an unknown device, one that torch does not see here, or one that is
    named twice.
    """
    found = tuple(_device(name.strip(), names, option) for name in names.split(","))
    if len(set(found)) < len(found) or (len(found) > 1 and {d.type for d in found} != {"cuda"}):
        raise ConfigError(
            f"{option} is {names!r}; expected one device, or several GPUs, each once, such as "
            "'cuda:0,cuda:1'."
        )
    return found


def _device(name: str, names: str, option: str) -> torch.device:
    kind, _, number = name.partition(":")
    if not re.fullmatch(r"cpu|mps|cuda(:[0-9]{1,3})?", name):
        raise ConfigError(
            f"{option} is {names!r}; expected 'cpu', 'cuda', 'cuda:1', 'mps', or several GPUs, "
            "such as 'cuda:0,cuda:1'."
        )
    if kind == "cuda":
        seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(number or 0) >= seen:
            here = f"{seen} CUDA device{'s' * (seen > 1)}" if seen else "no CUDA device"
            raise ConfigError(
                f"{option} is {names!r}, and torch sees {here} here. Use "
                f"{'a smaller number' if seen else repr('cpu')}, or install a build of torch for "
                "this machine's GPU and its driver."
            )
        return torch.device("cuda", int(number or 0))
    if kind == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(
            f"{option} is 'mps', and torch sees no Apple GPU here. Use 'cpu' or 'cuda'."
        )
    return torch.device(kind)


def described(devices: Sequence[torch.device]) -> list[str]:
    """Return each device's name; a GPU's includes its model and the CUDA and cuDNN versions."""
    cuda = f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"  # type: ignore[no-untyped-call]
    return [
        f"{torch.cuda.get_device_name(device)}, {cuda}" if device.type == "cuda" else str(device)
        for device in devices
    ]


@contextmanager
def gpu_arithmetic(*, tf32: bool, deterministic: bool) -> Iterator[None]:
    """Set how CUDA devices compute in float32; restore the settings of torch afterwards.

    Args:
        tf32: convolutions and matrix products round their inputs to 10 bits of mantissa (TF32).
        deterministic: operations give the same bits each time; cuDNN does not choose its
            algorithms by timing. Torch warns about operations that it cannot make deterministic.
    """
    cudnn, products = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, products.allow_tf32, cudnn.deterministic, cudnn.benchmark
    mode = torch.get_deterministic_debug_mode()
    fills: Any = torch.utils.deterministic
    filled = fills.fill_uninitialized_memory
    if deterministic:
        os.environ.setdefault(_CUBLAS, ":4096:8")  # read when a CUDA context first uses cuBLAS
    cudnn.allow_tf32 = products.allow_tf32 = tf32
    cudnn.deterministic, cudnn.benchmark = deterministic, not deterministic
    torch.set_deterministic_debug_mode(1 if deterministic else 0)
    fills.fill_uninitialized_memory = False  # every element is written before it is read
    try:
        yield
    finally:
        cudnn.allow_tf32, products.allow_tf32, cudnn.deterministic, cudnn.benchmark = before
        torch.set_deterministic_debug_mode(mode)
        fills.fill_uninitialized_memory = filled
