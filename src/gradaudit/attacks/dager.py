"""DAGER: exact inversion from the low rank of attention gradients."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from gradaudit.attacks.base import Attack
from gradaudit.defense_traits import Trait
from gradaudit.errors import NotSupportedError
from gradaudit.leakage.rowspace.embedding_rows import words_of
from gradaudit.leakage.rowspace.growth import ROUNDING, UNRELATED, AcceptedTokens, GrowthRules, grow
from gradaudit.leakage.rowspace.joint import Joint, joint
from gradaudit.leakage.rowspace.noisy_growth import grow_under_noise
from gradaudit.leakage.rowspace.past_width import Crowd, is_full
from gradaudit.leakage.rowspace.products import Products
from gradaudit.leakage.rowspace.sentence_ends import ends_of
from gradaudit.leakage.rowspace.subspace import Span, published_rank, span
from gradaudit.models.base import Model, TextModel
from gradaudit.progress import answering, step
from gradaudit.registry import hyper, register
from gradaudit.types import Observation, Reconstruction

_NO_STEP = (
    "not identifiable: the adapters' B is still zero (no step was made with them), so their A has no gradient; "
    "an update after the first step carries signal"
)
_TOGETHER, _ROWS = 4096, 8192
"""An encoder's sentences judged together by their first rows, and rows that go through a block together."""
_NOISY = "the update is noisy or rounded: what stands above its noise was read, by the nearest fit"


