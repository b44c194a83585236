"""The blind baseline: the best guess without any gradient."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from gradaudit.attacks.base import Attack
from gradaudit.defense_traits import ANYTHING, Trait
from gradaudit.leakage.priors import GUESSES
from gradaudit.models.base import Model
from gradaudit.models.spec import kind_of
from gradaudit.registry import hyper, register
from gradaudit.types import Observation, Reconstruction


@register
@dataclass(frozen=True)
class Blind(Attack[Model]):
    """Guess the most frequent words of English, as many as the sentence has; look at no tensor.

    Of images the mean of the public ones, or gray where there are none, as often as the batch has images.

    Every score is shown beside this one: what it does not exceed, the update did not reveal.
    """

    name: ClassVar[str] = "blind"
    source: ClassVar[str] = "evaluation protocol: prior only, on the same batches"
    tasks: ClassVar[tuple[str, ...]] = ("classification", "causal-lm", "image-classification")
    handles: ClassVar[frozenset[Trait]] = ANYTHING
    takes_any: ClassVar[bool] = True
    models_dropout: ClassVar[bool] = True
    exact_on_deltas: ClassVar[bool] = True
    length: int = hyper(
        10, "words a sentence when lengths are unknown", unit="tokens", source="a usual sentence of these data sets"
    )
    sentences: int = hyper(1, "sentences or images guessed when the batch size is unknown")

    def run(self, seen: Observation[Model], rng: torch.Generator) -> Reconstruction:
        size = seen.knowledge.batch_size or self.sentences
        return GUESSES[kind_of(seen.model.spec.task)](seen, size, self.length)

    @classmethod
    def takes(cls, task: str) -> bool:
        return True

    def gradient_evaluations(self, batch_size: int, tokens: int) -> int:
        return 0
