"""Exact decoding: encoder batches back from their attention gradients, with dropout on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradaudit.attacks.base import Attack
from gradaudit.errors import NotSupportedError
from gradaudit.leakage.linking import group, joint_support, signals, unexplained
from gradaudit.leakage.rows import MaskedInputs, Row, Search, find_rows
from gradaudit.leakage.subspace import span
from gradaudit.registry import hyper, register
from gradaudit.types import Observation, Reconstruction

_CLOSED = 1e-3
"""A sentence whose attention signals its own tokens explain up to this is closed: right ones are at 1e-5."""


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
        200,
        "tokens a position that are decoded, nearest to the span first; at least as many as the rank",
        source="the worst right one ranked 51st at b = 85, 154th at b = 291 (MiniLM), 200th at b = 400 (MPNet)",
    )
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
        inputs = MaskedInputs(model, first)
        known = seen.knowledge
        found = find_rows(inputs, Search(known.batch_size, self.candidates, self.max_length, known.dropout or 0.1), rng)
        decoder = _Decoder(seen, inputs, found)
        notes = []
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
        length: its tokens; a set of nearly twice a head's width explains anything, so it proves nothing.
        head_width: width of an attention head.
    """
    if not complete:
        return "guess"
    return "proven" if unexplained < _CLOSED and length < 1.6 * head_width else "likely"


@dataclass
class _Decoder:
    """One run's state: the rows found."""

    seen: Observation
    inputs: MaskedInputs
    found: list[Row]

    def __post_init__(self) -> None:
        self.model = self.seen.model
        self.size = self.seen.knowledge.batch_size

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
        clean, kept = torch.stack([row.clean for row in self.found]), torch.stack([row.kept for row in self.found])
        inputs = self.inputs.inputs(clean, kept, rate)
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
            left = float(unexplained(toward_q, toward_k, q, k, index).max())
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
