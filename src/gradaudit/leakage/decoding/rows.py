"""Every row of block 0 from its row space: which token at which position, how often, and what dropout kept of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradaudit.leakage.decoding.dropout_masks import HALF, coordinates_to_forbid, refine_masks, relaxed_masks
from gradaudit.leakage.rowspace.subspace import Span
from gradaudit.leakage.rowspace.vocabulary import VocabularyCheck
from gradaudit.models.base import TextModel
from gradaudit.progress import step

INSIDE = 2e-5
"""A masked row this near the span lies in it: right rows are at 1e-7, the nearest wrong ones measured at 5e-2."""
EXPECTED_OFF, _FARTHEST = 2.0, 0.12
"""In a span that is not known exactly, true rows lie within so many times their expected distance (MiniLM, AdamW: 0.8
to 1.9 where the fit is good, wrong ones from 2.3, mostly from 3.5), and never so far that many a wrong one could."""
LEAST_KEPT = 0.5
"""No dropout rate in use drops more; the empty mask lies in every span."""
_CHANCE, _DEVIATIONS = 0.1, 4.0
"""Where the rate is known: share of coordinates so small that their bits are read by chance (MiniLM, 215 directions of
384: true rows kept 0.83 or more, wrong ones 0.53 to 0.72), and standard deviations of what dropout keeps."""
_TRIES, _FIRST_TRIES = 8, 48
"""Programs a round that look for one more copy of a token, and of the first token, which every sentence has."""
_SAME, _SAME_OFF = 100, 12
"""Masks of one token that differ in at most one coordinate of so many are one: copies differ in one of six. In a span
not known exactly bits of small coordinates are chance, so that only the larger half counts."""
_NEAREST, _RESTARTS, _ROUNDS = 16, 8, 20
"""A token that was missed ranks among the nearest by then, and random objectives, each well settled, reach it."""
_COPY_STEPS = 180
EMPTY = 3
"""So many positions without a row end the scan."""


@dataclass(frozen=True)
class Row:
    """One decoded row.

    Args:
        token: its id.
        position: 0-based.
        kept: [d] bool, what dropout kept of it.
        clean: [d] the row without dropout, as the mask acts on it.
    """

    token: int
    position: int
    kept: Tensor
    clean: Tensor


def least_kept(rate: float | None, width: int) -> float:
    """Return the smallest share of a row that a mask leaves.

    Args:
        rate: of dropout; None where it is not known.
        width: coordinates of a row.
    """
    if rate is None:
        return LEAST_KEPT
    return max(LEAST_KEPT, 1 - rate - _CHANCE - _DEVIATIONS * math.sqrt(rate * (1 - rate) / width))


class MaskedInputs:
    """What dropout masks on the way into block 0, and the span in which the masked rows lie.

    After the embedding LayerNorm (BERT, RoBERTa, MPNet) the mask acts on the input x itself. Before it (GPT-2) it acts
    on the sum e of word and position, and x = g * (s (m * e) + h) + b with a scale s and a shift h of the token's own:
    g * e takes the place of x, and the shift's direction g and the bias b join the span, two unknowns that enter
    linearly. A token that passes is then measured again with the scale and shift that its mask implies.

    Args:
        model: the model.
        first: block 0's span.
        near: a masked row this near the span lies in it.
        rounded: type to which rows are rounded as they enter; None for their own.
        weights: type of the model's weights, to which every step on the way in is rounded; None for float32.
        off: in a span that is not known exactly, a row lies in it within so many times its expected distance.
        least: smallest share of a row that a mask leaves.
        words: ids [n] of all tokens that there may be; None for the whole vocabulary.
    """

    def __init__(
        self,
        model: TextModel,
        first: Span,
        near: float = INSIDE,
        rounded: torch.dtype | None = None,
        weights: torch.dtype | None = None,
        off: float = EXPECTED_OFF,
        least: float = LEAST_KEPT,
        words: Tensor | None = None,
    ) -> None:
        self.least, self.words = least, words
        self.model, self.span, self.limit, self._off = model, first, near, off
        self._rounded, self._weights = rounded if weights is None else weights, weights
        parts = self._parts = model.first_input_parts()
        self._check = VocabularyCheck(parts, first)
        self._near: dict[int, Tensor] = {}
        basis = first.basis
        # what is added to a masked row on its way in, in unknown sizes
        self.shifts = self._scaled(torch.stack([parts.weight, parts.bias]).to(basis))[: 2 * model.dropout_before_norm]
        if model.dropout_before_norm:
            whole, triangle = torch.linalg.qr(torch.cat([basis, self.shifts.T], 1))
            basis = whole[:, triangle.diagonal().abs() > 1e-6]  # a bias of zeros adds no direction
        self.basis = basis
        self.outside = torch.eye(len(basis), dtype=torch.double, device=basis.device) - basis @ basis.T

    def _scaled(self, rows: Tensor) -> Tensor:
        return rows if self.span.scale is None else rows * self.span.scale

    def relaxed(self, clean: Tensor, **objective: Any) -> Tensor:
        """Return what the linear program keeps of each row, [n, d] in 0 to 1; see `relaxed_masks`."""
        return relaxed_masks(self.basis, self._scaled(clean), least=self.least, **objective)

    def forbid(self, clean: Tensor, known: Tensor, tries: int, rng: torch.Generator) -> Tensor:
        """Return [tries, d] bool, coordinates at which a further copy of a row [d] may be zero."""
        return coordinates_to_forbid(self._scaled(clean), known, tries, rng)

    def near(self, position: int, count: int) -> Tensor:
        """Return the ids of the tokens nearest to the span at a position, [count]; kept for further scans."""
        if position not in self._near:
            far = self._check.rough(position)
            if self.words is None:
                self._near[position] = far.topk(count, largest=False).indices
            else:
                among = self.words.to(far.device)
                self._near[position] = among[far[among].topk(min(count, len(among)), largest=False).indices]
        return self._near[position]

    @torch.no_grad()
    def clean(self, position: int, ids: Tensor) -> Tensor:
        """Return the rows that dropout masks, [n, d] float64."""
        parts, kind = self._parts, self._weights
        if not self.model.dropout_before_norm:
            exact = self.model.first_inputs(position, ids) if kind is None else parts.low(position, ids, kind)
            return exact.double()
        words, place = parts.words[ids], parts.positions[position]
        plain = words + place if kind is None else (words.to(kind) + place.to(kind)).float()
        return (parts.weight * plain).double()

    @torch.no_grad()
    def roughly(self, position: int, some: Tensor, rate: float) -> tuple[Tensor, Tensor]:
        """Return some coordinates [n] of every token's row as it enters, each kept and each dropped, [V, n].

        In float32, to sort out: `inputs` and `slope` measure, and round as the model does.
        """
        parts = self._parts
        unit, inverse = self._check.normed(position, some)
        kept = parts.weight[some] * unit + parts.bias[some]
        if not self.model.dropout_before_norm:
            return kept / (1 - rate), torch.zeros_like(kept)
        place = parts.positions[position]
        return kept, kept - parts.weight[some] * (parts.words.index_select(1, some) + place[some]) * inverse[:, None]

    def differ(self, clean: Tensor, one: Tensor, other: Tensor) -> bool:
        """Say whether two masks [d] of one token are two copies."""
        if self.span.lost is None:
            return int((one != other).sum()) > len(one) // _SAME
        size = self._scaled(clean).abs()
        large = size >= size.median()
        return int(((one != other) & large).sum()) > int(large.sum()) // _SAME_OFF

    @torch.no_grad()
    def inputs(self, clean: Tensor, kept: Tensor, rate: float) -> Tensor:
        """Return what enters q, k, v: the masked rows at their scale, [n, d] float64.

        Args:
            clean: [n, d] from `clean`.
            kept: [n, d] bool.
            rate: dropout rate.
        """
        return self._entering(self._normed(torch.where(kept, clean, torch.zeros_like(clean)) * self._raised(rate)))

    def _raised(self, rate: float) -> float:
        """Return what dropout multiplies by what it keeps: rounded to the weights' type, as torch does on a CPU."""
        # off by 3e-8, one coordinate in twenty thousand would come to another float16
        return float(torch.ones((), dtype=self._weights or torch.float32).div_(1 - rate))

    def _entering(self, rows: Tensor) -> Tensor:
        return rows if self._rounded is None else rows.float().to(self._rounded).double()

    def _normed(self, masked: Tensor) -> Tensor:
        if not self.model.dropout_before_norm:
            return masked
        parts = self._parts
        weight = parts.weight.double()
        plain = masked / weight
        centered = plain - plain.mean(1, keepdim=True)
        unit = centered * (centered.square().mean(1, keepdim=True) + parts.eps).rsqrt()
        return weight * unit + parts.bias.double()

    @torch.no_grad()
    def slope(self, clean: Tensor, kept: Tensor, rate: float) -> Tensor:
        """Return what a kept coordinate brings to the rows as they enter, beside a dropped one, [n, d] float64.

        Before a LayerNorm at the scale that the mask implies: one bit hardly changes it.

        Args:
            clean: [n, d] from `clean`.
            kept: [n, d] bool.
            rate: dropout rate.
        """
        if not self.model.dropout_before_norm:
            return self._entering(clean * self._raised(rate))
        masked = torch.where(kept, clean, torch.zeros_like(clean)) / (1 - rate) / self._parts.weight.double()
        spread = masked.square().mean(1, keepdim=True) - masked.mean(1, keepdim=True).square()
        return clean / (1 - rate) * (spread + self._parts.eps).rsqrt()

    def accepted(self, clean: Tensor, start: Tensor, rate: float) -> tuple[Tensor, Tensor]:
        """Return the finished masks, and which of them are rows of the batch: none of which little is kept to begin."""
        every, found = start.clone(), torch.zeros(len(start), dtype=torch.bool, device=start.device)
        likely = torch.where(start.double().mean(1) > self.least)[0]
        clean = clean[likely]
        kept, outside = refine_masks(self.outside, self._scaled(clean), start[likely])
        expected = self.span.expected(torch.where(kept, clean, torch.zeros_like(clean)))
        limit = (self._off * expected).clamp(self.limit, max(self.limit, _FARTHEST))
        inside = (outside < limit) & (kept.double().mean(1) > self.least)
        if self.model.dropout_before_norm and bool(inside.any()):
            at = torch.where(inside)[0]
            inside[at] = self.span.residual(self.inputs(clean[at], kept[at], rate)) < 10 * limit[at]
        every[likely], found[likely] = kept, inside
        return every, found


