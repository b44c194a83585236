"""The judge: the only place that sees the private batch and the reconstruction together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from gradaudit.client import Client
from gradaudit.data.sensitive import spans
from gradaudit.examples import Private
from gradaudit.leakage.rowspace.subspace import gap_rank, stack
from gradaudit.metrics import text as metrics
from gradaudit.metrics.rouge import has_bigram
from gradaudit.models.base import Model
from gradaudit.models.transformers import TransformersModel
from gradaudit.record import Diagnosis, SentenceMarks, Spectrum
from gradaudit.streams import stream
from gradaudit.types import Batch, Observation, Reconstruction


@dataclass(frozen=True)
class Judgment:
    """A reconstruction against the truth.

    Args:
        scores: ours.
        published: the papers' own, by name.
        sensitive: share of sensitive spans found, None without spans.
        sentences: word marks, in the batch's order.
        originals, recovered: the texts behind them.
        original_words, recovered_words: the words the marks stand for.
        all_exact: every sentence has equal token ids.
    """

    scores: metrics.Scores
    published: dict[str, metrics.Scores]
    sensitive: float | None
    sentences: tuple[SentenceMarks, ...]
    originals: tuple[str, ...]
    recovered: tuple[str | None, ...]
    original_words: tuple[tuple[str, ...], ...]
    recovered_words: tuple[tuple[str, ...], ...]
    all_exact: bool


def sentence(model: TransformersModel, ids: Sequence[int]) -> metrics.Sentence:
    """Return a sentence ready for comparison: special tokens stripped, and the text that keeps them."""
    content = tuple(model.content(list(ids)))
    return metrics.Sentence(content, model.decode(content), str(model.tokenizer.decode(list(ids))))


def judge(model: TransformersModel, batch: Batch, found: Reconstruction, published: Sequence[str] = ()) -> Judgment:
    """Compare a reconstruction with the batch: aligned once, one to one, missing guesses count 0.

    Args:
        model: gives the texts of token ids.
        batch: the truth.
        found: what the attack returned.
        published: names of the papers' scorings to compute beside ours.
    """
    originals = [sentence(model, ids) for ids in batch.sequences()]
    guesses = [sentence(model, ids) for ids in found.sequences]
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
    return Judgment(
        scores=metrics.score(pairs),
        published={name: metrics.PUBLISHED[name](originals, guesses) for name in published},
        sensitive=metrics.sensitive_share([spans(text) for text in batch.texts], recovered),
        sentences=tuple(marked),
        originals=tuple(p.original.text for p in pairs),
        recovered=recovered,
        original_words=tuple(tuple(o) for o, _ in words),
        recovered_words=tuple(tuple(g) for _, g in words),
        all_exact=all(m.exact for m in marked),
    )


def _certificates(
    pairs: Sequence[metrics.Pair], guesses: Sequence[metrics.Sentence], found: Reconstruction
) -> list[str | None]:
    if found.certificates is None:
        return [None] * len(pairs)
    # by identity: two guesses may be equal and certified differently
    by_guess = {id(g): c for g, c in zip(guesses, found.certificates, strict=True)}
    return [by_guess.get(id(p.guess)) for p in pairs]


def diagnose(
    model: TransformersModel,
    batch: Batch,
    seen: Observation,
    found: Reconstruction,
    exact: bool,
    padding: Literal["right", "left"] = "right",
) -> Diagnosis:
    """Compare the update of the truth and of the guess with the observed one: which of the two failed?

    Both updates are made with dropout off, as the attacks that ignore dropout assume. The measure is 1 - cosine over
    all seen tensors together, which no scale of a weight change moves.

    Args:
        model: the model.
        batch: the truth.
        seen: what the attack saw.
        found: what it returned.
        exact: every sentence was recovered exactly.
        padding: the client's, which moves positions.
    """
    client = Client(model, padding=padding)
    truth = update_distance(client, batch, seen)
    if not found.sequences:
        return Diagnosis(truth=truth, guess=None, verdict="no guess")
    guess = update_distance(client, _as_batch(model, _matched(model, batch, found), batch), seen)
    verdict: Literal["solved", "optimizer failed", "objective failed"]
    verdict = "solved" if exact else "optimizer failed" if truth < guess else "objective failed"
    return Diagnosis(truth=truth, guess=guess, verdict=verdict)


def update_distance(client: Client, batch: Private, seen: Observation[Model]) -> float:
    """Return 1 - cosine of the update that a client makes of a batch with the observed one, over all seen tensors."""
    update = client.update(batch, stream(0, "diagnose")).tensors
    inner = own = other = 0.0
    for name, view in seen.views.items():
        mine, theirs = view(update[view.parameter]).double(), seen.tensors[name].double()
        inner += float((mine * theirs).sum())
        own += float(mine.square().sum())
        other += float(theirs.square().sum())
    sign = -1.0 if seen.kind == "delta" else 1.0
    return 1.0 - sign * inner / max(math.sqrt(own * other), 1e-300)


def _matched(model: TransformersModel, batch: Batch, found: Reconstruction) -> Reconstruction:
    """Return a reconstruction of no more sentences than the batch has: those that are held against its own."""
    if len(found.sequences) <= len(batch.ids):
        return found
    guesses = [sentence(model, ids) for ids in found.sequences]
    pairs = metrics.align([sentence(model, ids) for ids in batch.sequences()], guesses)
    kept = {id(pair.guess) for pair in pairs}
    chosen = [n for n, guess in enumerate(guesses) if id(guess) in kept]
    labels = None if found.labels is None else tuple(found.labels[n] for n in chosen)
    return Reconstruction(tuple(found.sequences[n] for n in chosen), labels)


def _as_batch(model: TransformersModel, found: Reconstruction, truth: Batch) -> Batch:
    rows = [list(s) for s in found.sequences]
    longest = max(len(row) for row in rows)
    ids = torch.tensor([row + [model.special.pad] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[True] * len(row) + [False] * (longest - len(row)) for row in rows])
    labels: Tensor | None = None
    if truth.labels is not None:
        known = found.labels if found.labels is not None else tuple(truth.labels.tolist())
        labels = torch.tensor([known[i % len(known)] for i in range(len(rows))])
    return Batch(ids=ids, mask=mask, labels=labels, texts=())


def spectrum(seen: Observation, tokens: int | None) -> Spectrum | None:
    """Return the spectrum of the first block of which q, k or v were seen, None when there is none.

    Args:
        seen: the observation.
        tokens: b, when it is known.
    """
    for layer in range(seen.model.depth):
        stacked, roles = stack(seen, layer)
        if stacked is None:
            continue
        values = torch.linalg.svdvals(stacked)
        rank, confidence = gap_rank(values, torch.finfo(next(iter(seen.tensors.values())).dtype).eps)
        relative = (values / values[0]).tolist()
        return Spectrum(
            layer=layer,
            roles="".join(roles),
            values=tuple(float(f"{v:.3g}") for v in relative),
            rank=rank,
            tokens=tokens,
            width=seen.model.width,
            confidence=min(confidence, 1e12),
        )
    return None


def modeled(attack: Any, defense: str, seen: Observation[Any], clients: int) -> bool:
    """Return whether an attack reckons with a defense that acted, as it acted.

    Args:
        attack: the attack that was run.
        defense: a name.
        seen: what it saw and was told.
        clients: how many defended their own updates before the server saw their mean.
    """
    told = seen.knowledge.defenses is not None or not attack.must_be_told(defense)
    alone = clients == 1 or attack.reckons_with_means(defense)
    return bool(told and alone and attack.reckons_with(defense, seen.model, seen.knowledge.batch_size))


def notes_of(found: Reconstruction | None, size: int) -> tuple[str, ...]:
    """Return an attack's notes, and how many guesses it made where the batch has fewer examples."""
    if found is None:
        return ()
    surplus = (f"{found.count} guesses for a batch of {size}: the nearest were scored",) if found.count > size else ()
    return (*found.notes, *surplus)


