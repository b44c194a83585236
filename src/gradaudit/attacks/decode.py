"""Exact decoding: encoder batches back from their attention gradients, with dropout on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradaudit.attacks.base import Attack
from gradaudit.errors import NotSupportedError
from gradaudit.leakage.erasures import another_copy, decode, outer_products, refine
from gradaudit.leakage.linking import explained, group, joint_support, signals
from gradaudit.leakage.subspace import Span, VocabularyCheck, span
from gradaudit.progress import step
from gradaudit.registry import hyper, register
from gradaudit.types import Observation, Reconstruction

_INSIDE = 2e-5
"""A masked row this near the span lies in it: right rows are at 1e-7, the nearest wrong ones measured at 5e-2."""
_CLOSED = 1e-3
"""A sentence whose attention signals its own tokens explain up to this is closed: right ones are at 1e-5."""
_LEAST_KEPT = 0.5
"""No dropout rate in use drops more; the empty mask lies in every span."""


@register
@dataclass(frozen=True)
class Decode(Attack):
    """Decode dropped-out tokens from block 0's row space, copy by copy, and link them into sentences.

    For encoders with dropout after the embedding LayerNorm (BERT, RoBERTa, MPNet), training mode, frozen embeddings or
    not. Every row is a code word with erasures; the mask comes out with it. The attention gradients then say which
    tokens belong together. Needs the query, key and value gradients of block 0 alone; labels, lengths and the
    dropout rate need not be known. A sentence is *proven* when its rows lie in the span exactly, it is complete from
    the first special token to the last, and its own tokens explain its attention signals.
    """

    name: ClassVar[str] = "decode"
    source: ClassVar[str] = "ours; see docs/exact-decoding.md. Robust decoding after Candes and Tao (2005)"
    tasks: ClassVar[tuple[str, ...]] = ("classification",)
    models_dropout: ClassVar[bool] = True
    candidates: int = hyper(
        150,
        "tokens a position that are decoded, nearest to the span first",
        source="the worst right one ranked 71st at B = 8",
    )
    screening: int = hyper(6, "reweighting steps before all but the best are dropped", source="they rank first by then")
    steps: int = hyper(12, "further reweighting steps for the best")
    tries: int = hyper(24, "linear programs without a new copy before the first token is left")
    max_length: int = hyper(512, "longest sentence looked for", unit="tokens")

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        model = seen.model
        if model.causal or not model.absolute_positions:
            raise NotSupportedError("attack 'decode' decodes encoders (BERT, RoBERTa, MPNet); use 'dager' on decoders")
        if seen.knowledge.dropout == 0.0:
            raise NotSupportedError(
                "attack 'decode' decodes updates made with dropout on; with dropout off use 'dager'"
            )
        first = span(seen, 0)
        queries, keys = seen.role(0, "q"), seen.role(0, "k")
        if first is None or not queries or not keys:
            raise NotSupportedError(
                "attack 'decode' needs the query and key gradients of block 0, and one of them is not in this update"
            )
        details: dict[str, Any] = {"rank": first.rank, "rank_confidence": round(first.confidence, 1)}
        if first.rank >= model.width:
            note = "not identifiable: the row space is full (as many tokens as the width, or noise)"
            return Reconstruction(sequences=(), notes=(note,), details=details)
        decoder = _Decoder(self, seen, first, rng)
        decoder.tokens()
        decoder.copies()
        found, notes = decoder.found, []
        if len(found) < first.rank:
            notes.append(f"{first.rank - len(found)} of {first.rank} rows were not decoded")
        if not found:
            return Reconstruction(sequences=(), notes=tuple(notes), details=details)
        sentences, certificates = decoder.sentences(queries[0].double(), keys[0].double())
        details |= {"rows": len(found), "estimated_dropout": round(decoder.rate(), 3)}
        return Reconstruction(tuple(sentences), certificates=tuple(certificates), notes=tuple(notes), details=details)

    def gradient_evaluations(self, batch_size: int, tokens: int) -> int:
        return 20 + tokens // 4


def certificate(complete: bool, unexplained: float, length: int, head_width: int) -> str:
    """Return how sure a linked sentence is: "proven", "likely" or "guess".

    Args:
        complete: it runs from the first special token to the last without a hole.
        unexplained: share of its attention signals that its own tokens leave unexplained.
        length: its tokens; a set nearly as large as a head is wide explains anything, so it proves nothing.
        head_width: width of an attention head.
    """
    if not complete:
        return "guess"
    return "proven" if unexplained < _CLOSED and length < 0.8 * head_width else "likely"


@dataclass(frozen=True)
class _Row:
    """One decoded row: the token, its position and what dropout kept of it."""

    token: int
    position: int
    kept: Tensor
    clean: Tensor


@dataclass
class _Decoder:
    """One run's state: the rows found so far."""

    attack: Decode
    seen: Observation
    first: Span
    rng: torch.Generator
    found: list[_Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = self.seen.model
        self.basis = self.first.basis
        self.outside = torch.eye(len(self.basis), dtype=torch.double, device=self.basis.device)
        self.outside -= self.basis @ self.basis.T
        self.size = self.seen.knowledge.batch_size

    def tokens(self) -> None:
        """Decode one copy of every token at every position, until two positions in a row hold none."""
        check = VocabularyCheck(self.model.first_input_parts(), self.first)
        products = outer_products(self.basis)
        survivors = 2 * (self.size or 16) + 8
        empty = 0
        for position in range(min(self.attack.max_length, self.model.max_length)):
            ids = (
                check.rough(position)
                .topk(min(self.attack.candidates, self.model.vocabulary_size), largest=False)
                .indices
            )
            if position == 0 and self.model.special.prefix:
                # masked copies of one row blur its residual, so the known first token is decoded directly
                ids = torch.tensor(self.model.special.prefix[:1], device=ids.device)
            rows = self.model.first_inputs(position, ids).double()
            fit = decode(self.basis, products, rows, start=None, first=0, steps=self.attack.screening)
            best = fit.share.topk(min(survivors, len(ids))).indices
            ids, rows = ids[best], rows[best]
            fit = decode(
                self.basis,
                products,
                rows,
                start=fit.weights[best],
                first=self.attack.screening,
                steps=self.attack.steps,
            )
            kept, outside = refine(self.outside, rows, fit.kept)
            inside = (outside < _INSIDE) & (kept.double().mean(1) > _LEAST_KEPT)
            for at in torch.where(inside)[0].tolist():
                self.found.append(_Row(int(ids[at]), position, kept[at], rows[at]))
            step(f"decode: {len(self.found)} of {self.first.rank} rows", len(self.found), self.first.rank)
            empty = 0 if bool(inside.any()) else empty + 1
            if empty == 2:
                break

    def copies(self) -> None:
        """Find further copies of found tokens while rows are missing; every sentence has the first token."""
        kinds = {(row.position, row.token) for row in self.found}
        # many copies blur the regression: the first token is looked for even where none of them was found
        kinds |= {(0, token) for token in self.model.special.prefix[:1]}
        for position, token in sorted(kinds):
            self._copies_of(position, token, self.attack.tries if position == 0 else 2)

    def _copies_of(self, position: int, token: int, tries: int) -> None:
        ids = torch.tensor([token], device=self.basis.device)
        clean = self.model.first_inputs(position, ids).double()[0]
        known = [row.kept for row in self.found if (row.position, row.token) == (position, token)]
        failures = 0
        while len(self.found) < self.first.rank and failures < tries:
            if self.size is not None and len(known) >= self.size:
                return
            failures += 1
            masks = torch.stack(known) if known else torch.ones_like(clean, dtype=torch.bool)[None]
            mask = another_copy(self.basis, clean, masks, self.rng)
            if mask is None:
                continue
            kept, outside = refine(self.outside, clean[None], mask[None])
            fresh = not known or bool(((kept != masks).sum(1) > len(clean) // 100).all())
            if fresh and float(outside) < _INSIDE and float(kept.double().mean()) > _LEAST_KEPT:
                self.found.append(_Row(token, position, kept[0], clean))
                known.append(kept[0])
                failures = 0
                step(f"decode: {len(self.found)} of {self.first.rank} rows", len(self.found), self.first.rank)

    def rate(self) -> float:
        """Return the dropout rate that the masks show."""
        return 1.0 - float(torch.stack([row.kept for row in self.found]).double().mean())

    def sentences(self, queries: Tensor, keys: Tensor) -> tuple[list[tuple[int, ...]], list[str]]:
        """Link the rows into sentences, and say of each how sure it is.

        Args:
            queries, keys: [out, d] gradients of block 0.
        """
        known = self.seen.knowledge.dropout
        rate = known if known is not None else self.rate()
        masked = torch.stack([torch.where(r.kept, r.clean, torch.zeros_like(r.clean)) for r in self.found])
        inputs = masked / (1 - rate)
        positions = [row.position for row in self.found]
        q, k = self.model.project(0, "q", inputs), self.model.project(0, "k", inputs)
        toward_q, toward_k = (signals(g, inputs).view_as(q) for g in (queries, keys))
        place = torch.tensor(positions, device=inputs.device)
        by_query, by_key = joint_support(toward_q, k, place), joint_support(toward_k, q, place)
        affinity = by_query + by_query.T + by_key + by_key.T
        size = self.size or max(positions.count(p) for p in set(positions))
        sentences, certificates = [], []
        for members in group(affinity, positions, size):
            ids = [self.found[i].token for i in members]
            index = torch.tensor(members, device=inputs.device)
            left = max(float(explained(toward_q, k, index).max()), float(explained(toward_k, q, index).max()))
            complete = self._complete(ids, [positions[i] for i in members])
            sentences.append(tuple(self._framed(ids)))
            certificates.append(certificate(complete, left, len(members), q.shape[2]))
        return sentences, certificates

    def _complete(self, ids: list[int], positions: list[int]) -> bool:
        special = self.model.special
        prefix, suffix = list(special.prefix), list(special.suffix)
        inner = ids[len(prefix) : len(ids) - len(suffix)]
        return (
            positions == list(range(len(ids)))
            and ids[: len(prefix)] == prefix
            and ids[len(ids) - len(suffix) :] == suffix
            and not any(i in special.ids for i in inner)
        )

    def _framed(self, ids: list[int]) -> list[int]:
        """Put the tokenizer's own first and last tokens where they were not decoded: they are known to be there."""
        special = self.model.special
        inner = [i for i in ids if i not in (*special.prefix, *special.suffix)]
        return [*special.prefix, *inner, *special.suffix]
