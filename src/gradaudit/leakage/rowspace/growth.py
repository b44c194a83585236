"""Sentences of a decoder, token by token: which tokens lie in block 0's span, and which prefixes in block 1's."""

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from gradaudit.leakage.rowspace.prefixes import Attended, leaf_values
from gradaudit.leakage.rowspace.subspace import Span, cut_above_noise, cut_by_gap, span
from gradaudit.leakage.rowspace.vocabulary import NearTokens, VocabularyCheck, measured_tokens, near_tokens
from gradaudit.models.base import TextModel
from gradaudit.progress import step
from gradaudit.types import NamedWord, Observation, Reconstruction

ROUNDING = 5e-6
"""Residuals of true rows in float32: measured at most 3.2e-6 over batches of up to 170 tokens."""
UNRELATED = 0.05
"""No gap threshold above this: rows that only share words with the batch start near 0.1."""
_SPREAD = 64
"""Tokens spread over the vocabulary that stand for all of it."""
_REPEATS = 16
"""Longest run of one token a rotary sentence may start with: see `grow`."""


@dataclass(frozen=True)
class GrowthRules:
    """When a row counts as inside a span, and how far sentences grow.

    Args:
        token: tolerance in block 0; None takes the widest gap of the residuals.
        row: tolerance in block 1; None as above.
        longest: positions looked at.
        most: prefixes kept at once: bounds memory.
        published: nothing beyond DAGER's own search.
        words: [n] ids that the batch is made of, where the word embedding's rows name them; None for any.
    """

    token: float | None = None
    row: float | None = None
    longest: int = 512
    most: int = 4096
    published: bool = False
    words: Tensor | None = None


class AcceptedTokens:
    """The tokens that lie in block 0's span, position by position.

    Args:
        model: the model.
        first: block 0's span.
        tolerance: None takes the widest gap.
        words: [n] ids that the batch is made of, where they are known: no others are looked at.
    """

    def __init__(self, model: TextModel, first: Span, tolerance: float | None, words: Tensor | None = None) -> None:
        self._model, self._first, self._tolerance = model, first, tolerance
        self._near: dict[int, NearTokens] = {}
        self._rough: dict[int, Tensor] = {}
        special = model.special
        never = sorted(special.ids - {*special.prefix, *special.suffix})
        self._never = torch.tensor(never, dtype=torch.long, device=first.basis.device)
        self._words = None if words is None else words[~torch.isin(words, self._never)]

    @cached_property
    def _check(self) -> VocabularyCheck:
        return VocabularyCheck(self._model.first_input_parts(), self._first)

    def at(self, position: int) -> Tensor:
        """Return the ids accepted at a position, nearest first."""
        if self._words is not None and not self._model.absolute_positions:
            return self._words  # without positions a word of the batch fits anywhere
        place = position if self._model.absolute_positions else 0
        first, limit = self._first, self._tolerance
        if place not in self._near and self._words is not None and first.lost is None:
            self._near[place] = measured_tokens(self._model, self._words, first, place)
        elif place not in self._near:
            rough = self._check.rough(place)
            within = UNRELATED
            if first.lost is not None:  # the vocabulary itself tells where wrong tokens lie
                within = float(rough.kthvalue(min(4 * first.rank + 1, len(rough))).values)
            self._near[place] = near_tokens(self._model, rough, first, place, within)
        near = self._near[place]
        if limit is None and first.lost is not None:
            limit = cut_above_noise(near.residuals, near.expected, first.rank, ROUNDING)
        elif limit is None:
            limit = cut_by_gap(near.residuals, ROUNDING, UNRELATED)
        ids = near.below(limit).ids
        if self._words is not None:
            return ids[torch.isin(ids, self._words)]
        return ids[~torch.isin(ids, self._never)]

    def nearest(self, position: int, count: int) -> Tensor:
        """Return the ids nearest at a position, whatever their distance, at most `count`."""
        if self._words is not None and len(self._words) <= count:
            return self._words
        place = position if self._model.absolute_positions else 0
        if place not in self._rough:
            order = self._check.rough(place).argsort()
            self._rough[place] = order if self._words is None else order[torch.isin(order, self._words)]
        ids = self._rough[place][:count]
        return ids[~torch.isin(ids, self._never)]


@dataclass(frozen=True)
class Grown:
    """What grew.

    Args:
        sentences: token ids.
        tried: prefixes tested in block 1.
        notes: what was cut.
    """

    sentences: list[tuple[int, ...]]
    tried: int
    notes: list[str] = field(default_factory=list)


def grow(seen: Observation, first: Span, second: Span, rules: GrowthRules) -> Grown:
    """Grow prefixes until none can be extended; what cannot be extended is a sentence.

    Without absolute positions, "t t t" has the inputs of "t" in every block (it attends to copies of itself), so a run
    of the first token always fits. Such a run may only lead to something else: it is no sentence itself.

    Args:
        seen: the observation of a decoder's update.
        first: block 0's span.
        second: block 1's span.
        rules: tolerances and bounds.
    """
    model, size = seen.model, seen.knowledge.batch_size
    accepted = AcceptedTokens(model, first, rules.token, rules.words)
    grown, tried, notes = _from(0, seen, accepted, second, rules)
    sentences = [s for s in grown if not phantom(model, s)]
    sentences += [s[:1] for s in grown if phantom(model, s) and not any(t[:1] == s[:1] for t in sentences)]
    if not rules.published and (size is None or len(sentences) < size):
        sentences += _inner_ends(seen, sentences)
        if model.absolute_positions:
            later, more = _later(seen, accepted, second, rules, sentences)
            sentences, tried = sentences + later, tried + more
    return Grown(sentences, tried, notes)


