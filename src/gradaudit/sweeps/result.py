"""What the points of a sweep gave, and their table."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradaudit.case import Case
from gradaudit.errors import BadInputError
from gradaudit.files import replacing
from gradaudit.record import Record, Summary
from gradaudit.scores import scores_of
from gradaudit.sweeps.utility import Utility

TABLE = "sweep.csv"
COSTS = ("accuracy", "f1", "mcc", "mcc_low", "mcc_high", "epsilon", "delta")


@dataclass(frozen=True)
class SweepPoint:
    """One point of a sweep.

    Args:
        values: what each axis is set to, in words, by the axis' key.
        case: the case there.
    """

    values: Mapping[str, str]
    case: Case

    @property
    def title(self) -> str:
        """The point in words."""
        return ", ".join(f"{key} {value}" for key, value in self.values.items())


@dataclass(frozen=True)
class Result:
    """What a point gave.

    Args:
        point: the point.
        summary: over its batches; None where it could not be run.
        records: of every batch.
        error: why it could not be run.
        utility: what training with this client gives; None where it was not asked for or cannot be measured.
        no_utility: why it cannot be measured.
        refused: the attack does not support the case, and said so before any batch.
    """

    point: SweepPoint
    summary: Summary | None
    records: tuple[Record, ...] = ()
    error: str | None = None
    utility: Utility | None = None
    no_utility: str | None = None
    refused: bool = False

    @property
    def unsupported(self) -> bool:
        """Whether the attack says that it does not support this case, so that there is nothing to score."""
        return self.refused or (bool(self.records) and all(r.unsupported for r in self.records))

    @property
    def failed(self) -> str | None:
        """Why there is no score at all here; None where some batch was attacked."""
        if self.summary is None:
            return self.error
        return self.records[0].error if self.summary.failed == self.summary.n else None


def write_table(path: Path, results: Sequence[Result]) -> None:
    """Write the table of some results.

    Raises:
        BadInputError: the disk refuses.
    """
    kind = scores_of(name for r in results if r.summary is not None for name in r.summary.scores)
    names, main = kind.names, kind.main
    sides = [f"{name} {part}" for name in names for part in ("mean", "low", "high")]
    rows = []
    for result in results:
        row: dict[str, Any] = {**result.point.values, "error": result.failed}
        row["case"] = result.point.case.content_hash()
        if result.summary is not None:
            found = result.summary
            row |= {
                "batches": found.n,
                "failed": found.failed,
                "flags": " ".join(found.flags),
                "seconds": found.seconds,
            }
            row |= {f"blind {name}": found.baseline[name].mean for name in (main,) if name in found.baseline}
            row |= {f"words {name}": one.mean for name, one in (found.words or {}).items()}
            row |= {f"blind words {name}": one.mean for name, one in (found.baseline_words or {}).items()}
            row |= {k: v for k, v in (asdict(result.utility) if result.utility else {}).items() if k in COSTS}
            for name in found.scores.keys() & set(names):
                row |= {f"{name} {part}": getattr(found.scores[name], part) for part in ("mean", "low", "high")}
        rows.append(row)
    columns = [*results[0].point.values, "batches", "failed", *sides, f"blind {main}"]
    columns += [*sorted({name for row in rows for name in row if "words " in name}), *COSTS]
    columns += ["seconds", "flags", "error", "case"]
    try:
        with replacing(path) as draft, open(draft, "w", encoding="utf8", newline="") as file:
            table = csv.DictWriter(file, columns, restval="")
            table.writeheader()
            table.writerows(rows)
    except OSError as error:
        raise BadInputError(f"cannot write {path} ({error.strerror}); choose another --out") from None
