"""Memory that was freed is kept for the next step, where the C library would hand it back each time."""

from __future__ import annotations

import ctypes
import sys

_TRIM, _MMAP = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
_LARGE, _KEPT = 1 << 25, 1 << 29


def keep_freed_memory() -> bool:
    """Let tensors of up to 32 MiB come from memory that stays with the process (at most 512 MiB unused at its end).

    A batch of candidates makes and drops thousands of tensors of some MiB; fetched from the system page by page each
    time, they cost a fifth to a quarter of a candidate's time (read by hand, in a sandbox where that is dear). Only
    glibc is told; for a program, not for a library: the setting is the whole process's.

    Returns:
        Whether the C library took it.
    """
    if not sys.platform.startswith("linux"):
        return False
    tell = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    return tell is not None and bool(tell(_MMAP, _LARGE)) and bool(tell(_TRIM, _KEPT))
