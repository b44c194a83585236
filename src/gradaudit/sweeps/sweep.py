"""A sweep: one case and axes along which it varies; every point is a case of its own, in a folder of its own."""

import copy
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from gradaudit.audit import run as audit
from gradaudit.audit.fitting import INVERTERS
from gradaudit.audit.prepare import Prepared, prepare
from gradaudit.case import Case, case_data, parse_case
from gradaudit.data.rows import READERS
from gradaudit.errors import AuditError, BadInputError, NotSupportedError, unknown_name
from gradaudit.files import only_writer
from gradaudit.leakage.matching.compiled import asked as compile_steps
from gradaudit.leakage.matching.compiled import compiling
from gradaudit.machine import worker_processes
from gradaudit.metrics.summary import summarize
from gradaudit.models.base import Model
from gradaudit.models.spec import kind_of
from gradaudit.progress import step
from gradaudit.record import Record
from gradaudit.sweeps.result import TABLE, Result, SweepPoint, write_table
from gradaudit.sweeps.utility import UtilityTable, kept_utility
from gradaudit.workspace import learned_in

MOST = 10_000
"""Points of one sweep: more are a slip of the pen."""
UTILITY = "utility"


@dataclass(frozen=True)
class Sweep:
    """What a sweep's file says.

    Args:
        points: all combinations of the axes, the last axis changing fastest.
        utility: how the cost of the client's defenses is measured; None: it is not.
    """

    points: tuple[SweepPoint, ...]
    utility: UtilityTable | None = None


def load_sweep(path: Path, settings: Sequence[str] = ()) -> Sweep:
    """Return the sweep of a TOML file.

    Args:
        path: a case with an [axes] table, keys of the case with a list of values each, and perhaps a [utility] table.
        settings: "data.batches=2" assignments, as for one case.

    Raises:
        BadInputError: no axes, an axis that is no list or empty, a point that is no case, or two that are the same.
    """
    data = case_data(path, settings)
    axes: dict[str, list[Any]] = {}
    for key, values in _axes(data.pop("axes", {})):
        if key in axes:
            raise BadInputError(f"axis '{key}' is given twice, with and without quotes")
        axes[key] = values
    cost = data.pop("utility", None)
    if not axes:
        raise BadInputError(f"{path} has no [axes] table; give keys with lists of values, or use 'gradaudit run'")
    count = 1
    for values in axes.values():
        count *= len(values)
    if count > MOST:
        raise BadInputError(f"{path} has {count} points; at most {MOST} are run")
    points = [_point(data, axes, combination) for combination in itertools.product(*axes.values())]
    seen: dict[str, SweepPoint] = {}
    for point in points:
        same = seen.setdefault(point.case.content_hash(), point)
        if same is not point:
            raise BadInputError(f"two points are the same case: {same.title}; and {point.title}")
    try:
        return Sweep(tuple(points), None if cost is None else UtilityTable.model_validate(cost))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            raise unknown_name("key in [utility]", key, UtilityTable.model_fields) from None
        place = f"utility.{key}" if key else "[utility]"
        raise BadInputError(f"{place}: {first['msg']}, got {first['input']!r}") from None


def _axes(table: Any, before: str = "") -> Iterator[tuple[str, list[Any]]]:
    if not isinstance(table, dict):
        raise BadInputError("[axes] must be a table of keys with lists of values")
    for key, value in table.items():
        if isinstance(value, dict):  # data.batch_size without quotes is a table in TOML
            yield from _axes(value, f"{before}{key}.")
        elif isinstance(value, list) and value:
            yield f"{before}{key}", value
        else:
            raise BadInputError(f"axis '{before}{key}' needs a list of values, got {value!r}")


def _point(data: Mapping[str, Any], axes: Mapping[str, list[Any]], values: Sequence[Any]) -> SweepPoint:
    made = copy.deepcopy(dict(data))
    for key, value in zip(axes, values, strict=True):
        *path, last = key.split(".")
        table = made
        for part in path:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise BadInputError(f"axis '{key}': '{part}' is a value, not a table")
        if last in table:
            raise BadInputError(f"'{key}' is set and is an axis as well; keep one of the two")
        table[last] = value
    said = {key: _words(value) for key, value in zip(axes, values, strict=True)}
    try:
        return SweepPoint(said, parse_case(made))
    except BadInputError as error:
        raise BadInputError(f"at {', '.join(f'{k} {v}' for k, v in said.items())}: {error}") from None


def _words(value: Any) -> str:
    if isinstance(value, dict):
        rest = [f"{key}={_words(item)}" for key, item in value.items() if key != "name"]
        return " ".join([str(value.get("name", "")), *rest]).strip()
    if isinstance(value, list):
        return "; ".join(map(_words, value)) or "none"
    return str(value)


Groups = Sequence[Sequence[tuple[int, SweepPoint]]]
"""Numbered points, those of one client together."""
Runner = Callable[[Groups, UtilityTable | None, Path, Path, torch.device], Iterator[tuple[int, Result]]]
"""Runs groups of points; see `run_points`."""


