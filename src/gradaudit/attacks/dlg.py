"""DLG: gradient matching with squared L2."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from gradaudit.attacks.base import Attack
from gradaudit.defense_traits import Trait
from gradaudit.errors import BadInputError
from gradaudit.leakage import options
from gradaudit.leakage.matching.counters import TEXT_COUNTERED, countered
from gradaudit.leakage.matching.distances import SquaredL2
from gradaudit.leakage.matching.loop import Matching, match
from gradaudit.leakage.observed import STEP
from gradaudit.registry import filled, hyper, register
from gradaudit.types import Observation, Reconstruction

_OPTIMIZERS = ("adam", "lbfgs")
_EVALUATIONS = 20
"""What a step of torch's L-BFGS may spend."""


@register
@dataclass(frozen=True)
class Dlg(Attack):
    """Match the update by squared L2 over word vectors, then take the nearest tokens.

    As run in LAMP's harness: one Gaussian start, Adam at a constant rate, the last iterate, special tokens known
    where lengths are. Its original form is `optimizer = "lbfgs"`, `steps = 300`, `learn_labels = true`: torch's L-BFGS
    with its defaults, each step of up to 20 evaluations. The word table's own gradient is not matched (a guess of word
    vectors cannot predict it).

    Raises:
        BadInputError: a setting that makes no sense.
    """

    name: ClassVar[str] = "dlg"
    source: ClassVar[str] = (
        "DLG (Zhu et al., NeurIPS 2019), with the settings of LAMP's harness (Balunovic et al., 2022)"
    )
    needs: ClassVar[tuple[str, ...]] = ("batch_size",)
    handles: ClassVar[frozenset[Trait]] = TEXT_COUNTERED | {"zero mean"}
    countered: ClassVar[frozenset[Trait]] = TEXT_COUNTERED
    steps: int = hyper(2500, "Adam steps", source="LAMP, appendix: baselines")
    learning_rate: float = hyper(0.1, "Adam's learning rate", source="LAMP, appendix: baselines")
    start: float = options.start()
    restarts: int = hyper(1, "independent starts, minimized together", source="LAMP, appendix: baselines")
    assumed_length: int = options.assumed_length()
    keep_best: bool = hyper(False, "return the best iterate instead of the last", source="the papers take the last")

    optimizer: str = hyper(
        "adam", "'adam', as in LAMP's harness, or 'lbfgs', the original form", source="DLG, section 4.1", later=True
    )
    learn_labels: bool = hyper(
        False, "learn labels even where they are given or can be read", source="DLG, algorithm 1, does", later=True
    )
    counter: bool = options.counter()
    replayed_steps: int = options.replayed_steps()

    def __post_init__(self) -> None:
        self._at_least(0, "steps", "replayed_steps", "start")
        self._at_least(1, "restarts", "assumed_length")
        if self.optimizer == "lbfgs" and self.keep_best:
            raise BadInputError("attack 'dlg': with L-BFGS the last point is returned; keep_best is Adam's")
        if self.optimizer not in _OPTIMIZERS:
            raise BadInputError(
                f"attack 'dlg': optimizer must be one of {', '.join(_OPTIMIZERS)}, got '{self.optimizer}'"
            )

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        distance = SquaredL2()
        measured = countered(distance, seen, self.name) if self.counter else distance
        return match(seen, rng, measured, filled(Matching, self, lbfgs=self.optimizer == "lbfgs"), self.name)

    def gradient_evaluations(self, batch_size: int, tokens: int) -> int:
        each = _EVALUATIONS if self.optimizer == "lbfgs" else 1
        return int(STEP * each * self.steps * self.restarts)
