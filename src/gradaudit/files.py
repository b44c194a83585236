"""Files that a kill cannot leave half written, folders that one program at a time writes, and tensors of others."""

import os
import shutil
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gradaudit.errors import BadInputError

M = TypeVar("M", bound=BaseModel)
_LARGEST_MANIFEST = 16 << 20
"""Bytes of a manifest, or of a TOML file, that is read."""
_DEEPEST = 32
"""Tables and lists within each other that a TOML file may have: ours have five."""


def append_line(path: Path, item: BaseModel, private: bool = False) -> None:
    """Append one JSON line and force it to disk, so that a killed run loses nothing that was finished.

    Raises:
        BadInputError: the disk refuses (full, read-only); what was written before stays.
    """
    try:
        data = item.model_dump_json().encode("utf8", errors="replace") + b"\n"
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600 if private else 0o644)
        try:
            done = 0
            while done < len(data):
                done += os.write(handle, data[done:])
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        raise BadInputError(
            f"cannot write {path} ({error.strerror}); what was finished before is kept, make room and run again"
        ) from None


def read_lines(path: Path, kind: type[M]) -> Iterator[M]:
    """Yield the items of a JSONL file; a last line cut short by a kill is passed over.

    Raises:
        BadInputError: a line that is not of this kind.
    """
    if not path.exists():
        return
    # bytes, split at \n alone: recovered text may hold other line separators, and a kill may cut a character
    lines = path.read_bytes().split(b"\n")[:-1]
    for number, line in enumerate(lines, start=1):
        try:
            yield kind.model_validate_json(line)
        except ValidationError as error:
            raise BadInputError(f"{path} line {number} is not a {kind.__name__} ({error.errors()[0]['msg']})") from None


def read_manifest(path: Path, kind: type[M], what: str) -> M:
    """Return the manifest in a file, which may come from elsewhere.

    Args:
        path: of the file, which is there.
        kind: of manifest.
        what: the same in words.

    Raises:
        BadInputError: far too large, or not such a manifest.
    """
    if path.stat().st_size > _LARGEST_MANIFEST:
        raise BadInputError(f"{path} is larger than any manifest; not read")
    try:
        return kind.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise BadInputError(f"{path} is not {what} ({where}: {first['msg']})") from None


def read_toml(path: Path) -> dict[str, Any]:
    """Return what a TOML file holds.

    Raises:
        BadInputError: no plain file, far too large, not TOML, or nested deeper than any of ours.
    """
    if not path.is_file():  # a pipe or a device has no end
        raise BadInputError(f"{path} is missing or no plain file")
    if path.stat().st_size > _LARGEST_MANIFEST:
        raise BadInputError(f"{path} is larger than any such file; not read")
    try:
        data = tomllib.loads(path.read_text(encoding="utf8"))
    except RecursionError:
        raise BadInputError(f"{path} is nested more than {_DEEPEST} deep") from None
    except ValueError as error:  # UTF-8, TOML, or a number of thousands of digits
        of_data = "" if path.suffix == ".toml" else "; 'gradaudit init --data FILE --text COLUMN' makes a case of data"
        raise BadInputError(f"{path} is not TOML ({error}){of_data}") from None
    refuse_depth(data, str(path))
    return data


def refuse_depth(data: Any, where: str) -> None:
    """Refuse tables and lists that are nested deeper than any of ours: what walks through them recurses.

    Args:
        data: as TOML or JSON gives it.
        where: it is from, in words.

    Raises:
        BadInputError: too deep.
    """
    level = [data]
    for _ in range(_DEEPEST):
        held = (part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list))
        level = [one for part in held for one in part]
    if level:
        raise BadInputError(f"{where} is nested more than {_DEEPEST} deep")


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


@contextmanager
def replacing(path: Path, private: bool = False) -> Iterator[Path]:
    """Give a fresh file to write, which takes the place of another when the block ends: whole, or not at all.

    Args:
        path: of the file that is replaced or made; its folder is there.
        private: whether its owner alone may read it.

    Raises:
        OSError: the disk refuses; what was there before stays.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".new-", suffix=path.suffix)
    os.close(handle)
    draft = Path(name)
    try:
        yield draft
        with open(draft, "rb") as file:
            os.fsync(file.fileno())
        # mkstemp makes files for the owner alone, and a writer may have made another in its place
        draft.chmod(0o600 if private else 0o644)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Give a fresh folder to fill, which takes the place of another when the block ends: whole, or not at all.

    Args:
        folder: that is replaced or made; its owner alone may read it.

    Raises:
        BadInputError: the disk refuses.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".new-"))
    except OSError as error:
        raise BadInputError(f"cannot write {folder} ({error.strerror}); choose another folder") from None
    try:
        yield draft
        if folder.exists():
            shutil.rmtree(folder)
        draft.rename(folder)
    except OSError as error:
        raise BadInputError(f"cannot write {folder} ({error.strerror}); choose another folder") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write_page(path: Path, html: str, private: bool) -> Path:
    """Write a page; see `replacing`.

    Raises:
        BadInputError: the disk refuses.
    """
    try:
        with replacing(path, private) as draft:
            draft.write_bytes(html.encode())
    except OSError as error:
        raise BadInputError(f"cannot write {path} ({error.strerror}); make room or choose another folder") from None
    return path


class StoredTensors:
    """The tensors of an open safetensors file: its header is read, and no tensor before it is asked for.

    Args:
        path: of the file, for messages.
        file: the open file.
    """

    def __init__(self, path: Path, file: Any) -> None:
        self._path, self._file = path, file
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        self.shapes: dict[str, tuple[int, ...]] = {name: tuple(part.get_shape()) for name, part in parts.items()}
        self.dtypes: dict[str, str] = {name: part.get_dtype() for name, part in parts.items()}
        self.metadata: dict[str, str] = file.metadata() or {}

    def read(self, names: Iterable[str], finite: bool = False) -> dict[str, Tensor]:
        """Return some of the tensors.

        Raises:
            BadInputError: NaN or infinite values where `finite` asks for none.
        """
        found = {name: self._file.get_tensor(name) for name in names}
        if finite and not all(bool(tensor.isfinite().all()) for tensor in found.values()):
            raise BadInputError(f"{self._path} holds NaN or infinite values")
        return found


@contextmanager
def stored_tensors(path: Path) -> Iterator[StoredTensors]:
    """Open a safetensors file, which may come from elsewhere: nothing is unpickled, and sizes are known before reading.

    Raises:
        BadInputError: there is none, or it is damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            yield StoredTensors(path, file)
    except (SafetensorError, OSError) as error:
        raise BadInputError(f"{path} is missing, truncated or not a safetensors file ({error})") from None
