"""Exchange: words exchanged one by one for those that make the guess's update more like the one that was seen."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from gradaudit.attacks.base import Attack
from gradaudit.defense_traits import Trait
from gradaudit.leakage.matching.exchange import Exchanges, Guess, exchange_words
from gradaudit.leakage.matching.layout import layout
from gradaudit.leakage.matching.similarity import APPLIED_TO_GUESS, Likeness
from gradaudit.leakage.matching.start import first_labels
from gradaudit.leakage.priors import frequent_tokens
from gradaudit.progress import answering
from gradaudit.registry import hyper, register
from gradaudit.types import Observation, Reconstruction

_SAME = 1e-4
"""A guess whose update is this like the one seen, through the same defenses, is the batch or next to it."""


@register
@dataclass(frozen=True)
class Exchange(Attack):
    """Exchange words one at a time, proposed by the slope of the likeness and judged by the likeness itself.

    The guess is text from the start. Its update goes through the defenses that the attacker was told of and is compared
    with the one that was seen by a cosine over all tensors; the gradient of that cosine proposes words for every slot
    at once. Nothing is learned beforehand and no public text is needed.

    Raises:
        BadInputError: a count below 1.
    """

    name: ClassVar[str] = "exchange"
    source: ClassVar[str] = (
        "ours: proposals as HotFlip (Ebrahimi et al., ACL 2018) makes them, for the likeness of gradients"
    )
    needs: ClassVar[tuple[str, ...]] = ("batch_size",)
    handles: ClassVar[frozenset[Trait]] = APPLIED_TO_GUESS | {"zero mean", "scaled", "support", "one example clipped"}
    countered: ClassVar[frozenset[Trait]] = APPLIED_TO_GUESS
    evaluations: int = hyper(1500, "gradients computed at most", source="ours: 5 to 10 s on LTI's transformer")
    proposals: int = hyper(48, "exchanges judged a round", source="ours: tried on public windows")
    assumed_length: int = hyper(16, "sentence length when nothing tells it", unit="tokens", source="ours")
    counter: bool = hyper(True, "apply the defenses it was told of to the guess's update", source="ours")

    def __post_init__(self) -> None:
        self._at_least(1, "evaluations", "proposals", "assumed_length")

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        model = seen.model
        frame = layout(seen, self.assumed_length)
        like = Likeness(seen, frame.mask, self.name, self.counter)
        # where lengths are not given the end is not laid out, and has to be found like a word
        barred = model.special.ids - (set() if seen.knowledge.lengths is not None else set(model.special.suffix))
        words = torch.tensor([token not in barred for token in range(model.vocabulary_size)])
        free = frame.mask & ~frame.fixed
        ids = torch.where(free, frequent_tokens(model)[0], frame.ids)
        labels, classes = None, 0
        if model.spec.task == "classification":
            first = first_labels(seen, frame)
            labels = first.values.argmax(-1) if first.learned else first.values
            classes = model.spec.labels if first.learned else 0
        start = Guess(ids, labels, like(ids, labels))
        how = Exchanges(free, words.to(free.device), classes, self.proposals, self.evaluations)

        def told(found: Guess) -> Reconstruction:
            certificate = "likely" if found.likeness > 1 - _SAME else "guess"
            return Reconstruction(
                sequences=frame.sequences(found.ids),
                labels=None if found.labels is None else tuple(found.labels.tolist()),
                certificates=(certificate,) * len(found.ids),
                details={"likeness": round(found.likeness, 6), "gradient_evaluations": like.spent},
            )

        with answering(lambda had: had and told(had)):
            return told(exchange_words(like, start, how, rng, self.name))

    def gradient_evaluations(self, batch_size: int, tokens: int) -> int:
        return self.evaluations
