"""Exact decoding: batches back from their attention gradients, exactly and with proof, dropout on or off."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradaudit.attacks.base import Attack
from gradaudit.errors import NotSupportedError
from gradaudit.leakage.assembly import solve
from gradaudit.leakage.deflation import matrices
from gradaudit.leakage.explain import explain
from gradaudit.leakage.growth import Rules, grow
from gradaudit.leakage.linking import group, joint_support, signals, unexplained
from gradaudit.leakage.ranking import rank_words
from gradaudit.leakage.rows import MaskedInputs, Row, Search, find_rows
from gradaudit.leakage.subspace import Span, span, stack
from gradaudit.registry import hyper, register
from gradaudit.types import Observation, Reconstruction

_CLOSED = 1e-3
"""A sentence whose attention signals its own tokens explain up to this is closed: right ones are at 1e-5."""
_EXPLAINED = 1e-4
"""A batch that leaves this share of the gradient is all of it: right ones are at 1e-6."""
_OFF = 1e-3
"""A first row this near the span without a mask was not masked: dropout leaves at least a tenth of it outside."""
_FULL = "not identifiable: the row space is full (as many tokens as the width, or noise)"


@register
@dataclass(frozen=True)
class Decode(Attack):
    """Read a batch back from the row spaces of its attention gradients, and prove each sentence without the truth.

    With dropout on, every row of block 0 is a code word with erasures: linear programs decode tokens, masks and copies,
    and the attention gradients say which tokens belong together (BERT, RoBERTa, MPNet, GPT-2). With dropout off, an
    encoder's words are placed by the sparsest signals that explain block 0's gradient, linked, mended in the span of
    block 1, and taken out of the gradient one sentence after the other; a decoder's prefixes grow as in DAGER. Labels,
    lengths and the dropout rate need not be known.
    """

    name: ClassVar[str] = "decode"
    source: ClassVar[str] = "ours: docs/exact-decoding.md; decoding by linear programs after Candes and Tao (2005)"
    tasks: ClassVar[tuple[str, ...]] = ("classification", "causal-lm")
    models_dropout: ClassVar[bool] = True
    candidates: int = hyper(
        200,
        "dropout on: tokens a position that are decoded, nearest to the span first; at least as many as the rank",
        source="the worst right one ranked 51st at b = 85, 154th at b = 291 (MiniLM), 200th at b = 400 (MPNet)",
    )
    blocks: int = hyper(3, "dropout off, encoders: blocks read; those after the first check and prove")
    starts: int = hyper(24, "dropout off, encoders: proposals mended a round")
    most_words: int = hyper(32, "noise and compression: words taken at most, times the batch size")
    least_score: float = hyper(
        9.0,
        "noise and compression: a word's evidence, in standard deviations of the vocabulary's scores",
        source="words of the batch score 15 to 70, the first of the others 4 to 8 (MiniLM, five defenses)",
    )
    max_length: int = hyper(512, "longest sentence looked for", unit="tokens")

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        first = span(seen, 0)
        if first is None:
            raise NotSupportedError(
                "attack 'decode' needs query, key or value gradients of block 0, and none of them is in this update"
            )
        if first.rank >= 0.95 * seen.model.width:
            return self._ranked(seen, first)
        rate = seen.knowledge.dropout
        if rate is None and self._unmasked(seen, first):
            rate = 0.0
        if rate != 0.0:
            return self._masked(seen, first, rng)
        if seen.kind == "gradient" and not self._unmasked(seen, first):
            return self._ranked(seen, first)  # few coordinates were sent: not full, and not the batch's span either
        if seen.model.causal:
            return self._grown(seen, first)
        return self._placed(seen, first)

    def gradient_evaluations(self, batch_size: int, tokens: int) -> int:
        return 20 + tokens // 4

    def _unmasked(self, seen: Observation, first: Span) -> bool:
        """Say whether dropout was off, from block 0 alone: some first token lies in the span as it is."""
        prefix = seen.model.special.prefix[:1]
        ids = torch.tensor(prefix, device=first.basis.device) if prefix else None
        return float(first.residual(seen.model.first_inputs(0, ids)).min()) < _OFF

    # noise and compression

    def _ranked(self, seen: Observation, first: Span) -> Reconstruction:
        """Return the words that stand out of a full row space, in the order of their evidence: a bag, not sentences."""
        stacked, _ = stack(seen, 0)
        assert stacked is not None
        size = seen.knowledge.batch_size or 1
        words = rank_words(seen.model, stacked, min(self.most_words * size, seen.model.width - 1), self.least_score)
        details = _ranks(first) | {"words": len(words)}
        if not words:
            return Reconstruction(sequences=(), notes=(_FULL,), details=details)
        note = f"{_FULL}; {len(words)} words stand out of it, in the order of their evidence, without order or sentence"
        special = seen.model.special
        bags = [tuple(w.token for w in words[start::size]) for start in range(size)]
        bags = [(*special.prefix, *bag, *special.suffix)[: seen.model.max_length] for bag in bags if bag]
        return Reconstruction(tuple(bags), None, ("guess",) * len(bags), (note,), details)

    # dropout on

    def _masked(self, seen: Observation, first: Span, rng: torch.Generator) -> Reconstruction:
        model, known = seen.model, seen.knowledge
        if not model.absolute_positions:
            raise NotSupportedError(
                "attack 'decode' decodes dropout at the first normalization (BERT, RoBERTa, MPNet, GPT-2); this model "
                "has none there: set dropout = false, or use 'dager'"
            )
        queries, keys = seen.role(0, "q"), seen.role(0, "k")
        inputs = MaskedInputs(model, first)
        found = find_rows(inputs, Search(known.batch_size, self.candidates, self.max_length, known.dropout or 0.1), rng)
        details, notes = _ranks(first) | {"rows": len(found)}, []
        if len(found) < first.rank:
            notes.append(f"{first.rank - len(found)} of {first.rank} rows were not decoded")
        if not found:
            return Reconstruction(sequences=(), notes=tuple(notes), details=details)
        linked = _Linked(seen, inputs, found)
        details["estimated_dropout"] = round(linked.rate(), 3)
        if not queries or not keys:
            notes.append("the query or key gradients of block 0 were not seen: tokens are placed, and cannot be linked")
            sequences, certificates = linked.by_position()
        else:
            sequences, certificates = linked.sentences(queries[0].double(), keys[0].double())
        return Reconstruction(tuple(sequences), certificates=tuple(certificates), notes=tuple(notes), details=details)

    # dropout off

    def _placed(self, seen: Observation, first: Span) -> Reconstruction:
        if seen.kind != "gradient":
            raise NotSupportedError(
                "attack 'decode' takes one gradient with dropout off, and this update is a weight change; use 'dager'"
            )
        left = matrices(seen, self.blocks)
        eps = torch.finfo(next(iter(seen.tensors.values())).dtype).eps
        size = seen.knowledge.batch_size
        solved, guesses, rest = solve(seen.model, left, eps, size, self.max_length, starts=self.starts)
        notes = []
        if not any(layer > 0 for layer, _ in left):
            notes.append("only block 0 was seen: sentences are put together from it and not checked in a deeper block")
        elif guesses or (size is not None and len(solved) < size):
            notes.append(f"{len(solved)} sentences fit; what is left of the gradient has rank {rest.span(0).rank}")
        certificates = ["proven" if s.proven else "likely" for s in solved] + ["guess"] * len(guesses)
        labels = tuple(s.label for s in solved) if not guesses else None
        sequences = (*(s.tokens for s in solved), *guesses)
        return Reconstruction(sequences, labels, tuple(certificates), tuple(notes), _ranks(first))

    def _grown(self, seen: Observation, first: Span) -> Reconstruction:
        second = span(seen, 1) if seen.model.depth > 1 else None
        if second is None:
            raise NotSupportedError(
                "attack 'decode' needs query, key or value gradients of blocks 0 and 1 of a decoder"
            )
        if second.rank >= seen.model.width:
            return Reconstruction(sequences=(), notes=(_FULL,), details=_ranks(first))
        grown = grow(seen, first, second, Rules(longest=self.max_length))
        size = seen.knowledge.batch_size or len(grown.sentences)
        notes, details = grown.notes, _ranks(first)
        labels, certificates = None, ("likely",) * len(grown.sentences)
        one_gradient = seen.kind == "gradient" and seen.model.spec.task == "classification"
        if one_gradient and grown.sentences and len(grown.sentences) == size:
            found, left = explain(seen.model, grown.sentences, matrices(seen, 2), 1 / size)
            details["unexplained"] = left
            if left < _EXPLAINED:
                labels, certificates = found, ("proven",) * len(found)
        return Reconstruction(tuple(grown.sentences), labels, certificates, tuple(notes), details)


def _ranks(first: Span) -> dict[str, Any]:
    return {"rank": first.rank, "rank_confidence": round(first.confidence, 1), "roles": " ".join(first.roles)}


def certificate(complete: bool, unexplained: float, length: int, head_width: int) -> str:
    """Return how sure a linked sentence is: "proven", "likely" or "guess".

    Args:
        complete: it runs from the first special token to the last without a hole.
        unexplained: share of its attention signals that its own tokens leave unexplained.
        length: its tokens; in a set of more than eight times a head's width one stranger could go unseen.
        head_width: width of an attention head.
    """
    if not complete:
        return "guess"
    return "proven" if unexplained < _CLOSED and length <= 8 * head_width else "likely"


@dataclass
class _Linked:
    """Decoded rows on their way to sentences."""

    seen: Observation
    inputs: MaskedInputs
    found: list[Row]

    def __post_init__(self) -> None:
        self.model = self.seen.model
        self.size = self.seen.knowledge.batch_size

    def rate(self) -> float:
        """Return the dropout rate that the masks show."""
        return 1.0 - float(torch.stack([row.kept for row in self.found]).double().mean())

    def attention(self, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the signals at queries and keys, and the queries and keys, each [b, H, h].

        Args:
            queries: [out, d] gradient of block 0's query matrix.
            keys: the same of its key matrix.
        """
        known = self.seen.knowledge.dropout
        rate = known if known is not None else self.rate()
        clean, kept = torch.stack([row.clean for row in self.found]), torch.stack([row.kept for row in self.found])
        inputs = self.inputs.inputs(clean, kept, rate)
        q, k = self.model.project(0, "q", inputs), self.model.project(0, "k", inputs)
        toward_q, toward_k = (signals(g, inputs).view_as(q) for g in (queries, keys))
        return toward_q, toward_k, q, k

    def sentences(self, queries: Tensor, keys: Tensor) -> tuple[list[tuple[int, ...]], list[str]]:
        """Return the sentences and how sure each is (arguments as of `attention`)."""
        groups, certificates = self.grouped(*self.attention(queries, keys))
        sentences = [tuple(self._framed([self.found[i].token for i in members])) for members in groups]
        return sentences, certificates

    def grouped(self, toward_q: Tensor, toward_k: Tensor, q: Tensor, k: Tensor) -> tuple[list[list[int]], list[str]]:
        """Link the rows: return each sentence's rows in order, and how sure it is (arguments from `attention`)."""
        positions = [row.position for row in self.found]
        place = torch.tensor(positions, device=q.device)
        by_query, by_key = joint_support(toward_q, k, place), joint_support(toward_k, q, place)
        affinity = by_query + by_query.T + by_key + by_key.T
        size = self.size or max(positions.count(p) for p in set(positions))
        groups, certificates = group(affinity, positions, size), []
        for members in groups:
            ids = [self.found[i].token for i in members]
            index = torch.tensor(members, device=q.device)
            left = float(unexplained(toward_q, toward_k, q, k, index).max())
            complete = self._complete(ids, [positions[i] for i in members])
            certificates.append(certificate(complete, left, len(members), q.shape[2]))
        return groups, certificates

    def by_position(self) -> tuple[list[tuple[int, ...]], list[str]]:
        """Return a lone sentence in order; rows of several are laid out a position a turn, and are guesses."""
        size = self.size or max(Counter(row.position for row in self.found).values())
        places: dict[int, list[int]] = {}
        for row in self.found:
            places.setdefault(row.position, []).append(row.token)
        rows = [[places[p][s] for p in sorted(places) if s < len(places[p])] for s in range(size)]
        whole = size == 1 and len(self.found) == self.inputs.span.rank
        sure = "likely" if whole and self._complete(rows[0], sorted(places)) else "guess"
        return [tuple(self._framed(ids)) for ids in rows], [sure] * size

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
