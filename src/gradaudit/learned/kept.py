"""What an attack learns from public data, kept in a run's folder by its content, so that it is learned once.

An attack says `learned(key, make)`; whoever runs it decides where it lies. Only what follows from public data alone
may be kept: it stays when the run is over.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

_place: ContextVar[Path | None] = ContextVar("gradaudit_learned", default=None)


@contextmanager
def learned_in(folder: Path) -> Iterator[None]:
    """Let attacks inside the block keep what they learn in a folder, or in that of the outermost such block."""
    token = _place.set(_place.get() or folder)
    try:
        yield
    finally:
        _place.reset(token)


def learned(
    key: str, shapes: Mapping[str, tuple[int, ...]], make: Callable[[], Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Return what was learned under a key, learning it where it is not kept yet.

    Args:
        key: hash of all that decides it, the public data included; letters and digits.
        shapes: of its tensors; a file with others, or none that can be read, is learned anew.
        make: learns it.
    """
    place = _place.get()
    path = None if place is None else place / f"{key}.safetensors"
    if path is not None and path.is_file():
        try:
            with safe_open(path, framework="pt") as file:
                if {n: tuple(file.get_slice(n).get_shape()) for n in file.keys()} == dict(shapes):  # noqa: SIM118
                    # copies: what is read is a window onto the file, which may be replaced
                    return {n: file.get_tensor(n).clone() for n in shapes}
        except (SafetensorError, OSError):
            pass  # cut short or damaged
    found = {n: t.detach().cpu().contiguous().clone() for n, t in make().items()}
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}.new")
        save_file(found, fresh)
        os.replace(fresh, path)
    return found
