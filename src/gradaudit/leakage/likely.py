"""Sentences of a decoder under noise: the likeliest prefixes, token by token.

Noise blurs which rows lie in a row space, and the weakest rows of a batch no longer tell. A row's leverage (see
`crowd`) still tells most: wrong rows, of which every position has hundreds, lie close together, and a right one mostly
far below. So each token brings the logarithm of how much likelier its leverage is for a right row than for a wrong one;
a row that does not tell costs a little, and the rows after it, which see it, bring it back. What brings nothing at
the end of a prefix is cut off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradaudit.leakage.growth import AcceptedTokens, Grown, Rules, phantom
from gradaudit.leakage.prefixes import leaf_values
from gradaudit.leakage.subspace import Span
from gradaudit.models.base import TextModel
from gradaudit.progress import step
from gradaudit.types import Observation

_RANGE = 10.0
"""Right rows are taken to be spread evenly over so many e-folds of leverage below the wrong ones."""
_LEAST, _MOST = -4.0, 15.0
"""One row says no less and no more than this."""
_CHILDREN = 4
"""Continuations of a prefix that are kept, by block 1 alone, and rated in deeper blocks."""
_TELLS = 5.0
"""A continuation that is so much likelier right than wrong leaves no room for those that tell nothing."""
_DROP = 14.0
"""A prefix so far below its best is dropped: two rows in a row that tell nothing."""
_KEPT = 4
"""Prefixes kept, times the sentences."""
_ALIKE = 0.7
"""Two texts that agree at so many of their positions are one, read in two ways."""
_PROBES = 64
"""Tokens that are rated in deeper blocks to tell where wrong rows lie there."""


@dataclass(frozen=True)
class Wrong:
    """Where the logarithms of wrong rows' leverages lie: their middle, and their spread below it."""

    middle: float
    spread: float

    def ratio(self, values: Tensor) -> Tensor:
        """Return how much likelier values are for a right row than for a wrong one, as a logarithm."""
        z = (values - self.middle) / self.spread
        wrong = -z.square() / 2 - math.log(self.spread * math.sqrt(2 * math.pi))
        return (-math.log(_RANGE) - wrong).masked_fill(z > 0, _LEAST).clamp(_LEAST, _MOST)


def wrong_of(values: Tensor, right: int) -> Wrong:
    """Return where wrong rows lie, from values of which all but `right` are of wrong rows."""
    ordered = values.flatten().sort().values
    ordered = ordered[min(right, len(ordered) // 2) :]
    middle, low = (float(ordered[int(q * (len(ordered) - 1))]) for q in (0.5, 0.16))
    return Wrong(middle, max(middle - low, 1e-3))


@dataclass
class _Beam:
    """Prefixes of one length, how likely each is, and how likely it was at its best."""

    prefixes: Tensor
    score: Tensor
    best: Tensor
    peak: Tensor


def likeliest(seen: Observation, first: Span, deeper: Sequence[Span], rules: Rules) -> Grown:
    """Return the likeliest sentences of a decoder's noisy update.

    Args:
        seen: the observation.
        first: block 0's span.
        deeper: spans of block 1 and of deeper ones, all with leverages.
        rules: tolerances and bounds.
    """
    model, size = seen.model, seen.knowledge.batch_size or max(1, first.rank // 4)
    accepted = AcceptedTokens(model, first, rules.token)
    device = first.basis.device
    apart = max(1, model.vocabulary_size // _PROBES)
    probes = torch.arange(apart // 2, model.vocabulary_size, apart, device=device)
    zero = torch.zeros(1, device=device)
    beam = _Beam(torch.zeros((1, 0), dtype=torch.long, device=device), zero, zero, zero.long())
    peaks: dict[tuple[int, ...], float] = {}
    tried = 0
    for position in range(min(rules.longest, model.max_length)):
        candidates = accepted.at(position)
        if len(candidates) == 0 or len(beam.prefixes) == 0:
            break
        asked = torch.cat([candidates, probes[~torch.isin(probes, candidates)]])
        tried += len(beam.prefixes) * len(asked)
        beam = _extended(model, deeper, beam, candidates, asked, size, min(rules.most, _KEPT * size))
        ended = (beam.peak <= position + 1) & (beam.best > 0)
        for row in torch.where(ended)[0].tolist():
            text = tuple(beam.prefixes[row, : int(beam.peak[row])].tolist())
            peaks[text] = max(peaks.get(text, -math.inf), float(beam.best[row]))
        step(f"likeliest {len(beam.prefixes)} prefixes", position + 1)
    return Grown(_different(model, peaks, seen.knowledge.batch_size), tried)


def _extended(
    model: TextModel,
    deeper: Sequence[Span],
    beam: _Beam,
    candidates: Tensor,
    asked: Tensor,
    size: int,
    most: int,
) -> _Beam:
    count, length = beam.prefixes.shape
    second, *others = deeper
    values = _rated(model, second, beam.prefixes, asked.expand(count, -1))
    ratios = wrong_of(values, size).ratio(values)[:, : len(candidates)]
    few = min(_CHILDREN if length else max(_CHILDREN, 2 * size), len(candidates))
    top = ratios.topk(few)
    gain, children = top.values, candidates[top.indices]
    for span in others:
        usual = _rated(model, span, beam.prefixes[:16], asked[::3].expand(min(count, 16), -1))
        gain = gain + wrong_of(usual, size).ratio(_rated(model, span, beam.prefixes, children))
    # where one tells, those that do not are wrong; where none tells, each may be the right one
    gain = gain.masked_fill((gain < 0) & (gain.amax(1, keepdim=True) > _TELLS), -math.inf)
    score = (beam.score[:, None] + gain - math.log(len(candidates))).flatten()
    parent = torch.arange(count, device=score.device).repeat_interleave(few)
    best, peak = beam.best[parent], beam.peak[parent]
    better = score > best
    best, peak = torch.where(better, score, best), torch.where(better, length + 1, peak)
    kept = torch.where(score > best - _DROP)[0]
    kept = kept[score[kept].argsort(descending=True)[:most]]
    prefixes = torch.cat([beam.prefixes[parent], children.flatten()[:, None]], 1)
    return _Beam(prefixes[kept], score[kept], best[kept], peak[kept])


def _rated(model: TextModel, span: Span, prefixes: Tensor, candidates: Tensor) -> Tensor:
    return 2 * leaf_values(model, span.layer, prefixes, candidates, span.leverage).log()


def _different(model: TextModel, peaks: dict[tuple[int, ...], float], size: int | None) -> list[tuple[int, ...]]:
    """Return the likeliest texts, each another than those before."""
    chosen: list[tuple[int, ...]] = []
    for text in sorted(peaks, key=lambda t: -peaks[t]):
        alike = (sum(a == b for a, b in zip(text, other, strict=False)) for other in chosen)
        same = [n >= _ALIKE * min(len(text), len(other)) for n, other in zip(alike, chosen, strict=True)]
        if not any(same) and not phantom(model, text):
            chosen.append(text)
        if len(chosen) == size:
            break
    return chosen
