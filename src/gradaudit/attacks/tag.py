"""TAG: gradient matching with squared L2 and L1."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from gradaudit.attacks.base import Attack
from gradaudit.defense_traits import Trait
from gradaudit.leakage import options
from gradaudit.leakage.matching.counters import TEXT_COUNTERED, countered
from gradaudit.leakage.matching.distances import SquaredL2
from gradaudit.leakage.matching.loop import Matching, match
from gradaudit.leakage.observed import STEP
from gradaudit.registry import filled, hyper, register
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
    handles: ClassVar[frozenset[Trait]] = TEXT_COUNTERED | {"zero mean"}
    countered: ClassVar[frozenset[Trait]] = TEXT_COUNTERED
    steps: int = hyper(2500, "Adam steps", source="LAMP, appendix: baselines")
    learning_rate: float = hyper(0.1, "Adam's learning rate", source="LAMP, appendix: baselines")
    l1: float = hyper(0.01, "weight of the L1 term", source="LAMP, appendix: baselines")
    start: float = options.start()
    restarts: int = hyper(1, "independent starts, minimized together", source="LAMP, appendix: baselines")
    assumed_length: int = options.assumed_length()
    keep_best: bool = hyper(False, "return the best iterate instead of the last", source="the papers take the last")
    counter: bool = options.counter()
    replayed_steps: int = options.replayed_steps()

    def __post_init__(self) -> None:
        self._at_least(0, "steps", "replayed_steps", "start")
        self._at_least(1, "restarts", "assumed_length")

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        distance = SquaredL2(self.l1)
        measured = countered(distance, seen, self.name) if self.counter else distance
        return match(seen, rng, measured, filled(Matching, self, lbfgs=False, learn_labels=False), self.name)

    def gradient_evaluations(self, batch_size: int, tokens: int) -> int:
        return int(STEP * self.steps * self.restarts)
