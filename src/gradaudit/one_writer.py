"""One program at a time writes a run's folder: two would each attack the same batch and write it down twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from gradaudit.errors import BadInputError


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold a folder for this program while the block runs; the system lets go of it when a program is killed.

    Args:
        folder: a run's folder; made if it is not there.

    Raises:
        BadInputError: another program holds it, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = FileLock(folder / ".lock").acquire(timeout=0)
    except Timeout:
        raise BadInputError(
            f"another gradaudit is writing into {folder}; wait until it has finished, or choose another --out"
        ) from None
    except OSError as error:
        raise BadInputError(f"cannot make folder {folder} ({error.strerror}); choose another --out") from None
    with held:
        yield
