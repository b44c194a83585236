"""Recovered sentences against the batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from gradaudit.data.sensitive import spans
from gradaudit.judge.judgment import Judge, Judgment, Order
from gradaudit.judge.spectrum import spectrum
from gradaudit.judge.words import score_words
from gradaudit.metrics import text as metrics
from gradaudit.metrics.rouge import has_bigram
from gradaudit.models.transformers import TransformersModel
from gradaudit.record import SentenceMarks, Spectrum, Texts, WordScores
from gradaudit.types import Batch, NamedWord, Observation, Reconstruction


@dataclass(frozen=True)
class TextJudgment(Judgment):
    """Recovered sentences against the truth.

    Args:
        scores: ours.
        published: the papers' own, by name.
        sensitive: share of sensitive spans found, None without spans.
        sentences: word marks, in the batch's order.
        originals, recovered: the texts behind them.
        original_words, recovered_words: the words the marks stand for.
        solved: every sentence has equal token ids.
        words: of the words that the attack names; None where it names none.
        named: of the words of its sentences.
    """

    scores: metrics.Scores
    published: dict[str, metrics.Scores]
    sensitive: float | None
    sentences: tuple[SentenceMarks, ...]
    originals: tuple[str, ...]
    recovered: tuple[str | None, ...]
    original_words: tuple[tuple[str, ...], ...]
    recovered_words: tuple[tuple[str, ...], ...]
    solved: bool
    words: WordScores | None
    named: WordScores

    def of_record(self, baseline: TextJudgment) -> dict[str, Any]:
        published: dict[str, metrics.Scores] = {}
        for name, scores in self.published.items():
            published[name] = scores
            published[f"{name} (blind)"] = baseline.published[name]
        proofs = Counter(row.certificate for row in self.sentences if row.certificate is not None)
        return {
            "published": published,
            "sensitive": self.sensitive,
            "sensitive_baseline": baseline.sensitive,
            "words": self.words,
            "baseline_words": None if self.words is None else baseline.named,
            "certificates": dict(proofs),
            "sentences": self.sentences,
        }


@dataclass(frozen=True)
class TextJudge(Judge[Batch]):
    """Compares sentences.

    Args:
        model: gives the texts of token ids.
        published: names of the papers' scorings to compute beside ours.
        order: rows of the batch that each local step took; None where that is not known.
    """

    private: ClassVar[type[Texts]] = Texts
    file: ClassVar[str] = "texts.jsonl"
    model: TransformersModel
    published: tuple[str, ...] = ()
    order: Order | None = None

    def ordered(self, order: Order | None) -> Self:
        return replace(self, order=order)

    def judge(self, batch: Batch, found: Reconstruction) -> TextJudgment:
        originals = [sentence(self.model, ids) for ids in batch.sequences()]
        guesses = [sentence(self.model, ids) for ids in found.sequences]
        pairs = metrics.align(originals, guesses)
        words = [
            (metrics.split_words(p.original.text), metrics.split_words(p.guess.text) if p.guess else []) for p in pairs
        ]
        certificate = _certificates(pairs, guesses, found)
        marked = []
        for (original, guess), pair, proof in zip(words, pairs, certificate, strict=True):
            on_guess, on_original = metrics.marks(original, guess)
            marked.append(
                SentenceMarks(
                    recovered=on_guess,
                    original=on_original,
                    certificate=proof,
                    rougeL=pair.rouge["rougeL"],
                    exact=pair.guess is not None and pair.guess.ids == pair.original.ids,
                )
            )
        recovered = tuple(None if p.guess is None else p.guess.text for p in pairs)
        return TextJudgment(
            scores=metrics.score(pairs),
            published={name: metrics.PUBLISHED[name](originals, guesses) for name in self.published},
            sensitive=metrics.sensitive_share([spans(text) for text in batch.texts], recovered),
            sentences=tuple(marked),
            originals=tuple(p.original.text for p in pairs),
            recovered=recovered,
            original_words=tuple(tuple(o) for o, _ in words),
            recovered_words=tuple(tuple(g) for _, g in words),
            solved=all(m.exact for m in marked),
            words=None if found.words is None else score_words(self.model, batch, found.words, self.order),
            named=score_words(self.model, batch, [NamedWord(t) for ids in found.sequences for t in ids], None),
        )

    def nothing(self, batch: Batch) -> TextJudgment:
        return replace(self.judge(batch, Reconstruction()), sentences=())

    def guessed(self, batch: Batch, found: Reconstruction) -> Batch | None:
        """Return no more sentences than the batch has: those that are held against its own, with their labels."""
        originals = [sentence(self.model, ids) for ids in batch.sequences()]
        guesses = [sentence(self.model, ids) for ids in found.sequences]
        # the truth's labels stand in the batch's order, what was found in any
        whose = {id(p.guess): n for n, p in enumerate(metrics.align(originals, guesses))}
        kept = [n for n, guess in enumerate(guesses) if id(guess) in whose]
        if not kept:
            return None
        labels: Tensor | None = None
        if batch.labels is not None:
            own = [int(batch.labels[whose[id(guesses[n])]]) for n in kept]
            labels = torch.tensor(own if found.labels is None else [found.labels[n] for n in kept])
        return _as_batch(self.model, [found.sequences[n] for n in kept], labels)

    def spectrum(self, batch: Batch, seen: Observation) -> Spectrum | None:
        return spectrum(seen, batch.tokens)

    def load(self, batch: Batch) -> dict[str, Any]:
        return {"load": batch.tokens / self.model.width, "tokens": batch.tokens}

    def flags(self, batch: Batch, seen: Observation, shape: Spectrum | None) -> dict[str, bool]:
        model = self.model
        return {
            "truncated": batch.truncated > 0,
            "load-above-width": batch.tokens > model.width,
            "full-rank": shape is not None and shape.rank >= shape.width,
            "short-references": not all(has_bigram(model.decode(s)) for s in batch.sequences()),
            "word-rows-shared": any(v.parameter in model.group("word") for v in seen.views.values()),
        }


def sentence(model: TransformersModel, ids: Sequence[int]) -> metrics.ScoredSentence:
    """Return a sentence ready for comparison: special tokens stripped, and the text that keeps them."""
    content = tuple(model.content(list(ids)))
    return metrics.ScoredSentence(content, model.decode(content), str(model.tokenizer.decode(list(ids))))


def _certificates(
    pairs: Sequence[metrics.AlignedPair], guesses: Sequence[metrics.ScoredSentence], found: Reconstruction
) -> list[str | None]:
    if found.certificates is None:
        return [None] * len(pairs)
    # by identity: two guesses may be equal and certified differently
    by_guess = {id(g): c for g, c in zip(guesses, found.certificates, strict=True)}
    return [by_guess.get(id(p.guess)) for p in pairs]


def _as_batch(model: TransformersModel, rows: Sequence[Sequence[int]], labels: Tensor | None) -> Batch:
    longest = max(len(row) for row in rows)
    ids = torch.tensor([[*row, *[model.special.pad] * (longest - len(row))] for row in rows])
    mask = torch.tensor([[True] * len(row) + [False] * (longest - len(row)) for row in rows])
    return Batch(ids=ids, mask=mask, labels=labels, texts=())
