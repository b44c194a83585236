"""What a case of rows of numbers loads."""

from __future__ import annotations

from pathlib import Path

import torch

from gradaudit.audit.loading import LOADERS, Loaded
from gradaudit.case import Case
from gradaudit.data.draw import draw_numbers
from gradaudit.models.base import Model
from gradaudit.models.spec import ModelSpec
from table_kind.data import Bound, TableRows
from table_kind.judging import TableJudge
from table_kind.model import Linear


def load(case: Case, source: TableRows, base: Path, device: torch.device, loaded: Model | None) -> Loaded:
    spec = ModelSpec(case.model, case.task, int(source.labels.max()) + 1, seed=case.seed, random_weights=True)
    model = Linear(spec, source.values.shape[1])
    batches = draw_numbers(case.data, len(source.values), source.where)
    return Loaded(model, Bound(model, source), batches, TableJudge())


LOADERS.add("table", load)