@dataclass(frozen=True)
class Search:
    """How far to look for rows.

    Args:
        size: sentences in the batch: the most copies a token may have at one position; None when not known.
        candidates: tokens a position that are decoded, nearest to the span first.
        max_length: positions looked at.
        rate: dropout rate, where it is known (only its scale matters, and only before a LayerNorm); 0 where none was
            masked.
        least: smallest share of a row that a mask leaves; see `least_kept`.
    """

    size: int | None
    candidates: int
    max_length: int
    rate: float = 0.1
    least: float = LEAST_KEPT


def find_rows(
    inputs: MaskedInputs, how: Search, rng: torch.Generator, start: Sequence[Row] = (), worth: float = 0.0
) -> list[Row]:
    """Return the rows of the batch that a scan of all positions and programs for further copies find.

    At most as many as the span has dimensions. Where some are missing, `look_harder` goes on; cheaper is to put
    together what was found, and to look for the rest in what certified sentences leave (`missing_rows`).

    Args:
        inputs: the masked inputs of a model and a span.
        how: how far to look.
        rng: for further tries.
        start: rows that are known; the others follow them in what is returned.
        worth: share of the missing rows that a round of programs for copies must find for another one.
    """
    found: list[Row] = list(start)
    _scan(inputs, how, found)
    before = -1
    while len(found) - before > worth * (inputs.span.rank - before) and len(found) < inputs.span.rank:
        before = len(found)
        _copies(inputs, how, found, 1, rng, only_first=True)
        if len(found) == before:
            _copies(inputs, how, found, 1, rng)
    return found


