"""Scores of recovered rows, and when they say that something leaks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import BaseModel

from gradaudit.judge.judgment import Judge, Judgment
from gradaudit.record import Record, Summary
from gradaudit.scores import SCORES, Score, Scores
from gradaudit.types import Reconstruction
from gradaudit.verdict.level import RULES, Level, Rules
from table_kind.data import TableBatch

SCORES.add(
    "table",
    Scores(
        kind="table",
        example="row",
        all=(Score("rmse", "RMSE", "RMSE", 3, low_leaks=True),),
        main="rmse",
        drawn="rmse",
        said="root mean squared error of a row",
        swept=("rmse",),
        facts_unfit=("lengths", "longest"),
    ),
)


class TableLine(BaseModel):
    case: str
    setting: str
    batch: int
    attack: str
    recovered: list[list[float]]


@dataclass(frozen=True)
class TableJudgment(Judgment):
    scores: dict[str, float | None]
    recovered: list[list[float]]

    @property
    def solved(self) -> bool:
        return (self.scores["rmse"] or 0.0) < 1e-3

    def of_record(self, baseline: TableJudgment) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class TableJudge(Judge[TableBatch]):
    private: ClassVar[type[TableLine]] = TableLine
    file: ClassVar[str] = "rows.jsonl"

    def judge(self, batch: TableBatch, found: Reconstruction) -> TableJudgment:
        guess = torch.full_like(batch.values, 10.0) if found.images is None else found.images[: len(batch)]
        error = float((guess - batch.values).square().mean().sqrt())
        return TableJudgment({"rmse": error}, guess.tolist())

    def guessed(self, batch: TableBatch, found: Reconstruction) -> TableBatch | None:
        return None if found.images is None else TableBatch(found.images[: len(batch)], batch.labels)


def verdict(
    name: str, summaries: Sequence[Summary], attacks: Sequence[Record], records: Sequence[Record]
) -> tuple[Level, str]:
    read = [r for r in attacks if r.error is None and (r.scores["rmse"] or 0.0) < 1e-3]
    return ("leaks", f"{len(read)} rows were read.") if read else ("not shown", "No row was read.")


RULES.add("table", Rules(dict.fromkeys(("leaks", "partly", "not shown", "inconclusive"), "rule"), verdict))
