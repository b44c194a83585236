"""What a long attack keeps of a batch it has not finished, so that a killed run goes on from there.

An attack says `keep({...})` after each round and asks `kept()` when it starts; whoever runs it decides where that lies.
It may hold recovered text, so that its file is its owner's alone, and it goes when the record is written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

_place: ContextVar[Path | None] = ContextVar("gradaudit_unfinished", default=None)


@contextmanager
def kept_in(path: Path) -> Iterator[None]:
    """Let attacks inside the block keep their state in a file, which is removed when the block ends without error.

    Args:
        path: of the file; its folder is made when something is kept.
    """
    token = _place.set(path)
    try:
        yield
    finally:
        _place.reset(token)
    path.unlink(missing_ok=True)
    if path.parent.exists() and not any(path.parent.iterdir()):
        path.parent.rmdir()


def keep(state: Mapping[str, Tensor]) -> None:
    """Keep the state of the attack that runs; nothing happens where no one asked for it.

    Args:
        state: tensors by name; what was kept before is replaced as a whole.
    """
    path = _place.get()
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fresh = path.with_suffix(".new")
    fresh.touch(mode=0o600)
    save_file({name: tensor.detach().contiguous().cpu().clone() for name, tensor in state.items()}, fresh)
    os.replace(fresh, path)


def kept() -> dict[str, Tensor] | None:
    """Return what a run that was stopped has kept; None for nothing, or for a file that cannot be read."""
    path = _place.get()
    if path is None or not path.exists():
        return None
    try:
        return load_file(path)
    except (SafetensorError, OSError):
        return None  # begun anew: the same seed gives the same answer
