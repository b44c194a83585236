"""Sentences of a decoder's update under noise, token by token: the nearest fit of all matrices together.

As `leakage.growth`, but no row fits exactly: wrong rows pass now and then, and are told by what follows them.
"""

import torch
from torch import Tensor

from gradaudit.leakage.rowspace.growth import ROUNDING, AcceptedTokens, Grown, GrowthRules, phantom, spread_tokens
from gradaudit.leakage.rowspace.joint import Joint, joint_residuals
from gradaudit.leakage.rowspace.prefixes import Attended, blocks_for
from gradaudit.leakage.rowspace.subspace import below_wrong, cut_by_gap
from gradaudit.models.base import TextModel
from gradaudit.progress import step
from gradaudit.types import Observation

_WORDS = (2, 128)
"""Words looked at a position: so many times the directions, and at least so many."""
_LACKING = (0.97, 1024)
"""Below this share of the directions some words are lost in the noise, and may be so far down the list."""
_SCANNED = 4
"""So many times the directions where they are told by other matrices."""
_SAMPLES = 2
"""After so many prefixes all words of the vocabulary are tried, where block 0's q, k and v do not tell them."""
_FAR = 3.0
"""True rows under noise lie within so many times their median residual, but for few."""
_BELOW = 1.0
"""Rows so far below the wrong ones, as a logarithm, are true."""
_LONGER = 1.2
"""A text has at most so many times the directions that stand above the noise, and a few more."""
_PEAK = 6
"""A prefix that has spoken against itself for so many rows ended before them."""
_ASTRAY, _LOST = 4, 3.0
"""So many rows in a row, each so many times as far as true ones in the middle, end a prefix."""
_DOUBT = 0.7
"""A row less far below the wrong ones speaks against a sentence: wrong rows that pass are somewhat below the others."""
_CLEAR = 3.0
"""A gap this wide is between true rows and wrong ones."""
_TOP = 0.3
"""Where the gap ends, as a share of where most wrong rows lie."""
_SPARE = 4
"""So many more rows than the batch has sentences may lie as near as true ones."""
_BEAM = (2, 8)
"""Prefixes kept, where no gap is clear: so many times the sentences, and so many more."""
_REPEATS = 4
"""Longest run of one token a rotary sentence may start with (see `growth.grow`): each opens a way to wrong rows."""


