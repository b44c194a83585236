"""What the program asks of its machine, once, before it computes anything."""

import ctypes
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from gradaudit.errors import BadInputError

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


_SHAPES = ((12, 384, 1536), (648, 384, 384), (257, 1536, 384))
"""Rows, width read and width written of the products that are tried."""

_ROUNDING = 1e-5
"""Float32 products over 1536 terms are within 1e-6 of the largest entry; bfloat16 would be at 1e-3."""


def multiply_by_onednn() -> bool:
    """Let oneDNN make float32 matrix products on AMD processors, where MKL uses half of a core.

    On an EPYC with AVX-512, one thread, MKL makes 90 to 100 GFLOP/s of [648, 384] x [384, 1536] and oneDNN 190 to 220.
    PyTorch hands such products to oneDNN only together with leave to round to bfloat16 on the way. A processor without
    matrix units (AMX) has no use for that leave and multiplies in float32; this is tried, against float64, and
    everything stays as it was where a product was rounded. What a machine does depends on the machine alone, never on
    its load. The setting is the whole process's: for a program, not for a library. PyTorch before 2.9 has none, and
    beside it `torch.get_float32_matmul_precision()` no longer answers.

    Returns:
        Whether oneDNN makes them now.
    """
    ours = _matmul()
    if ours is None or not _is_amd():
        return False
    before = ours.fp32_precision
    ours.fp32_precision = "bf16"
    if _rounding() < _ROUNDING:
        return True
    ours.fp32_precision = before
    return False


def multiplied_by() -> str:
    """Return which library makes float32 matrix products on the CPU, for a record."""
    import torch

    ours, mkl = _matmul(), torch.backends.mkl
    if ours is not None and ours.fp32_precision == "bf16":
        return "oneDNN"
    return "MKL" if mkl.is_available() else "BLAS"  # type: ignore[no-untyped-call]


def _matmul() -> Any:
    """Return PyTorch's setting of oneDNN's products; None where it has none."""
    import torch  # seconds to import, and `--help` needs none of it

    onednn: Any = torch.backends.mkldnn
    return getattr(onednn, "matmul", None) if onednn.is_available() else None


def _is_amd() -> bool:
    told = Path("/proc/cpuinfo")
    return told.exists() and "AuthenticAMD" in told.read_text(encoding="utf8", errors="replace")


def _rounding() -> float:
    """Return the largest error of some products, as a share of the largest entry."""
    import torch

    rng = torch.Generator().manual_seed(0)
    worst = 0.0
    for rows, read, written in _SHAPES:
        x, w = torch.randn(rows, read, generator=rng), torch.randn(written, read, generator=rng)
        exact = x.double() @ w.double().T
        both = torch.bmm(x.expand(2, -1, -1), w.T.expand(2, -1, -1))
        for made in (x @ w.T, x @ w.T.contiguous(), torch.addmm(w[:, 0], x, w.T) - w[:, 0], both[1]):
            worst = max(worst, float((made.double() - exact).abs().max() / exact.abs().max()))
    return worst


def choose_threads(threads: int | None) -> None:
    """Choose how many threads compute, in this process and those it starts, and let them sleep while they wait.

    Threads that spin while they wait for each other take the cores from each other where there are fewer than threads.
    On two cores with four other jobs `gradaudit attack` on four sentences took 39 s and 28 s of CPU so, and 15 s and
    9 s asleep (medians of three, turn about). It must be said before torch is imported: `sparing_threads` is for
    later. Who has set it otherwise is not overruled.

    Args:
        threads: None leaves torch's own choice, one a physical core.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if threads is None:
        return
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
    if "torch" in sys.modules:  # too late for the environment
        sys.modules["torch"].set_num_threads(threads)


@contextmanager
def sparing_threads() -> Iterator[None]:
    """Compute with one thread inside the block where torch's threads spin and others keep the machine busy.

    Python's users import torch themselves, and it is too late to let threads sleep (`choose_threads`).
    """
    import torch

    spin = os.environ.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE"
    busy = hasattr(os, "getloadavg") and os.getloadavg()[0] > (os.cpu_count() or 1)
    before = torch.get_num_threads()
    if spin and busy:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def ready_process() -> None:
    """Keep freed memory, and let the faster library multiply; results differ by float32 rounding at most."""
    keep_freed_memory()
    multiply_by_onednn()


@contextmanager
def worker_processes(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Give processes that share this one's threads among them, and end with the block or with this process.

    Args:
        jobs: how many.

    Raises:
        BadInputError: one of them was killed.
    """
    import torch

    how = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    stop = how.Event()
    threads = max(1, torch.get_num_threads() // jobs)
    pool = ProcessPoolExecutor(jobs, how, _ready_worker, (os.getpid(), threads, stop))
    try:
        yield pool
    except BrokenProcessPool:
        raise BadInputError(
            "a process was killed, perhaps for want of memory; what was finished is kept: run it again, with fewer "
            "--jobs or with --threads 1"
        ) from None
    except BaseException:
        stop.set()  # an interrupt ends only the work that a process is at, and it would take the next
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _ready_worker(parent: int, threads: int, stop: Event) -> None:
    """Set a process up, and let it end when it is told to, or the one that started it is gone, however it went."""
    import torch

    ready_process()
    torch.set_num_threads(threads)
    sys.stdout = sys.stderr  # what a plugin prints is no line of JSON

    def watch() -> None:
        while os.getppid() == parent and not stop.wait(1):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
