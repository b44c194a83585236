"""What a case of text loads."""

from pathlib import Path
from typing import Any

import torch

from gradaudit.audit.loading import LOADERS, MODELS, Loaded, at_hand, spec_of
from gradaudit.audit.public_text import public_text
from gradaudit.case import Case
from gradaudit.client.warm_up import warm_up, warm_up_rows
from gradaudit.data.draw import draw
from gradaudit.data.text import Sentences, TextRows, numbered
from gradaudit.data.windows import windows
from gradaudit.errors import BadInputError
from gradaudit.judge.text import TextJudge
from gradaudit.models.base import Model
from gradaudit.models.transformers import TransformersModel
from gradaudit.models.zoo import head_classes, load_model


def _load(case: Case, source: TextRows, base: Path, device: torch.device, loaded: Model | None) -> Loaded:
    if case.task == "classification" and source.labels is None:
        raise BadInputError('task "classification" needs a label column: set label in [data]')
    if case.task == "classification":
        source = numbered(source, head_classes(case.model))
    window = case.data.window
    batches = draw(case.data, source) if window is None else []
    spec = spec_of(case, len(source.classes))
    here = at_hand(loaded, spec)
    model = here if isinstance(here, TransformersModel) else load_model(spec, device)
    if window is not None:
        source = windows(source, model, window, whole=True)
        batches = draw(case.data, source)
    rows = Sentences(model, source)
    if spec.lora is not None and spec.lora.warmup:
        warm_up(model, (rows.batch(n) for n in warm_up_rows(case.seed, len(rows), batches, spec.lora.warmup)))
    public, auxiliary = None, dict[str, Any]()
    if case.public is not None:
        public = public_text(case.public, base, model, window, source, batches)
        auxiliary = {"public": {"path": public.where, "rows": len(public)}}
    return Loaded(model, rows, batches, TextJudge(model, case.metrics.published), public, auxiliary=auxiliary)


LOADERS.add("text", _load)
MODELS.add("text", load_model)
