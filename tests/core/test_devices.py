"""Devices by name, and the settings of a GPU's arithmetic."""

from __future__ import annotations

import pytest
import torch

from fedshot.config.schema import RunOptions
from fedshot.core.devices import CPU, described, devices_of
from fedshot.core.errors import ConfigError
from pretend_gpu import pretend_gpu


@pytest.mark.parametrize(("names", "reason"), [
    ("gpu", "expected 'cpu', 'cuda', 'cuda:1', 'mps', or several GPUs"),
    ("cuda:", "expected 'cpu', 'cuda'"), ("cpu:1", "expected 'cpu', 'cuda'"),
    ("cuda:٣", "expected 'cpu', 'cuda'"), ("", "expected 'cpu', 'cuda'"),
    ("cuda:2", "torch sees 2 CUDA devices here. Use a smaller number"),
    ("cuda:0,cuda", "expected one device, or several GPUs, each once"),
    ("cpu,cuda", "expected one device, or several GPUs"),
    ("mps", "torch sees no Apple GPU here. Use 'cpu' or 'cuda'"),
])  # fmt: skip
def test_a_device_that_is_not_here_is_refused(
    names: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pretend_gpu(), pytest.raises(ConfigError, match=r"run\.device is ") as error:
        devices_of(names)
    assert reason in str(error.value)


def test_without_a_gpu_the_error_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"torch sees no CUDA device here\. Use 'cpu'"):
        devices_of("cuda")


def test_devices_by_name() -> None:
    with pretend_gpu():
        assert devices_of("cpu") == (CPU,)
        assert devices_of("cuda") == (torch.device("cuda:0"),)
        found = devices_of("cuda:1, cuda:0")
        assert [d.index for d in found] == [1, 0]
        assert described(found)[0].startswith("a pretended GPU, CUDA")


def test_a_gpu_has_its_arithmetic_during_a_run_only() -> None:
    cudnn, products = torch.backends.cudnn, torch.backends.cuda.matmul

    def flags() -> tuple[object, ...]:
        mode = torch.get_deterministic_debug_mode()
        return cudnn.allow_tf32, products.allow_tf32, cudnn.deterministic, cudnn.benchmark, mode

    before = flags()
    with pretend_gpu():
        exact = RunOptions(device="cuda", threads=1, tf32=False)
        quick = RunOptions(device="cuda", threads=1, deterministic=False)
    with exact.arithmetic():
        assert flags() == (False, False, True, False, 1)
    with quick.arithmetic():
        assert flags() == (True, True, False, True, 0)
    with RunOptions(threads=1).arithmetic():
        assert flags() == before
    assert flags() == before