def _from(
    start: int, seen: Observation, accepted: AcceptedTokens, second: Span, rules: GrowthRules
) -> tuple[list[tuple[int, ...]], int, list[str]]:
    """Return what grows from a position on, prefixes tested, and notes."""
    model = seen.model
    device = second.basis.device
    # what the tokenizer puts first is known, and a causal model's first token leaves no query gradient to test it by
    known = model.special.prefix
    prefixes = torch.tensor([known], dtype=torch.long, device=device)
    grown: list[tuple[int, ...]] = []
    notes: list[str] = []
    tried = 0
    attended, inside = Attended(model, second.layer, start), [((second.layer, "q"), second.residual)]
    for position in range(len(known), min(rules.longest, model.max_length - start)):
        candidates = accepted.at(start + position)
        if len(candidates) == 0:
            break
        residuals = leaf_values(attended, prefixes, candidates, inside)[0]
        limit = rules.row if rules.row is not None else cut_by_gap(residuals.flatten(), ROUNDING, UNRELATED)
        tried += residuals.numel()
        fits = residuals < limit
        if position >= _REPEATS and not model.absolute_positions:
            runs = (prefixes == prefixes[:, :1]).all(1)
            fits &= ~(runs[:, None] & (candidates[None] == prefixes[:, :1]))
        grown += [tuple(prefixes[row].tolist()) for row in torch.where(~fits.any(1))[0].tolist()]
        parent, token = torch.where(fits)
        if len(parent) == 0:
            prefixes = prefixes[:0]
            break
        if len(parent) > rules.most:
            keep = residuals[parent, token].argsort()[: rules.most]
            parent, token = parent[keep], token[keep]
            notes = [f"more than {rules.most} prefixes fit; the nearest were kept"]
        prefixes = torch.cat([prefixes[parent], candidates[token][:, None]], 1)
        step(f"growing {len(prefixes)} prefixes", position + 1)
    return [row for row in [*grown, *map(tuple, prefixes.tolist())] if row != known], tried, notes


def _later(
    seen: Observation, accepted: AcceptedTokens, second: Span, rules: GrowthRules, found: list[tuple[int, ...]]
) -> tuple[list[tuple[int, ...]], int]:
    """Return the sentences of a batch padded on the left that start later; all end where the longest does.

    Found are those that start at the first position. The second thing returned counts the prefixes tested.
    """
    size, tried = seen.knowledge.batch_size, 0
    later: list[tuple[int, ...]] = []
    end = max((len(sentence) for sentence in found), default=0)
    # a first token's row is hard to tell from another's in models that attend to it as a sink: no gap is trusted here
    strict = replace(rules, row=rules.row if rules.row is not None else (ROUNDING * UNRELATED) ** 0.5)
    for start in range(1, end):
        if size is not None and len(found) + len(later) >= size:
            break
        grown, more, _ = _from(start, seen, accepted, second, strict)
        tried += more
        later += [text for text in grown if start + len(text) == end and text not in found]
    return later, tried


def words_within(model: TextModel, first: Span) -> Reconstruction:
    """Return the words whose rows lie in block 0's span, at any position: what a decoder's block 0 tells by itself.

    Args:
        model: a decoder.
        first: block 0's span.
    """
    accepted = AcceptedTokens(model, first, None)
    positions = range(min(first.rank + 1, model.max_length)) if model.absolute_positions else range(1)
    found = dict.fromkeys(token for at in positions for token in accepted.at(at).tolist())
    words = tuple(NamedWord(token) for token in found if token not in model.special.ids)
    note = "only block 0's queries, keys or values were seen: they tell a decoder's words, and no sentence"
    return Reconstruction(words=words, notes=(note,), details=first.told())


def spread_tokens(model: TextModel, device: torch.device) -> Tensor:
    """Return tokens whose rows show whether a row space is full, and where wrong rows lie."""
    apart = max(1, model.vocabulary_size // _SPREAD)
    return torch.arange(apart // 2, model.vocabulary_size, apart, device=device)


def phantom(model: TextModel, sentence: tuple[int, ...]) -> bool:
    """Say whether a sentence is a run of one token that fits whatever was sent; see `grow`."""
    return not model.absolute_positions and len(sentence) > 1 and len(set(sentence)) == 1


def _inner_ends(seen: Observation, sentences: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the prefixes of found sentences that are sentences themselves.

    They add no direction of their own to the first blocks. But a classifier's last block sends a query gradient at the
    last token of each sentence only, so a prefix whose end lies in that span was a sentence.
    """
    model = seen.model
    last = model.depth - 1
    if model.spec.task != "classification" or last < 2:
        return []
    queries, keys = model.views(last, "q")[0], model.views(last, "k")[0]
    if queries.parameter == keys.parameter and queries.rows == keys.rows:
        return []  # one adapter of all three: it holds every token
    ends = span(seen, last, ("q",))
    if ends is None or ends.rank >= model.width:
        return []
    found: list[tuple[int, ...]] = []
    for sentence in sentences:
        with torch.no_grad():  # one causal run tests every prefix
            rows = model.attention_inputs(last, torch.tensor([sentence], device=ends.basis.device))[0]
        residuals = ends.residual(rows)
        for length in torch.where(residuals[:-1] < UNRELATED / 10)[0].tolist():
            prefix = sentence[: length + 1]
            if prefix not in found and prefix not in sentences:
                found.append(prefix)
    return found
