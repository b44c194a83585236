"""A sweep in shards: each machine runs some clients' points, and one command makes the table of all."""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from gradaudit import files
from gradaudit.audit.info import RECORDS
from gradaudit.case import parse_case
from gradaudit.errors import BadInputError
from gradaudit.metrics.summary import summarize
from gradaudit.progress import step
from gradaudit.record import Record
from gradaudit.sweeps.result import Result, SweepPoint
from gradaudit.sweeps.sweep import Sweep, client_groups, run_points
from gradaudit.sweeps.utility import Utility

POINT = "point.json"
"""In a point's folder: what its records do not say."""


@dataclass(frozen=True)
class Shard:
    """One part of a sweep, "K/N": every N-th group of points that share a client, from the K-th.

    Args:
        number: from 1.
        of: how many.
    """

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """Return the shard of a text such as "2/4".

        Raises:
            BadInputError: none such.
        """
        found = re.fullmatch(r"\s*(\d{1,6})\s*/\s*(\d{1,6})\s*", text)
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise BadInputError(f"--shard takes K/N with K from 1 to N, for example 2/4; got '{text}'")
        return cls(int(found[1]), int(found[2]))


class PointFile(BaseModel):
    """What a point's folder says beside its records.

    Args:
        sweep: hash of all points of the sweep.
        number: of the point, from 0.
        of: how many points the sweep has.
        values: what each axis is set to, in words.
        case: the case.
        error, refused, utility, no_utility: as in `Result`.
        costs: whether the sweep measures utility.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    sweep: str
    number: int
    of: int
    values: dict[str, str]
    case: dict[str, Any]
    error: str | None = None
    refused: bool = False
    utility: dict[str, Any] | None = None
    no_utility: str | None = None
    costs: bool = False


@dataclass(frozen=True)
class Merged:
    """What the shards of a sweep gave.

    Args:
        results: in the points' order.
        missing: how many points were not run.
        costs: whether the sweep measures utility.
    """

    results: tuple[Result, ...]
    missing: int
    costs: bool


def shard_groups(sweep: Sweep, shard: Shard) -> list[list[tuple[int, SweepPoint]]]:
    """Return the numbered points of a shard, those of one client together."""
    return client_groups(sweep)[shard.number - 1 :: shard.of]


def run_shard(
    sweep: Sweep, shard: Shard, base: Path, out: Path, device: torch.device, jobs: int = 1
) -> Iterator[Result]:
    """Run a shard's points into their folders and yield what they gave; no file is written that another shard writes.

    Args:
        sweep: the whole of it, the same for all shards.
        shard: which part.
        base, out, device, jobs: as `run_sweep` takes them.

    Raises:
        BadInputError: a folder cannot be written.
    """
    whose = _hash(sweep.points)
    groups = shard_groups(sweep, shard)
    count = sum(map(len, groups))
    for done, (number, result) in enumerate(run_points(groups, sweep.utility, base, out, device, jobs), 1):
        case = result.point.case
        folder = out / case.content_hash()
        told = PointFile(
            sweep=whose,
            number=number,
            of=len(sweep.points),
            values=dict(result.point.values),
            case=case.model_dump(mode="json"),
            error=result.error,
            refused=result.refused,
            utility=None if result.utility is None else asdict(result.utility),
            no_utility=result.no_utility,
            costs=sweep.utility is not None,
        )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with files.replacing(folder / POINT) as draft:
                draft.write_text(told.model_dump_json(indent=1), encoding="utf8")
        except OSError as error:
            raise BadInputError(f"cannot write {folder / POINT} ({error.strerror}); choose another --out") from None
        step("points", done, count)
        yield result


def is_sharded(folder: Path) -> bool:
    """Return whether a folder holds points of shards."""
    return folder.is_dir() and next(folder.glob(f"*/{POINT}"), None) is not None


def merge(folder: Path) -> Merged:
    """Return what all shards gave that ran into a folder, read and not run again.

    Args:
        folder: the sweep's.

    Raises:
        BadInputError: points of two sweeps, or files that are damaged.
    """
    found: dict[int, tuple[PointFile, Path]] = {}
    for path in sorted(folder.glob(f"*/{POINT}")):
        told = files.read_manifest(path, PointFile, "a point of a sweep")
        other = next(iter(found.values()), None)
        if other is not None and other[0].sweep != told.sweep:
            raise BadInputError(f"{folder} holds points of two sweeps, as {other[1].parent} and {path.parent}")
        found[told.number] = (told, path)
    results = tuple(_result(told, path) for _, (told, path) in sorted(found.items()))
    first = found[min(found)][0]
    return Merged(results, first.of - len(found), first.costs)


def _result(told: PointFile, path: Path) -> Result:
    point = SweepPoint(told.values, parse_case(told.case))
    if point.case.content_hash() != path.parent.name:
        raise BadInputError(f"{path} is of another case than its folder is named by")
    if told.error is not None:
        return Result(point, None, error=told.error, refused=told.refused)
    records = tuple(files.read_lines(path.parent / RECORDS, Record))
    if not records:
        raise BadInputError(f"{path.parent / RECORDS} is gone; run its shard again")
    utility = None if told.utility is None else Utility(**_known(told.utility))
    return Result(point, summarize(records)[0], records, utility=utility, no_utility=told.no_utility)


def _known(data: Mapping[str, Any]) -> dict[str, Any]:
    strange = set(data) ^ set(Utility.__dataclass_fields__)
    if strange:
        raise BadInputError(f"a point's utility has or lacks '{min(strange)}'; it was written by another version")
    return dict(data)


def _hash(points: Sequence[SweepPoint]) -> str:
    text = " ".join(point.case.content_hash() for point in points)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
