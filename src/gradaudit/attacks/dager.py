"""DAGER: exact inversion from the low rank of attention gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from gradaudit.attacks.base import Attack
from gradaudit.errors import NotSupportedError
from gradaudit.leakage.prefixes import extension_residuals, prefix_residuals
from gradaudit.leakage.subspace import (
    Candidates,
    Span,
    VocabularyCheck,
    cut_by_gap,
    near_tokens,
    span,
)
from gradaudit.progress import step
from gradaudit.registry import hyper, register
from gradaudit.types import Observation, Reconstruction

_ROUNDING = 5e-6
"""Residuals of true rows in float32: measured at most 3.2e-6 over batches of up to 170 tokens."""
_UNRELATED = 0.05
"""No gap threshold above this: rows that only share words with the batch start near 0.1."""
_REPEATS = 16
"""Longest run of one token a rotary sentence may start with: see `_Search.decoder`."""


@register
@dataclass(frozen=True)
class Dager(Attack):
    """Keep the tokens whose block-0 input lies in the gradient's row space, then build sentences in block 1's.

    Decoders grow prefixes token by token; encoders try the products of the tokens accepted at each position,
    shortest sentence first. Exact while dropout is off and tokens stay below the width; encoder batches grow
    combinatorially. With a next-token loss the last token of a sentence has no gradient in any block (nothing attends
    to it and nothing is predicted from it), so each sentence comes back without it. With `rank`, `threshold` and
    `roles` at "paper", "paper" and ("q",) it is the published method.
    """

    name: ClassVar[str] = "dager"
    source: ClassVar[str] = (
        "DAGER (Petrov et al., NeurIPS 2024). Ours by default: Q, K and V stacked in float64, rank and thresholds by "
        "the widest gap; prefixes that end inside a longer sentence found through the last block's queries"
    )
    roles: tuple[str, ...] = hyper(
        ("q", "k", "v"), "gradients stacked a block", source="the paper reads the query's alone: ('q',)"
    )
    rank: Literal["gap", "paper"] = hyper(
        "gap", "rank by the widest gap of the spectrum, or the paper's tolerance capped at d - 20", source="ours"
    )
    threshold: Literal["gap", "paper"] = hyper(
        "gap", "accept below the widest gap of the residuals, or below the two tolerances", source="ours"
    )
    token_tolerance: float = hyper(1e-5, "block-0 tolerance of threshold 'paper'", source="DAGER, section 4")
    sentence_tolerance: float = hyper(1e-3, "block-1 tolerance of threshold 'paper'", source="DAGER, section 4")
    max_candidates: int = hyper(
        10_000_000,
        "encoder: most sentences tried a length; beyond it they are drawn at random",
        source="DAGER, section 5",
    )
    remove_used: bool = hyper(True, "encoder: a found sentence's tokens leave the sets", source="DAGER, section 4")
    max_length: int = hyper(512, "longest sentence looked for", unit="tokens", source="DAGER, long sequences")
    max_prefixes: int = hyper(4096, "decoder: most prefixes kept at once", source="ours: bounds memory")

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        first, second = self._span(seen, 0), self._span(seen, 1)
        if first is None or second is None:
            raise NotSupportedError(
                "attack 'dager' needs the query, key or value gradients of blocks 0 and 1, and one of them is not in "
                "this update or is all zero"
            )
        notes: list[str] = []
        if first.rank >= seen.model.width or second.rank >= seen.model.width:
            notes.append("not identifiable: the row space is full (as many tokens as the width, or noise)")
            return Reconstruction(sequences=(), notes=tuple(notes), details=_ranks(first, second))
        search = _Search(self, seen, first, second, notes)
        found = search.decoder() if seen.model.causal else search.encoder(rng)
        details = _ranks(first, second) | {"candidates": search.tried}
        return Reconstruction(sequences=tuple(found), notes=tuple(notes), details=details)

    def _span(self, seen: Observation, layer: int) -> Span | None:
        if layer >= seen.model.depth:
            return None
        return span(seen, layer, self.roles, fixed_rank=self.rank == "paper")

    def gradient_evaluations(self, batch_size: int, tokens: int) -> int:
        return 3  # the vocabulary check and a decoder's growth; an encoder's products are not foreseen


def _ranks(first: Span, second: Span) -> dict[str, Any]:
    return {"rank_block0": first.rank, "rank_block1": second.rank, "rank_confidence": round(first.confidence, 1)}


@dataclass
class _Search:
    """One run's state: what was accepted where, and how many candidates it took."""

    attack: Dager
    seen: Observation
    first: Span
    second: Span
    notes: list[str]
    tried: int = 0
    _near: dict[int, Candidates] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model = self.seen.model
        self.check = VocabularyCheck(self.model.first_input_parts(), self.first)
        self.size = self.seen.knowledge.batch_size
        special = self.model.special
        never = sorted(special.ids - {*special.prefix, *special.suffix})
        self.never = torch.tensor(never, dtype=torch.long, device=self.first.basis.device)
        self.longest = min(self.attack.max_length, self.model.max_length)

    # tokens

    def tokens(self, position: int) -> Tensor:
        """Return the ids accepted at a position, nearest first."""
        at = position if self.model.absolute_positions else 0
        if at not in self._near:
            self._near[at] = near_tokens(self.model, self.check, self.first, at, _UNRELATED)
        near = self._near[at]
        limit = self.attack.token_tolerance
        if self.attack.threshold == "gap":
            limit = cut_by_gap(near.residuals, _ROUNDING, _UNRELATED)
        ids = near.below(limit).ids
        return ids[~torch.isin(ids, self.never)]

    def accepted(self, residuals: Tensor) -> Tensor:
        """Return which block-1 residuals are inside."""
        if self.attack.threshold == "paper":
            return residuals < self.attack.sentence_tolerance
        return residuals < cut_by_gap(residuals.flatten(), _ROUNDING, _UNRELATED)

    # decoders

    def decoder(self) -> list[tuple[int, ...]]:
        """Grow prefixes until none can be extended; what cannot be extended is a sentence.

        Without absolute positions, "t t t" has the inputs of "t" in every block (it attends to copies of itself), so
        a run of the first token always fits. Such a run may only lead to something else: it is no sentence itself.
        """
        device = self.first.basis.device
        prefixes = torch.zeros((1, 0), dtype=torch.long, device=device)
        grown: list[tuple[int, ...]] = []
        for position in range(self.longest):
            candidates = self.tokens(position)
            if len(candidates) == 0:
                break
            residuals = extension_residuals(self.model, self.second, prefixes, candidates)
            self.tried += residuals.numel()
            fits = self.accepted(residuals)
            if position >= _REPEATS and not self.model.absolute_positions:
                runs = (prefixes == prefixes[:, :1]).all(1)
                fits &= ~(runs[:, None] & (candidates[None] == prefixes[:, :1]))
            for row in torch.where(~fits.any(1))[0].tolist():
                grown.append(tuple(prefixes[row].tolist()))
            parent, token = torch.where(fits)
            if len(parent) == 0:
                prefixes = prefixes[:0]
                break
            if len(parent) > self.attack.max_prefixes:
                keep = residuals[parent, token].argsort()[: self.attack.max_prefixes]
                parent, token = parent[keep], token[keep]
                self._note(f"more than {self.attack.max_prefixes} prefixes fit; the nearest were kept")
            prefixes = torch.cat([prefixes[parent], candidates[token][:, None]], 1)
            step(f"dager: {len(prefixes)} prefixes", position + 1)
        grown += [tuple(row) for row in prefixes.tolist()]
        sentences = [s for s in grown if s and not self._phantom(s)]
        sentences += [s[:1] for s in grown if self._phantom(s) and not any(t[:1] == s[:1] for t in sentences)]
        if self.size is None or len(sentences) < self.size:
            sentences += self._inner_ends(sentences)
        return sentences

    def _phantom(self, sentence: tuple[int, ...]) -> bool:
        return not self.model.absolute_positions and len(sentence) > 1 and len(set(sentence)) == 1

    def _inner_ends(self, sentences: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Return the prefixes of found sentences that are sentences themselves.

        They add no direction of their own to the first blocks. But a classifier's last block sends a query gradient
        at the last token of each sentence only, so a prefix whose end lies in that span was a sentence.
        """
        last = self.model.depth - 1
        if self.model.spec.task != "classification" or last < 2:
            return []
        ends = span(self.seen, last, ("q",), fixed_rank=self.attack.rank == "paper")
        if ends is None or ends.rank >= self.model.width:
            return []
        found: list[tuple[int, ...]] = []
        for sentence in sentences:
            residuals = prefix_residuals(self.model, ends, list(sentence))
            for length in torch.where(residuals[:-1] < _UNRELATED / 10)[0].tolist():
                prefix = sentence[: length + 1]
                if prefix not in found and prefix not in sentences:
                    found.append(prefix)
        return found

    # encoders

    def encoder(self, rng: torch.Generator) -> list[tuple[int, ...]]:
        """Try the products of the sets of each position, shortest sentence first."""
        sets = self._sets()
        special = self.model.special
        ending = special.suffix[-1:] or ()
        found: list[tuple[int, ...]] = []
        rest: list[tuple[float, tuple[int, ...]]] = []
        for length in self._lengths(sets, ending):
            if self.size is not None and len(found) >= self.size:
                break
            inner = [[t for t in row if t not in ending] or row for row in sets[: length - len(ending)]]
            columns = inner + [list(ending)] * bool(ending)
            for ids, residuals in self._products(columns, rng):
                for at in torch.where(self._sentence_fits(residuals))[0].tolist():
                    sentence = tuple(ids[at].tolist())
                    if sentence not in found:
                        found.append(sentence)
                best = int(residuals.argmin())
                rest.append((float(residuals[best]), tuple(ids[best].tolist())))
                if self.size is not None and len(found) >= self.size:
                    break
            if self.attack.remove_used:
                self._remove(sets, found)
        return self._filled(found, rest)

    def _sets(self) -> list[list[int]]:
        sets: list[list[int]] = []
        for position in range(self.longest):
            ids = self.tokens(position).tolist()
            if not ids:
                break
            if position == 0 and self.model.special.prefix:
                ids = [t for t in ids if t == self.model.special.prefix[0]] or ids
            sets.append(ids if self.size is None else self._nearest(ids))
            step("dager: tokens", position + 1)
        return sets

    def _nearest(self, ids: list[int]) -> list[int]:
        """The paper's cut: the nearest B a position, the end token never cut off."""
        assert self.size is not None
        kept = ids[: self.size]
        return kept + [t for t in ids[self.size :] if t in self.model.special.suffix]

    def _lengths(self, sets: list[list[int]], ending: tuple[int, ...]) -> list[int]:
        if self.seen.knowledge.lengths is not None:
            return sorted(set(self.seen.knowledge.lengths))
        if not ending:
            return list(range(1, len(sets) + 1))
        return [p + 1 for p, row in enumerate(sets) if ending[0] in row and p > 0]

    def _products(self, columns: list[list[int]], rng: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        device = self.first.basis.device
        total = math.prod(len(column) for column in columns)
        limit = self.attack.max_candidates
        chunk = max(16, 8192 // len(columns))
        drawn: Iterator[tuple[int, ...]]
        if total <= limit:
            drawn = itertools.product(*columns)
        else:
            self._note(f"{total:.1e} products at length {len(columns)}; {limit} of them were drawn at random")
            drawn = self._random_products(columns, limit, rng)
        for start in range(0, min(total, limit), chunk):
            ids = torch.tensor(list(itertools.islice(drawn, chunk)), device=device)
            if len(ids) == 0:
                return
            inputs = self.model.attention_inputs(1, ids)
            self.tried += len(ids)
            step(f"dager: length {len(columns)}", start + len(ids), min(total, limit))
            yield ids, self.second.residual(inputs).amax(1)

    @staticmethod
    def _random_products(columns: list[list[int]], count: int, rng: torch.Generator) -> Iterator[tuple[int, ...]]:
        for _ in range(0, count, 1024):
            picks = [torch.randint(len(column), (1024,), generator=rng).tolist() for column in columns]
            for pick in zip(*picks, strict=True):
                yield tuple(column[i] for column, i in zip(columns, pick, strict=True))

    def _sentence_fits(self, residuals: Tensor) -> Tensor:
        # one chunk may hold no true sentence or only one: a gap within it says nothing, so the cut is fixed
        limit = (
            self.attack.sentence_tolerance if self.attack.threshold == "paper" else math.sqrt(_ROUNDING * _UNRELATED)
        )
        return residuals < limit

    def _remove(self, sets: list[list[int]], found: list[tuple[int, ...]]) -> None:
        frame = (*self.model.special.prefix, *self.model.special.suffix)
        for sentence in found:
            for position, token in enumerate(sentence[: len(sets)]):
                if token not in frame and token in sets[position] and len(sets[position]) > 1:
                    sets[position].remove(token)

    def _filled(self, found: list[tuple[int, ...]], rest: list[tuple[float, tuple[int, ...]]]) -> list[tuple[int, ...]]:
        """Best effort: where fewer than B sentences fit, the nearest of the others take the empty places."""
        if self.size is None:
            return found
        for residual, sentence in sorted(rest):
            if len(found) >= self.size:
                break
            if sentence not in found:
                found.append(sentence)
                self._note(f"best effort: a sentence at residual {residual:.1e} fills an empty place")
        return found

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