def grow_under_noise(seen: Observation, joint: Joint, rules: GrowthRules) -> Grown:
    """Grow the prefixes whose rows lie nearest, and return at most as many sentences as the batch has, nearest first.

    Args:
        seen: the observation of a decoder's update.
        joint: what of it can be read.
        rules: bounds; its tolerances are not used.
    """
    model, size = seen.model, seen.knowledge.batch_size or joint.rank
    words = _Words(model, joint, rules.words)
    device = joint.spans[0].basis.device
    attended = Attended(model, blocks_for((s.layer, s.roles[0]) for s in joint.spans))
    prefixes = torch.zeros((1, 0), dtype=torch.long, device=device)
    along, below = torch.zeros((1, 0), device=device), torch.zeros((1, 0), device=device)
    decoys = spread_tokens(model, device)
    grown: dict[tuple[int, ...], list[float]] = {}
    margins: dict[tuple[int, ...], list[float]] = {}
    tried = 0
    # each row of a text is a direction, so none is longer than there are
    longest = round(_LONGER * joint.rank) + _ASTRAY
    for position in range(min(rules.longest, model.max_length, longest)):
        candidates = words.after(prefixes)
        asked = torch.cat([candidates, decoys[~torch.isin(decoys, candidates)]])
        residuals = joint_residuals(attended, joint.spans, prefixes, asked)
        free = _free(model, prefixes, asked)
        limit, wrong = _limit(residuals[~free], size)
        residuals, free = residuals[:, : len(candidates)], free[:, : len(candidates)]
        tried += residuals.numel()
        fits = (residuals < limit) & ~_lost_its_way(along, below)[:, None]
        if position < _REPEATS:
            fits |= free & (prefixes == prefixes[:, :1]).all(1, keepdim=True)
        for at in torch.where(~fits.any(1))[0].tolist():
            prefix = tuple(prefixes[at].tolist())
            grown[prefix], margins[prefix] = along[at].tolist(), below[at].tolist()
        parent, token = torch.where(fits)
        if len(parent) == 0:
            prefixes, along, below = prefixes[:0], along[:0], below[:0]
            break
        keep = residuals[parent, token].argsort()[: min(rules.most, _BEAM[0] * size + _BEAM[1])]
        parent, token = parent[keep], token[keep]
        prefixes = torch.cat([prefixes[parent], candidates[token][:, None]], 1)
        row = residuals[parent, token][:, None]
        telling = (wrong / row).log() * ~free[parent, token][:, None]
        along, below = torch.cat([along[parent], row], 1), torch.cat([below[parent], telling], 1)
        step(f"growing {len(prefixes)} prefixes", position + 1)
    left = [tuple(prefix) for prefix in prefixes.tolist()]
    grown |= dict(zip(left, along.tolist(), strict=True))
    margins |= dict(zip(left, below.tolist(), strict=True))
    runs = [s for s in grown if phantom(model, s)]
    paths = {s: path for s, path in _trimmed({s: p for s, p in grown.items() if s not in runs}).items() if s}
    paths |= {s[:1]: grown[s][:1] for s in runs if not any(t[:1] == s[:1] for t in paths)}
    return Grown(_chosen(paths, margins, size), tried)


class _Words:
    """The words that may follow some prefixes: the nearest in block 0."""

    def __init__(self, model: TextModel, joint: Joint, named: Tensor | None) -> None:
        self._model, self._joint, self._named = model, joint, named
        self._accepted = None if joint.words is None else AcceptedTokens(model, joint.words, None, named)
        share, least = _WORDS
        if joint.words is None:
            share = _SCANNED
        elif joint.words.rank < _LACKING[0] * joint.rank:
            least = _LACKING[1]
        self._count = min(max(share * joint.rank, least), model.vocabulary_size)
        self._scanned: dict[int, Tensor] = {}

    def after(self, prefixes: Tensor) -> Tensor:
        """Return ids, as many at any position."""
        position = prefixes.shape[1]
        if self._named is not None and len(self._named) <= self._count:
            return self._named
        if self._accepted is not None:
            return self._accepted.nearest(position, self._count)
        # what a word leaves in block 0 hangs little on what comes before it: one scan does for all positions
        place = position if self._model.absolute_positions else min(position, 1)
        if place not in self._scanned:
            step("every word of the vocabulary, position", position + 1)
            every = torch.arange(self._model.vocabulary_size, device=prefixes.device)
            every = every if self._named is None else self._named
            spans = tuple(s for s in self._joint.spans if s.layer == 0) or self._joint.spans
            attended = Attended(self._model, blocks_for((s.layer, s.roles[0]) for s in spans))
            nearest = joint_residuals(attended, spans, prefixes[:_SAMPLES], every).amin(0)
            self._scanned[place] = every[nearest.topk(min(self._count, len(every)), largest=False).indices]
        return self._scanned[place]


def _free(model: TextModel, prefixes: Tensor, words: Tensor) -> Tensor:
    """Say which continuations, [P, C], repeat a text's first or last token: without positions, they tell nothing.

    A run of one token has the rows of that token alone (see `growth.grow`), and a text that is mostly one, nearly.
    """
    if model.absolute_positions or prefixes.shape[1] == 0:
        return torch.zeros((len(prefixes), len(words)), dtype=torch.bool, device=prefixes.device)
    return (words == prefixes[:, :1]) | (words == prefixes[:, -1:])