def look_harder(
    inputs: MaskedInputs, how: Search, found: Sequence[Row], effort: int, rng: torch.Generator
) -> list[Row]:
    """Return the rows with those added that more tries at copies, then random objectives at the nearest tokens find.

    Args:
        inputs: the masked inputs of a model and a span.
        how: how far to look.
        found: rows that are known.
        effort: 1 or more; so many times the tries.
        rng: for further tries.
    """
    more = list(found)
    _copies(inputs, how, more, effort, rng)
    if len(more) == len(found):
        last = max(row.position for row in found) if found else 0
        _again(inputs, how, more, min(how.max_length, inputs.model.max_length, last + 1 + EMPTY), rng)
    return more


def _told(inputs: MaskedInputs, found: list[Row]) -> None:
    step("decode: rows", len(found), inputs.span.rank)


def nearest(inputs: MaskedInputs, how: Search) -> int:
    """Return how many tokens a position are decoded."""
    return min(max(how.candidates, inputs.span.rank), inputs.model.vocabulary_size)


def fresh_rows(
    inputs: MaskedInputs,
    how: Search,
    known: dict[tuple[int, int], list[Row]],
    passed: Sequence[tuple[tuple[int, int], Tensor, Tensor]],
    count: int,
) -> list[Row]:
    """Return the rows among those that lie in the span which are no known one met again, and put them to the known.

    Args:
        inputs, how: masked inputs; how many copies there may be.
        known, passed: rows by position and token; position and token, mask [d] and clean row [d].
        count: rows that are known, of the span's dimensions.
    """
    fresh: list[Row] = []
    for kind, kept, clean in passed:
        same = known.setdefault(kind, [])
        room = count + len(fresh) < inputs.span.rank and (how.size is None or len(same) < how.size)
        if room and all(inputs.differ(row.clean, kept, row.kept) for row in same):
            same.append(Row(kind[1], kind[0], kept, clean))
            fresh.append(same[-1])
    return fresh


