"""What this process does to the machine's memory."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator than glibc's")
def test_answers_that_stay_leave_no_holes_that_grow() -> None:
    """Large blocks between small ones that stay: 400 questions hold no more than 32 do."""
    code = """
import resource, torch
from fedshot.evaluation import pixel_logits
from fedshot.machine import keep_freed_memory
from fedshot.nn import Question
from fedshot.protocol import answer_at_server

class Asked:
    def __init__(self, n):
        self.n = n
    def __len__(self):
        return self.n
    def __getitem__(self, u):
        x, query = (torch.full((300, 32, 32, 3), u % 250, dtype=torch.uint8) for _ in range(2))
        y = torch.arange(5).repeat(60)
        return Question(x, y, query, torch.arange(5))

def held(n):
    answer_at_server(pixel_logits, Asked(n))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

assert keep_freed_memory()
torch.set_num_threads(1)
print(held(32), held(400))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, last = map(int, ran.stdout.split())
    assert last < first + 150