@register
@dataclass(frozen=True)
class Dager(Attack):
    """Keep the tokens whose block-0 input lies in the gradient's row space, then build sentences in block 1's.

    Decoders grow prefixes token by token; encoders try the products of the tokens accepted at each position,
    shortest sentence first. Exact while dropout is off and tokens stay below the width; encoder batches grow
    combinatorially. With a next-token loss the last token of a sentence has no gradient in any block (nothing attends
    to it and nothing is predicted from it), so each sentence comes back without it. With `rank`, `threshold`,
    `roles`, `remove_used` and `embedding_rows` at "paper", "paper", ("q",), "always" and False it is the published
    method.
    """

    name: ClassVar[str] = "dager"
    handles: ClassVar[frozenset[Trait]] = frozenset({"scaled", "zero mean"})
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
    remove_used: Literal["spare", "always", "never"] = hyper(
        "spare",
        "encoder: whether found sentences' tokens leave a set: where the others are enough for the sentences left, so "
        "that one that two sentences share stays (unless wrong tokens fill the set); always; or never",
        source="ours; DAGER, section 4, has 'always'",
    )
    max_length: int = hyper(512, "longest sentence looked for", unit="tokens", source="DAGER, long sequences")
    max_prefixes: int = hyper(4096, "decoder: most prefixes kept at once", source="ours: bounds memory")
    max_beam: int = hyper(
        256, "decoder past the width: widest beam of prefixes; time grows with it", source="ours; benchmarks/dager.py"
    )

    embedding_rows: bool = hyper(
        True,
        "take words only from the non-zero rows of the word embedding's gradient, where it is shared and not tied to "
        "an output layer",
        source="ours: the paper reads attention gradients alone",
    )

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        first, second = self._span(seen, 0), self._span(seen, 1)
        if (first is None or second is None) and seen.model.spec.lora is not None and self._silent(seen):
            return Reconstruction(sequences=(), notes=(_NO_STEP,))
        if first is None or second is None:
            raise NotSupportedError(
                "attack 'dager' needs the query, key or value gradients of blocks 0 and 1, and one of them is not in "
                "this update or is all zero"
            )
        notes: list[str] = []
        noisy = first.lost is not None or second.lost is not None
        if noisy and seen.model.causal and self.rank == self.threshold == "gap":
            return self._under_noise(seen, joint(seen, self.roles))
        if seen.model.causal and not noisy and self.rank != "paper" and is_full(seen.model, second):
            return self._crowded(seen, first, second)
        if any(s.rank == len(s.values) < seen.model.width for s in (first, second)):
            notes.append(
                "not identifiable: as many tokens as the gradients of q, k and v (or of their adapters) have rows"
            )
        elif first.rank >= seen.model.width or second.rank >= seen.model.width:
            notes.append("not identifiable: the row space is full (as many tokens as the width, or noise)")
        elif first.rank == 0 or second.rank == 0:
            notes.append("not identifiable: nothing stands above the noise")
        if notes:
            return Reconstruction(sequences=(), notes=tuple(notes), details=_ranks(first, second))
        if noisy:
            notes.append(_NOISY)
        if seen.model.causal:
            grown = grow(seen, first, second, self._rules(seen))
            found = grown.sentences if noisy or self.rank == "paper" else self._counted(seen, grown.sentences)
            tried = grown.tried
            notes += grown.notes
        else:
            search = _Products(self, seen, first, second, notes)
            with answering(lambda _: _so_far(search.found, _ranks(first, second))):
                found, tried = search.sentences(rng), search.tried
        details = _ranks(first, second) | {"candidates": tried}
        return Reconstruction(sequences=tuple(found), notes=tuple(notes), details=details)

    def _silent(self, seen: Observation) -> bool:
        """Say whether adapters' gradients were shared and are all zero."""
        found = [g for layer in (0, 1) if layer < seen.model.depth for r in self.roles for g in seen.role(layer, r)]
        return bool(found) and not any(bool(g.any()) for g in found)

    def _counted(self, seen: Observation, sentences: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Return the sentences with those that occur again as often as they do, where the last block tells."""
        missing = (seen.knowledge.batch_size or 0) - len(sentences)
        ends = ends_of(seen) if sentences and missing > 0 else None
        if ends is None:
            return sentences
        again = [sentence for sentence in sentences for _ in ends.labels(sentence)[1:]]
        return sentences + again[:missing]

    def _crowded(self, seen: Observation, first: Span, second: Span) -> Reconstruction:
        """Return what can be read where block 1's row space holds everything: past the width, or under much noise."""
        model = seen.model
        readable = model.depth > 2 and ends_of(seen) is not None
        if not readable:
            note = "not identifiable: the row space is full (as many tokens as the width, or noise)"
            return Reconstruction(sequences=(), notes=(note,), details=_ranks(first, second))
        crowd = Crowd(seen, self._rules(seen), most=self.max_beam)
        with answering(lambda _: _so_far(crowd.found, _ranks(first, second))):
            found = crowd.sentences()
        told = f"past the width: {len(crowd.found)} sentences were taken out of the gradient one after the other"
        details = _ranks(first, second) | {"candidates": crowd.tried, "taken_out": len(crowd.found)}
        return Reconstruction(sequences=tuple(found), notes=(told, *crowd.notes), details=details)

    def _under_noise(self, seen: Observation, read: Joint) -> Reconstruction:
        """Return what a decoder's noisy update tells."""
        if not read.spans:
            note = "not identifiable: nothing stands above the noise, or as many tokens as the width"
            return Reconstruction(sequences=(), notes=(note,))
        grown = grow_under_noise(seen, read, self._rules(seen))
        ranks = {f"rank_block{s.layer}_{''.join(s.roles)}": s.rank for s in read.spans}
        details = ranks | {"candidates": grown.tried}
        note = _NOISY if grown.sentences else "not identifiable: no text lies in what stands above the noise"
        return Reconstruction(sequences=tuple(grown.sentences), notes=(note, *grown.notes), details=details)

    def _rules(self, seen: Observation) -> GrowthRules:
        paper = self.threshold == "paper"
        return GrowthRules(
            token=self.token_tolerance if paper else None,
            row=self.sentence_tolerance if paper else None,
            longest=self.max_length,
            most=self.max_prefixes,
            published=self.rank == "paper",
            words=words_of(seen) if self.embedding_rows else None,
        )

    def _span(self, seen: Observation, layer: int) -> Span | None:
        if layer >= seen.model.depth:
            return None
        if self.rank == "gap":
            return span(seen, layer, self.roles, noise=True)
        roles = _whole(seen.model, self.roles)
        return span(seen, layer, roles, fixed_rank=published_rank(seen, roles))

    def handled(self, model: Model | None) -> frozenset[Trait]:
        # noise is told from what a batch spans where prefixes grow; products of an encoder's sets are not
        grows = not isinstance(model, TextModel) or model.causal
        return self.handles if grows else self.handles - {"zero mean"}

    def gradient_evaluations(self, batch_size: int, tokens: int) -> int:
        return 3  # the vocabulary check and a decoder's growth; an encoder's products are not foreseen


def _whole(model: TextModel, roles: tuple[str, ...]) -> tuple[str, ...]:
    """Return the roles that lie in the parameters of some: GPT-2 keeps q, k and v in one, which is read whole."""
    held = {view.parameter for role in roles for view in model.views(0, role)}
    return tuple(role for role in "qkv" if held & {view.parameter for view in model.views(0, role)})


def _so_far(found: list[tuple[int, ...]], details: dict[str, Any]) -> Reconstruction | None:
    """Return what a search that was stopped had found; None for nothing."""
    return Reconstruction(sequences=tuple(found), details=details) if found else None


def _ranks(first: Span, second: Span) -> dict[str, Any]:
    return {"rank_block0": first.rank, "rank_block1": second.rank, "rank_confidence": round(first.confidence, 1)}


@dataclass
class _Products:
    """An encoder's search: products of the tokens accepted at each position, and how many it took."""

    attack: Dager
    seen: Observation
    first: Span
    second: Span
    notes: list[str]
    tried: int = 0
    found: list[tuple[int, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = self.seen.model
        rules = self.attack._rules(self.seen)
        self.accepted = AcceptedTokens(self.model, self.first, rules.token, rules.words)
        self.size = self.seen.knowledge.batch_size
        self.longest = min(self.attack.max_length, self.model.max_length)

    def sentences(self, rng: torch.Generator) -> list[tuple[int, ...]]:
        """Try the products of the sets of each position, shortest sentence first."""
        sets = self._sets()
        special = self.model.special
        ending = special.suffix[-1:] or ()
        found = self.found
        rest: list[tuple[float, tuple[int, ...]]] = []
        for length in self._lengths(sets, ending):
            if self.size is not None and len(found) >= self.size:
                break
            left = [self._unused(row, position, found) for position, row in enumerate(sets[: length - len(ending)])]
            inner = [[t for t in row if t not in ending] or row for row in left]
            columns = inner + [list(ending)] * bool(ending)
            for ids, residuals in self._tried(columns, rng):
                for at in torch.where(residuals < self._limit)[0].tolist():
                    sentence = tuple(ids[at].tolist())
                    if sentence not in found:
                        found.append(sentence)
                best = int(residuals.argmin())
                rest.append((float(residuals[best]), tuple(ids[best].tolist())))
                if self.size is not None and len(found) >= self.size:
                    break
        return self._filled(found, rest)

    def _sets(self) -> list[list[int]]:
        sets: list[list[int]] = []
        for position in range(self.longest):
            ids = self.accepted.at(position).tolist()
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

    def _tried(self, columns: list[list[int]], rng: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield sentences that may be true with their residuals, or the one of a chunk that is nearest to it.

        A sentence is true where all of its rows fit. The first row, which costs a fraction, sorts out short ones that
        are wrong; in long ones it says little of words far behind, and many come to the whole pass.
        """
        products, limit = Products(self.model, columns), self.attack.max_candidates
        all_of_them = products.count <= limit
        if not all_of_them:
            size = sum(math.log10(len(column)) for column in columns)
            self._note(f"10^{size:.1f} products at length {len(columns)}; {limit} of them were drawn at random")
        for start in range(0, min(products.count, limit), _TOGETHER):
            count = min(_TOGETHER, min(products.count, limit) - start)
            picks = products.picks(start, count) if all_of_them else products.drawn(count, rng)
            self.tried += count
            step(f"dager: length {len(columns)}", start + count, min(products.count, limit))
            first = self.second.residual(products.first_rows(picks))
            near = torch.where(first < self._limit)[0] if bool((first < self._limit).any()) else first.argmin()[None]
            for some in torch.split(near, max(16, _ROWS // len(columns))):
                ids = products.ids(picks[some])
                yield ids, self.second.residual(self.model.attention_inputs(1, ids)).amax(1)

    @property
    def _limit(self) -> float:
        # one chunk may hold no true sentence or only one: a gap within it says nothing, so the cut is fixed
        return self.attack.sentence_tolerance if self.attack.threshold == "paper" else math.sqrt(ROUNDING * UNRELATED)

    def _unused(self, row: list[int], position: int, found: list[tuple[int, ...]]) -> list[int]:
        """Return the tokens of a set without those of the sentences that were found, where that is asked for."""
        how, frame = self.attack.remove_used, (*self.model.special.prefix, *self.model.special.suffix)
        if how == "never":
            return row
        used = {s[position] for s in found if position < len(s)} - {*frame}
        rest = [token for token in row if token not in used]
        if how == "always" or self.size is None:
            return rest or row[-1:]
        # the shortest are found first, so every sentence that is left reaches the positions of those found
        enough = max(1, self.size - len(found))
        return rest if len([t for t in rest if t not in frame]) >= enough else row

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
