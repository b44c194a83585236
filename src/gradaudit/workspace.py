"""Where long work keeps what it has finished: attacks ask for it, whoever runs them says where it is."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save, save_file
from torch import Tensor

from gradaudit.errors import BadInputError
from gradaudit.files import replacing, stored_tensors


@dataclass(frozen=True)
class Workspace:
    """Places on disk; None: nothing is kept.

    Args:
        learned: folder of what attacks learn from public data, by its content.
        unfinished: file of what the attack on the batch at hand has found so far.
    """

    learned: Path | None = None
    unfinished: Path | None = None


_DIGEST = "sha256"
"""In the metadata of what an attack kept: of its tensors, so that one flipped bit is no other answer."""
_current: ContextVar[Workspace] = ContextVar("gradaudit_workspace", default=Workspace())  # noqa: B039 - frozen


@contextmanager
def _working_in(workspace: Workspace) -> Iterator[None]:
    token = _current.set(workspace)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def kept_in(path: Path) -> Iterator[None]:
    """Let attacks inside the block keep their state in a file, which is removed when the block ends without error.

    Args:
        path: of the file; its folder is made when something is kept.
    """
    with _working_in(replace(_current.get(), unfinished=path)):
        yield
    path.unlink(missing_ok=True)
    if path.parent.exists() and not any(path.parent.iterdir()):
        path.parent.rmdir()


def keep(state: Mapping[str, Tensor]) -> None:
    """Keep the state of the attack that runs; nothing happens where no one asked for it.

    Args:
        state: tensors by name; what was kept before is replaced as a whole. It may hold recovered text.
    """
    path = _current.get().unfinished
    if path is None:
        return
    tensors = {name: tensor.detach().contiguous().cpu().clone() for name, tensor in state.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with replacing(path, private=True) as fresh:
            save_file(tensors, fresh, {_DIGEST: _digest(tensors)})
    except (OSError, SafetensorError):
        return  # a full disk: the attack goes on, and only what a stop would lose is more


def kept() -> dict[str, Tensor] | None:
    """Return what a run that was stopped has kept; None for nothing, and nothing by name for a file that is damaged."""
    path = _current.get().unfinished
    if path is None or not path.exists():
        return None
    try:
        with stored_tensors(path) as file:
            found = file.read(file.shapes)
            return found if file.metadata.get(_DIGEST) == _digest(found) else {}
    except BadInputError:
        return {}  # begun anew: the same seed gives the same answer


def _digest(state: Mapping[str, Tensor]) -> str:
    return hashlib.sha256(save(dict(state))).hexdigest()


@contextmanager
def learned_in(folder: Path) -> Iterator[None]:
    """Let attacks inside the block keep what they learn in a folder, or in that of the outermost such block."""
    now = _current.get()
    with _working_in(replace(now, learned=now.learned or folder)):
        yield


def learned(
    key: str, shapes: Mapping[str, tuple[int, ...]], make: Callable[[], Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Return what was learned under a key, learning it where it is not kept yet.

    Args:
        key: hash of all that decides it, the public data included; letters and digits.
        shapes: of its tensors; a file with others, or none that can be read, is learned anew.
        make: learns it.
    """
    place = _current.get().learned
    path = None if place is None else place / f"{key}.safetensors"
    if path is not None and path.is_file():
        try:
            with stored_tensors(path) as file:
                if file.shapes == shapes:
                    # copies: what is read is a window onto the file, which may be replaced
                    return {name: tensor.clone() for name, tensor in file.read(shapes).items()}
        except BadInputError:
            pass  # cut short or damaged
    found = {n: t.detach().cpu().contiguous().clone() for n, t in make().items()}
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as fresh:
                save_file(found, fresh)
        except (OSError, SafetensorError):
            return found  # a full disk: the next batch learns it again
    return found
