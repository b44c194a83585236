"""TAG: gradient matching with squared L2 and L1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from gradaudit.attacks.base import Attack
from gradaudit.defense_traits import Trait
from gradaudit.leakage.matching.counters import COUNTERED, countered
from gradaudit.leakage.matching.distances import SquaredL2
from gradaudit.leakage.matching.loop import match
from gradaudit.leakage.observed import STEP
from gradaudit.models.base import Model
from gradaudit.registry import hyper, register
from gradaudit.types import Observation, Reconstruction


@register
@dataclass(frozen=True)
class Tag(Attack):
    """Match the update by squared L2 + 0.01 L1 over word vectors, then take the nearest tokens.

    As run in LAMP's harness: one Gaussian start, Adam at a constant rate, the last iterate, special tokens known
    where lengths are. The word table's own gradient is not matched (a guess of word vectors cannot predict it).
    """

    name: ClassVar[str] = "tag"
    source: ClassVar[str] = (
        "TAG (Deng et al., EMNLP Findings 2021), with the settings of LAMP's harness (Balunovic et al., 2022)"
    )
    needs: ClassVar[tuple[str, ...]] = ("batch_size",)
    handles: ClassVar[frozenset[Trait]] = COUNTERED | {"zero mean"}
    steps: int = hyper(2500, "Adam steps", source="LAMP, appendix: baselines")
    learning_rate: float = hyper(0.1, "Adam's learning rate", source="LAMP, appendix: baselines")
    l1: float = hyper(0.01, "weight of the L1 term", source="LAMP, appendix: baselines")
    start: float = hyper(
        1.0,
        "deviation of the Gaussian start; 0: that of the word table",
        source="LAMP's harness; 0 is ours",
        later=True,
    )
    restarts: int = hyper(1, "independent starts, minimized together", source="LAMP, appendix: baselines")
    assumed_length: int = hyper(
        16, "sentence length when nothing tells it", unit="tokens", source="ours: the papers know lengths"
    )
    keep_best: bool = hyper(False, "return the best iterate instead of the last", source="the papers take the last")
    counter: bool = hyper(
        True,
        "measure wrong signs, what was sent, or unit norms, against defenses it was told of",
        source="LTI, section 4; Grab, 5.4 and 5.5",
    )
    replayed_steps: int = hyper(
        8,
        "local steps of a weight change replayed at most; of more it is read as one gradient, 0 always",
        source="ours",
        deltas=True,
    )

    def __post_init__(self) -> None:
        self._at_least(0, "steps", "replayed_steps", "start")
        self._at_least(1, "restarts", "assumed_length")

    def handled(self, model: Model | None) -> frozenset[Trait]:
        return self.handles if self.counter else self.handles - COUNTERED

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        distance = SquaredL2(l1=self.l1)
        return match(
            seen,
            rng,
            countered(distance, seen, self.name) if self.counter else distance,
            steps=self.steps,
            learning_rate=self.learning_rate,
            restarts=self.restarts,
            assumed_length=self.assumed_length,
            keep_best=self.keep_best,
            what=self.name,
            replayed=self.replayed_steps,
            start=self.start,
        )

    def gradient_evaluations(self, batch_size: int, tokens: int) -> int:
        return int(STEP * self.steps * self.restarts)