def _decoded(inputs: MaskedInputs, how: Search, found: list[Row], position: int, ids: Tensor, **objective: Any) -> bool:
    """Add those of some tokens at a position that decode and were not found yet; say whether any decoded."""
    known = {(row.position, row.token) for row in found}
    clean = inputs.clean(position, ids)
    kept, inside = inputs.accepted(clean, inputs.relaxed(clean, **objective) > HALF, how.rate)
    for at in torch.where(inside)[0].tolist():
        if (position, int(ids[at])) not in known:
            known.add((position, int(ids[at])))
            found.append(Row(int(ids[at]), position, kept[at], clean[at]))
    _told(inputs, found)
    return bool(inside.any())


def _scan(inputs: MaskedInputs, how: Search, found: list[Row]) -> None:
    """Look for every token at every position once."""
    model, prefix = inputs.model, inputs.model.special.prefix[:1]
    longest = min(how.max_length, model.max_length)
    empty = 0
    for position in range(longest):
        ids = inputs.near(position, nearest(inputs, how))
        if position == 0 and prefix:
            # masked copies of one row blur its residual, so the known first token is decoded directly
            ids = torch.tensor(prefix, device=ids.device)
        empty = 0 if _decoded(inputs, how, found, position, ids) else empty + 1
        if len(found) >= inputs.span.rank or empty == EMPTY:
            break


def _again(inputs: MaskedInputs, how: Search, found: list[Row], longest: int, rng: torch.Generator) -> None:
    """Look again, with random objectives, for the nearest tokens of each position that were not found."""
    known = {(row.position, row.token) for row in found}
    for position in range(1 if inputs.model.special.prefix else 0, longest):
        near = inputs.near(position, nearest(inputs, how)).tolist()
        ids = torch.tensor([t for t in near if (position, t) not in known][:_NEAREST], device=inputs.basis.device)
        if len(ids) == 0:
            continue
        _decoded(inputs, how, found, position, ids.repeat(_RESTARTS), rng=rng, rounds=_ROUNDS)
        if len(found) >= inputs.span.rank:
            return


def _copies(
    inputs: MaskedInputs, how: Search, found: list[Row], effort: int, rng: torch.Generator, only_first: bool = False
) -> None:
    """Look for one further copy of every token found (or of the first), all together, with `effort` times the tries."""
    kinds: dict[tuple[int, int], list[Row]] = {}
    for row in found:
        kinds.setdefault((row.position, row.token), []).append(row)
    prefix = tuple(inputs.model.special.prefix[:1])
    if prefix:
        kinds.setdefault((0, prefix[0]), [])
    clean, forbidden, owner = [], [], []
    for kind, rows in kinds.items():
        first = bool(prefix) and kind == (0, prefix[0])
        if (how.size is not None and len(rows) >= how.size) or (only_first and not first):
            continue
        tries = effort * (_FIRST_TRIES if first else _TRIES)
        x = rows[0].clean if rows else inputs.clean(0, torch.tensor(prefix, device=inputs.basis.device))[0]
        # of a first token that many copies blur, random objectives find the first
        masks = torch.stack([row.kept for row in rows]) if rows else torch.zeros_like(x, dtype=torch.bool)[None]
        clean.append(x.expand(tries, -1))
        forbidden.append(inputs.forbid(x, masks, tries, rng) & bool(rows))
        owner += [kind] * tries
    if not clean:
        return
    rows_ = torch.cat(clean)
    # a known copy with one coordinate taken away is nearly a solution: it takes longer to leave it
    start = inputs.relaxed(rows_, forbidden=torch.cat(forbidden), rng=rng, steps=_COPY_STEPS) > HALF
    kept, inside = inputs.accepted(rows_, start, how.rate)
    which = torch.where(inside)[0].tolist()
    found += fresh_rows(inputs, how, kinds, [(owner[n], kept[n], rows_[n]) for n in which], len(found))
    _told(inputs, found)