def client_groups(sweep: Sweep) -> list[list[tuple[int, SweepPoint]]]:
    """Return the points of each client, with their numbers from 0: what is found once for a client is shared."""
    groups: dict[str, list[tuple[int, SweepPoint]]] = {}
    for number, point in enumerate(sweep.points):
        client = {
            k: v for k, v in point.case.resolved().items() if k not in ("attack", "knowledge", "selection", "name")
        }
        groups.setdefault(json.dumps(client, sort_keys=True, default=str), []).append((number, point))
    return list(groups.values())


def run_sweep(
    sweep: Sweep, base: Path, out: Path, device: torch.device, jobs: int = 1, runner: Runner | None = None
) -> Iterator[Result]:
    """Run every point into its own folder and yield what it gave; what is finished is read, not run again.

    Args:
        sweep: its points, and how utility is measured.
        base: folder that relative data paths start from.
        out: holds a folder a case, by its hash, and the table of all.
        device: where models go.
        jobs: processes that share the points; results come in the points' order with one, as they are ready with more.
        runner: runs the groups of points in the place of this machine's processes.

    Raises:
        BadInputError: the folder cannot be written, or another program writes there.
    """
    found: dict[int, Result] = {}
    apart = jobs > 1 or runner is not None
    groups = client_groups(sweep) if apart else [list(enumerate(sweep.points))]
    if runner is not None:
        running = runner(groups, sweep.utility, base, out, device)
    else:
        running = run_points(groups, sweep.utility, base, out, device, jobs)
    with only_writer(out):
        for number, result in running:
            found[number] = result
            write_table(out / TABLE, [found[n] for n in sorted(found)])
            step("points", len(found), len(sweep.points))
            yield result


def run_points(
    groups: Groups,
    cost: UtilityTable | None,
    base: Path,
    out: Path,
    device: torch.device,
    jobs: int = 1,
) -> Iterator[tuple[int, Result]]:
    """Run points into their own folders and yield the number of each with what it gave; see `run_sweep`.

    Args:
        groups: numbered points, those of one client together.
        cost: how utility is measured; None: it is not.
        base, out, device, jobs: as there.
    """
    if jobs > 1:
        yield from _shared(groups, cost, base, out, device, jobs)
        return
    held = _Held()
    for group in groups:
        for number, point in group:
            yield number, _run(point, cost, base, out, device, held)


class _Held:
    """The last model and the last data that a process read: most points of a sweep share them."""

    def __init__(self) -> None:
        self._model: Model | None = None
        self._rows: dict[str, Any] = {}

    def prepared(self, case: Case, base: Path, device: torch.device) -> Prepared:
        """Return `audit.prepare`'s result; what it raises, it raises."""
        source = case.data.model_dump(mode="json", exclude={"batch_size", "batches", "skip", "shuffle_seed", "window"})
        data = json.dumps([source, str(base)], default=str)
        if data not in self._rows:
            self._rows = {data: READERS[kind_of(case.task)](case.data, base)}
        ready = prepare(case, base, device, self._model, self._rows[data])
        self._model = ready.model
        return ready


_HELD = _Held()
"""Of a process that runs points for another."""


def _shared(
    groups: Groups,
    cost: UtilityTable | None,
    base: Path,
    out: Path,
    device: torch.device,
    jobs: int,
) -> Iterator[tuple[int, Result]]:
    """Run points in processes of their own; those of one client in the same, so that its utility is found once."""
    with worker_processes(jobs) as pool:
        waiting = [
            pool.submit(run_some, [p for _, p in group], cost, base, out, device, compile_steps()) for group in groups
        ]
        numbers = dict(zip(waiting, groups, strict=True))
        for done in as_completed(waiting):
            yield from zip([n for n, _ in numbers[done]], done.result(), strict=True)


def run_some(
    points: Sequence[SweepPoint], cost: UtilityTable | None, base: Path, out: Path, device: torch.device, compiled: bool
) -> list[Result]:
    """Run points one after the other, in a process that another one started."""
    with compiling(compiled):
        return [_run(point, cost, base, out, device, _HELD) for point in points]


def _run(
    point: SweepPoint, cost: UtilityTable | None, base: Path, out: Path, device: torch.device, held: _Held
) -> Result:
    records: list[Record] = []
    case = point.case
    try:
        ready = held.prepared(case, base, device)
        with learned_in(out / audit.LEARNED):  # points with the same public data learn once
            for record in audit.run(ready, out / case.content_hash(), inverters=out / INVERTERS):
                records.append(record)
                step(f"batches: {point.title}", len(records), len(ready.batches))
    except AuditError as error:
        return Result(point, None, error=str(error), refused=isinstance(error, NotSupportedError))
    summary = summarize(records)[0]
    if cost is None:
        return Result(point, summary, tuple(records))
    try:
        found = kept_utility(out / UTILITY, case, cost, ready.model, ready.rows)
    except AuditError as error:  # what was attacked is not lost by it
        return Result(point, summary, tuple(records), no_utility=str(error))
    return Result(point, summary, tuple(records), utility=found)