def read_as_gradient(attack: Any, seen: Observation[Any], made: Mapping[str, Any]) -> bool:
    """Return whether the weight change of several steps, or of several clients' steps, was read as one gradient's."""
    replayed = made["replayed"] and made["clients"] == 1  # what is replayed is one client with the whole batch
    return seen.kind == "delta" and made["steps"] > 1 and not (attack.exact_on_deltas or replayed)


def flags(
    *,
    model: TransformersModel,
    batch: Batch,
    seen: Observation,
    made: Mapping[str, Any],
    attack: Any,
    found: Reconstruction | None,
    scores: metrics.Scores,
    baseline: metrics.Scores,
    diagnosis: Diagnosis | None,
    shape: Spectrum | None,
) -> tuple[str, ...]:
    """Return the names of all flags that hold for one batch (see `gradaudit.flags`).

    Args:
        made: how the update was made ("dropout" rate, "defenses", local "steps", how many "clients" share it), and
            whether the attack "replayed" it.
        attack: the attack that was run.
        found: what it returned; None when it failed.
    """
    raised = {
        "random-weights": model.spec.random_weights,
        "surplus-guesses": found is not None and found.count > len(batch.ids),
        "truncated": batch.truncated > 0,
        "load-above-width": batch.tokens > model.width,
        "full-rank": shape is not None and shape.rank >= shape.width,
        "short-references": not all(has_bigram(model.decode(s)) for s in batch.sequences()),
        "dropout-not-modeled": made["dropout"] > 0 and not attack.models_dropout,
        "defense-not-modeled": not all(
            modeled(attack, str(d["name"]), seen, made["clients"]) for d in made["defenses"]
        ),
        "delta-as-gradient": read_as_gradient(attack, seen, made),
        "word-rows-shared": any(v.parameter in model.group("word") for v in seen.views.values()),
        "optimizer-failed": diagnosis is not None and diagnosis.verdict == "optimizer failed",
        "objective-failed": diagnosis is not None and diagnosis.verdict == "objective failed",
        "blind-not-beaten": attack.name != "blind" and (scores["rougeL"] or 0.0) <= (baseline["rougeL"] or 0.0),
    }
    return tuple(sorted(name for name, holds in raised.items() if holds))
