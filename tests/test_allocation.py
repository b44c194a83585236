"""The C library is asked once, and does as asked where it is glibc."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from gradaudit.machine import keep_freed_memory

HELD = """
import sys, torch
from gradaudit.machine import keep_freed_memory

def resident():
    with open("/proc/self/statm") as file:
        return 4 * int(file.read().split()[1])

if sys.argv[1] == "kept":
    assert keep_freed_memory()
before = resident()
some = [torch.ones(1 << 20) for _ in range(16)]
del some
print(resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told")
def test_freed_memory_stays_with_the_process():
    held = {
        way: int(subprocess.run([sys.executable, "-c", HELD, way], capture_output=True, text=True, check=True).stdout)
        for way in ("kept", "given back")
    }
    assert held["kept"] > 32 * 1024 > held["given back"]  # KiB, of 64 MiB that were freed


def test_other_systems_are_left_alone(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not keep_freed_memory()
