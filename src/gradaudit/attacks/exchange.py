"""Exchange: words exchanged one by one for those that make the guess's update more like the one that was seen."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from gradaudit.attacks.base import Attack
from gradaudit.defense_traits import Trait
from gradaudit.leakage.labels import known_labels
from gradaudit.leakage.matching.exchange import Exchanges, Guess, exchange_words, singles_out
from gradaudit.leakage.matching.layout import longest_position
from gradaudit.leakage.matching.similarity import APPLIED_TO_GUESS, Likeness
from gradaudit.leakage.priors import frequent_tokens, marks
from gradaudit.progress import answering
from gradaudit.registry import hyper, register
from gradaudit.types import Observation, Reconstruction

_SAME = 1e-4
"""A guess whose update is this like the one seen, through the same defenses, is the batch or next to it, if what was
sent tells texts apart."""

_MARKS = ".,?!'"
"""Marks that stand in most texts, tried in every slot: slopes seldom propose them."""


@register
@dataclass(frozen=True)
class Exchange(Attack):
    """Exchange words one at a time, proposed by the slope of the likeness and judged by the likeness itself.

    The guess is text from the start. Its update goes through the defenses that the attacker was told of and is compared
    with the one that was seen by a cosine over all tensors; the gradient of that cosine proposes words for every slot
    at once. Where lengths are not told, a sentence starts as one word (of next words: two) and grows. Nothing is
    learned beforehand and no public text is needed.

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
    anytime: ClassVar[bool] = True
    evaluations: int = hyper(10_000, "gradients computed at most", source="ours: a minute on MiniLM's head")
    proposals: int = hyper(48, "exchanges judged a round", source="ours: tried on public windows")
    longest: int = hyper(
        48, "the longest sentence, with its special tokens, when nothing tells", unit="tokens", source="ours"
    )
    counter: bool = hyper(True, "apply the defenses it was told of to the guess's update", source="ours")

    def __post_init__(self) -> None:
        self._at_least(1, "evaluations", "proposals", "longest")

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        model, size = seen.model, seen.knowledge.batch_size
        assert size is not None
        like = Likeness(seen, self.name, self.counter)
        usual = tuple(frequent_tokens(model))
        words = torch.tensor([token not in model.special.ids for token in range(model.vocabulary_size)])
        frame, lengths = (tuple(model.special.prefix), tuple(model.special.suffix)), seen.knowledge.lengths
        framing = len(frame[0]) + len(frame[1])
        # a next word needs one before it
        shortest = max(1, 2 - framing) if model.spec.task == "causal-lm" else 1
        inner = [shortest] * size if lengths is None else [n - framing if n >= framing else n for n in lengths]
        framed = [lengths is None or n >= framing for n in lengths or inner]
        longest = (
            None
            if lengths is not None
            else min(seen.knowledge.longest or longest_position(seen) or self.longest, model.max_length)
        )
        labels, classes = None, 0
        if model.spec.task == "classification":
            told, _ = known_labels(seen)
            labels = (0,) * size if told is None else tuple(told.tolist())
            classes = model.spec.labels if told is None else 0
        how = Exchanges(
            frames=tuple(frame if one else ((), ()) for one in framed),
            words=words.to(like.table.device),
            usual=usual,
            marks=tuple(marks(model, _MARKS)),
            classes=classes,
            shortest=shortest,
            longest=None if longest is None else max(shortest, longest - framing),
            proposals=self.proposals,
            evaluations=self.evaluations,
        )
        start = Guess(tuple((usual[0],) * n for n in inner), labels)

        def told_of(found: Guess) -> Reconstruction:
            same = found.likeness > 1 - _SAME and singles_out(like, found, how, rng)
            certificate = "likely" if same else "guess"
            return Reconstruction(
                sequences=how.whole(found),
                labels=found.labels,
                certificates=(certificate,) * size,
                details={"likeness": round(found.likeness, 6), "gradient_evaluations": like.spent},
            )

        with answering(lambda had: had and told_of(had)):
            return told_of(exchange_words(like, start, how, rng, self.name))

    def gradient_evaluations(self, batch_size: int, tokens: int) -> int:
        return self.evaluations
