"""What each kind of data loads for a case."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from gradaudit.case import Case
from gradaudit.data.rows import Rows
from gradaudit.judge.judgment import Judge
from gradaudit.kinds import ByKind
from gradaudit.models.base import Model
from gradaudit.models.local_steps import WEIGHTS
from gradaudit.models.spec import ModelSpec
from gradaudit.types import PublicImages


@dataclass(frozen=True)
class Loaded:
    """Model and data of a case.

    Args:
        model: the model.
        rows: the data beside it.
        batches: row numbers of each private batch.
        judge: compares what is found with the truth.
        public: what an attack learns from; None for nothing.
        in_sight: what every attack sees beside the update; None for nothing.
        auxiliary: what the attacker has, in words, for the record.
    """

    model: Model
    rows: Rows
    batches: list[tuple[int, ...]]
    judge: Judge[Any]
    public: Any = None
    in_sight: PublicImages | None = None
    auxiliary: Mapping[str, Any] = field(default_factory=dict)


Loader = Callable[[Case, Any, Path, torch.device, Model | None], Loaded]
"""Takes the case, what its reader read, the folder that paths start from, the device, and a model that is at hand."""
LOADERS: ByKind[Loader] = ByKind("audit")
"""By kind of data."""
MODELS: ByKind[Callable[[ModelSpec, torch.device], Model]] = ByKind("model")
"""What loads the model that a spec names, by kind of data."""


def spec_of(case: Case, classes: int, image: tuple[int, int, int] | None = None) -> ModelSpec:
    """Return which model a case names, for so many classes and, of images, for one shape."""
    lora = case.lora.given() if case.lora is not None else None
    spec = ModelSpec(case.model, case.task, max(2, classes), case.seed, case.layers, lora=lora, loss=case.loss)
    return replace(spec, image=image, weights="bfloat16" if case.client.precision in WEIGHTS else "float32")


def at_hand(loaded: Model | None, spec: ModelSpec) -> Model | None:
    """Return the model that is already loaded if it is the one that a spec names, or None.

    Attacks leave a model as it was. Adapters are warmed up on rows that depend on the batches, and always made anew.
    """
    if loaded is None or spec.lora is not None:
        return None
    known = replace(loaded.spec, random_weights=spec.random_weights)  # told by what was loaded, not by the case
    return loaded if known == spec else None
