"""LTI: a network that learned, on public text, to read defended updates."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import torch

from gradaudit.attacks.base import Attack
from gradaudit.channels import ANYTHING, Trait
from gradaudit.errors import BadInputError, NotSupportedError
from gradaudit.learned.manifest import Target
from gradaudit.learned.public import Public, Simulation
from gradaudit.learned.text.features import sizes_of
from gradaudit.learned.text.fit import fit_inverter
from gradaudit.learned.text.inverter import load_inverter, save_inverter
from gradaudit.learned.text.plan import Plan
from gradaudit.models.base import TextModel
from gradaudit.registry import describe, filled, hyper, register
from gradaudit.types import Observation, Reconstruction


@register
@dataclass(frozen=True)
class Lti(Attack):
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
    learner: Literal["network", "layers"] = hyper(
        "network",
        '"network" (the paper\'s, on bins drawn by chance) or "layers" (ours, one sentence: a linear guess at every '
        "position and the position table's own rows, read by one network for all positions)",
        later=True,
    )
    references: int = hyper(6000, '"layers": updates that the linear guess is fitted to', source="ours", later=True)
    inverter: str = hyper("", "folder of a fitted inverter; without one, 'run' and 'sweep' fit it from [public]")
    pseudo: bool = hyper(
        False, "train on words drawn from the public text's frequencies, fresh every batch (LTI-P)", source="LTI-P"
    )
    piece: float = hyper(
        1.0,
        "pseudo: words that are drawn together in the mean, as they stand in the public text; 1 draws each by itself",
        source="ours; the paper draws each by itself",
        later=True,
    )
    share: float = hyper(0.1, "bins as a share of the coordinates seen", source="section 4.1")
    signed: bool = hyper(False, "hash with random signs", source="the paper sums without")
    bottleneck: int = hyper(600, "width of the first hidden layer", source="section 4.1")
    width: int = hyper(1000, "width of each position's hidden vector", source="section 4.1")
    epochs: int = hyper(20, "passes over the public text, or as many drawn texts", source="section 4.1; its code: 100")
    batch: int = hyper(64, "updates a step", source="section 4.1")
    learning_rate: float = hyper(
        0.0, "Adam's; 0 tries 1e-3, 1e-4 and 1e-5 and takes the best on held-out public text", source="section 4.1"
    )
    trial: int = hyper(100, "steps that each learning rate is tried for", source="ours")
    pairs: bool = hyper(
        False,
        "weigh what is read by how often words stand side by side in the public text, and take the likeliest sentence",
        source="ours",
        later=True,
    )
    own_words: bool = hyper(
        False,
        "begin the shared layer with the model's own word and output vectors and the public text's frequencies",
        source="ours: rare words need not be learned one by one",
    )
    decay: bool = hyper(True, "let the learning rate fall to zero", source="ours; the paper keeps it")
    squared: bool = hyper(False, "mean squared error in place of cross-entropy", source="the paper's for images")
    validation: float = hyper(0.05, "share of the public text held out to choose by", source="ours")
    patience: int = hyper(5, "validations without a better one after which training stops; 0 never", source="ours")

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
        self, simulate: Simulation, public: Public, target: Target, model: TextModel, folder: Path, rng: torch.Generator
    ) -> Attack:
        bins = max(1, round(self.share * sum(sizes_of(target.tensors).values())))
        plan = filled(Plan, self, layers=self.learner == "layers", bins=bins)
        found = fit_inverter(simulate, public, target, model, plan, describe(self), folder, rng)
        return self.fitted_in(save_inverter(folder, found))

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
