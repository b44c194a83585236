"""LTI: a network that learned, on public text, to read defended updates."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch

from gradaudit.attacks.base import Attack
from gradaudit.defense_traits import ANYTHING, Trait
from gradaudit.errors import BadInputError, NotSupportedError
from gradaudit.learned.manifest import Target
from gradaudit.learned.public import Public, ReplaysText
from gradaudit.learned.text.fit import fit_inverter
from gradaudit.learned.text.inverter import load_inverter, save_inverter
from gradaudit.learned.text.plan import Plan
from gradaudit.models.base import TextModel
from gradaudit.registry import register
from gradaudit.types import Observation, Reconstruction


@register
@dataclass(frozen=True)
class Lti(Plan, Attack):
    """Read the update by a network that was trained on simulated updates of public text, defenses included.

    The attacker has text of the same kind ([public] in a case) and the client's settings. It computes the updates that
    the client would send of its own text, hashes them to fewer numbers, and learns the way back; the update under
    attack then costs one pass. With `pseudo` the text is drawn word by word from the public text's frequencies
    (LTI-P), or in pieces of several words. With `pairs` what the network says of each position is weighed by the
    public text's word pairs. It reads what it was trained for and nothing else: another model, selection
    or defense is refused.

    Raises:
        BadInputError: a setting that makes no sense.
    """

    name: ClassVar[str] = "lti"
    source: ClassVar[str] = (
        "Learning to Invert (Wu et al., arXiv 2210.10880), section 3 and 4.1. Ours: inputs are scaled bin by bin by "
        "the public simulations (the paper feeds them as they are), the learning rate falls to zero (its is constant), "
        "training stops early by public validation, and sentences of a batch are learned in any order"
    )
    handles: ClassVar[frozenset[Trait]] = ANYTHING - {"remembers"}
    takes_any: ClassVar[bool] = True
    models_dropout: ClassVar[bool] = True
    exact_on_deltas: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._at_least(1, "piece", "references", "bottleneck", "width", "epochs", "batch", "trial")
        self._at_least(0, "learning_rate", "patience")
        if not 0 < self.share <= 1 or not 0 < self.validation < 1:
            raise BadInputError("attack 'lti': share must be above 0 and at most 1, validation between 0 and 1")

    @property
    def unfitted(self) -> bool:
        return not self.inverter

    def simulated_updates(self, public: int) -> int:
        return public * (self.epochs if self.pseudo else 1)

    def fit(
        self,
        simulate: ReplaysText,
        public: Public,
        target: Target,
        model: TextModel,
        folder: Path,
        rng: torch.Generator,
    ) -> Attack:
        return self.fitted_in(save_inverter(folder, fit_inverter(simulate, public, target, model, self, folder, rng)))

    def fitted_in(self, folder: Path) -> Attack:
        return replace(self, inverter=str(folder))

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        if not self.inverter:
            raise NotSupportedError(
                "attack 'lti' has no inverter: give [public] text to 'gradaudit run' or 'gradaudit fit', or name one "
                'with inverter = "DIR"'
            )
        inverter = load_inverter(Path(self.inverter))
        about = inverter.manifest
        notes = (f"learned from {about.texts} public texts ({about.public}); {about.accuracy:.1f}% of held-out tokens",)
        return Reconstruction(
            sequences=inverter.sentences(seen),
            notes=notes,
            details={"public_texts": about.texts, "validation": about.accuracy, "training_steps": about.steps},
        )

    def gradient_evaluations(self, batch_size: int, tokens: int) -> int:
        return 0