def _limit(residuals: Tensor, size: int) -> tuple[float, float]:
    """Return a threshold between true rows and wrong ones, and where wrong ones begin.

    True rows differ in how far noise puts them, so the last clear gap below the wrong rows counts, and not the widest.

    Args:
        residuals: [n] of all continuations; most of them are wrong.
        size: sentences of the batch.
    """
    high, most = below_wrong(residuals, size), below_wrong(residuals, size + _SPARE)
    near = residuals[residuals < high].sort().values.clamp_min(ROUNDING)
    near = torch.cat([near, near.new_tensor([high])])
    # a gap far below the wrong rows is one between true ones
    clear = torch.where((near[1:] > _CLEAR * near[:-1]) & (near[1:] > _TOP * high))[0]
    limit = most if len(clear) == 0 else float((near[clear[-1]] * near[clear[-1] + 1]).sqrt())
    return limit, most


def _chosen(
    paths: dict[tuple[int, ...], list[float]], margins: dict[tuple[int, ...], list[float]], size: int
) -> list[tuple[int, ...]]:
    """Return the sentences that explain most, each by the rows that it does not share with those before it.

    Args:
        paths: by sentence, trimmed.
        margins: by sentence, whole: how far each row is below the wrong ones, as a logarithm.
        size: at most so many.
    """
    own = {s: next(m for t, m in margins.items() if t[: len(s)] == s)[: len(s)] for s in paths}
    found: list[tuple[int, ...]] = []
    own = {s: [value - _DOUBT for value in row] for s, row in own.items()}
    new = {s: sum(row) for s, row in own.items()}
    while new and len(found) < size:
        best = max(new, key=lambda s: new[s])
        if new[best] <= 0:
            break  # noise alone grows such texts
        found.append(best)
        del new[best]
        for other in new:
            shared = next((i for i, (a, b) in enumerate(zip(other, best, strict=False)) if a != b), len(other))
            new[other] = min(new[other], sum(own[other][shared:]))
    return found


def _lost_its_way(along: Tensor, below: Tensor) -> Tensor:
    """Say which prefixes, [P], ended some rows ago: the last few are as far as wrong ones, and true ones are not.

    Args:
        along: [P, t] residuals of each prefix's rows; a few wrong rows always pass.
        below: [P, t] how far each is below the wrong ones, as a logarithm; 0 for one that fits whatever was sent.
    """
    if along.shape[1] <= _ASTRAY:
        return torch.zeros(len(along), dtype=torch.bool, device=along.device)
    lost = below[:, -_ASTRAY:].amax(1) < _BELOW
    true = along[below >= _BELOW]
    nearest = along.masked_fill(below == 0, torch.inf)[:, -_ASTRAY:].amin(1)
    if len(true):
        lost &= nearest > _LOST * true.median()
    peak = (below - _DOUBT).cumsum(1).argmax(1)
    return lost | (along.shape[1] - 1 - peak >= _PEAK)


def _trimmed(grown: dict[tuple[int, ...], list[float]]) -> dict[tuple[int, ...], list[float]]:
    """Return what grew under noise without the wrong rows at its ends, and without beginnings of other sentences.

    A few wrong rows pass at every position. Behind one all rows are wrong, so those that lead nowhere are at the ends,
    and apart from the true rows of all sentences by the widest gap.

    Args:
        grown: by sentence, the residuals of its rows.
    """
    every = torch.tensor([value for path in grown.values() for value in path])
    if len(every) == 0:
        return grown
    low, high = _FAR * float(every.median()), float(every.max())
    cut = cut_by_gap(every, low, high) if low < high else high
    ends: dict[tuple[int, ...], list[float]] = {}
    for sentence, path in grown.items():
        length = len(path)
        while length > 1 and path[length - 1] > cut:
            length -= 1
        ends[sentence[:length]] = path[:length]
    return {s: p for s, p in ends.items() if not any(len(t) > len(s) and t[: len(s)] == s for t in ends)}
