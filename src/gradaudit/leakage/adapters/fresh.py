"""Words and sentences of fresh adapters, whose B is still zero: A has no gradient then, and B's is made of A x.

peft begins with B = 0. B's first gradient is D^T (X A^T), and A is known: each of its lines is a combination of what A
leaves of the batch's rows, r numbers each. With fewer distinct rows than r they span a part of R^r only, and a word
whose row lies outside was not there. From B = 0 a step of AdamW shows it, too: beside a weight of zero nothing is
rounded to a grid, so that even entries close to the optimizer's bound are known.

Only the values' adapters hear every row alike: the first word of a causal model sends no query's gradient, and what
comes back to the keys of a sentence adds up to nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradaudit.leakage.adapters.chance import RARE
from gradaudit.leakage.adapters.sparse_words import SparseWords
from gradaudit.leakage.rowspace.subspace import Span
from gradaudit.leakage.uneven.entries import Entries, entries_of
from gradaudit.leakage.uneven.low_rank import Fitting
from gradaudit.leakage.uneven.steps import PlainStep
from gradaudit.types import NamedWord, Observation, Reconstruction

Prefix = tuple[int, ...]

_ROUNDED = 3e-6
"""Distance from the span at which float32 puts a row by itself, relative to the row."""
_OFF = 5.0
"""How far off a row may lie, in the distance at which its errors put it."""
_NEXT = 100
"""The rows that are nearest to the span beside those inside tell how many lie inside by chance."""
_PLACES = 96
"""Positions that are looked at where a model adds them."""
_BLOCKS = 4
"""Blocks behind the first that are asked for sentences: rows of deeper ones are rounded more than is reckoned with. In
the last one a classifier's tokens send only as much as there are heads."""
_EPS, _CLEAR = 6e-8, 5.0
"""Largest singular value that rounding makes of a float32 gradient, relative to the largest of all (measured: 3e-8),
and how many times it a direction must be."""
_SAME = 1e-12
"""Rows whose cosine is so near 1 are one: in a rotary model "that that" at a start has the rows of "that"."""
_A, _B = "lora_A.default.weight", "lora_B.default.weight"


def read_fresh(seen: Observation, rng: torch.Generator) -> Reconstruction | None:
    """Return what the gradient of a fresh adapter's B tells; None where B is not zero, was not sent, or fills its rank.

    Args:
        seen: an update of adapters.
        rng: draws the errors of directions.
    """
    if (left := left_by(seen, 0, rng)) is None:
        return None
    found, there = fresh_words(seen, left)
    texts = tuple(fresh_sentences(seen, there, rng)) if found.explained else ()
    details = {"directions": found.directions, "words": len(found.words)}
    return Reconstruction(
        texts, certificates=("likely",) * len(texts), notes=(found.limit,), details=details, words=found.words
    )


@dataclass(frozen=True)
class Left:
    """What A leaves of a block's rows.

    Args:
        down: [r, d] A.
        span: of the batch's rows in R^r.
    """

    down: Tensor
    span: Span

    def inside(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return of rows [..., d] whether they may be the batch's, and their distance from the span."""
        down = rows.double() @ self.down.T
        far = self.span.residual(down)
        return far < _OFF * self.span.expected(down) + _ROUNDED, far


@torch.no_grad()
def left_by(seen: Observation, layer: int, rng: torch.Generator) -> Left | None:
    """Return what fresh adapters leave of a block's rows; None where nothing of it was sent, or there are r and more.

    Args:
        seen: an update of adapters.
        layer: block.
        rng: draws the errors of directions.
    """
    weights = seen.model.parameters()
    sent = {}
    for view in seen.model.views(layer, "v"):
        name = view.name.replace(_A, _B)
        if name != view.name and name in seen.tensors and not bool(weights[name].any()):
            sent[name] = (seen.tensors[name], weights[name], True)
            down = weights[view.parameter]
    if not sent or not all(bool(g.any()) for g, _, _ in sent.values()):
        return None
    changes = entries_of(seen, sent)
    if changes is None and seen.kind == "delta":
        return None
    if changes is not None and not isinstance(changes.step, PlainStep):
        fit = Fitting(changes, rng).fit(len(down) - 1, first=1)  # of more than there are it keeps all
        return None if fit is None else Left(down.double(), fit.span(layer))
    span = _even(torch.cat([g.double() for g, _, _ in sent.values()]), changes, layer)
    return None if span is None else Left(down.double(), span)


def _even(gradient: Tensor, changes: Entries | None, layer: int) -> Span | None:
    """Return the row space of a gradient whose errors are alike; None where it is full."""
    _, values, rows = torch.linalg.svd(gradient, full_matrices=False)
    noise = float(_EPS * values[0])
    if changes is not None:
        spread = float(changes.spread.square().mean().sqrt() * changes.sent.norm().reciprocal() * gradient.norm())
        noise = max(noise, spread * (gradient.shape[0] ** 0.5 + gradient.shape[1] ** 0.5))
    rank = int((values > _CLEAR * noise).sum())
    if not 0 < rank < len(values):
        return None
    lost = (noise / values[:rank]).square()
    return Span(rows[:rank].T, values, rank, float(values[rank - 1] / values[rank]), layer, ("v",), lost)


@torch.no_grad()
def fresh_words(seen: Observation, left: Left) -> tuple[SparseWords, list[list[int]]]:
    """Return the words whose rows lie in the span, and those at each position (one of all where none is added).

    Args:
        seen: an update of fresh adapters.
        left: of block 0.
    """
    model, rank, size = seen.model, left.span.rank, len(left.down)
    never = sorted(model.special.ids - {*model.special.prefix, *model.special.suffix})
    places = range(min(_PLACES, model.max_length)) if model.absolute_positions else range(1)
    there: list[list[int]] = []
    others: list[Tensor] = []
    for place in places:
        inside, far = left.inside(model.first_inputs(place))
        inside[never] = False
        far[never] = math.inf
        there.append(inside.nonzero()[:, 0].tolist())
        others.append(far[~inside].topk(min(_NEXT, len(far) - len(there[-1])), largest=False).values)
    count = sum(map(len, there))
    beside = torch.cat(others).sort().values[:_NEXT]
    beside = beside[beside.isfinite()]
    near = float(beside[-1]) if len(beside) else 0.0
    reach = _OFF * float(left.span.lost.max()) ** 0.5 + _ROUNDED if left.span.lost is not None else _ROUNDED
    by_chance = math.log(len(beside)) + (size - rank) * math.log(reach / near) if near > reach else 0.0
    certain = count == rank and by_chance < RARE
    named = dict.fromkeys(token for some in there for token in some if token not in model.special.ids)
    if count > rank:
        named = {}
    told = f"adapters whose B was zero: {count} rows lie in the {rank} directions that B's gradient has of {size}"
    if count < rank:
        told += "; no word has the others, so that none is certain (dropout was on, or errors are larger than told)"
    if count > rank:
        told += ", which is more than can be told apart"
    return SparseWords(tuple(NamedWord(t, certain=certain) for t in named), count == rank, rank, told), there


@torch.no_grad()
def fresh_sentences(seen: Observation, there: Sequence[Sequence[int]], rng: torch.Generator) -> list[Prefix]:
    """Return the sentences whose rows are all there is; none where they cannot be told.

    In a decoder a prefix was there where its last row lies in the spans of some deeper blocks. Of one sentence of an
    encoder each position has its word.

    Args:
        seen: an update of fresh adapters.
        there: words at each position, as `fresh_words` returns them.
        rng: draws the errors of directions.
    """
    model = seen.model
    if not model.causal:
        long = max((place + 1 for place, some in enumerate(there) if some), default=0)
        one = seen.knowledge.batch_size == 1 and all(len(some) == 1 for some in there[:long])
        return [tuple(some[0] for some in there[:long])] if one and long else []
    blocks = {
        layer: left for layer in range(1, model.depth - 1)[:_BLOCKS] if (left := left_by(seen, layer, rng)) is not None
    }
    if not blocks:
        return []
    rank = max(left.span.rank for left in blocks.values())
    every = sorted({token for some in there for token in some})
    found: list[Prefix] = []
    rows = torch.zeros(0, sum(len(left.down) for left in blocks.values()), dtype=torch.double, device=rng.device)
    latest: list[Prefix] = [()]
    while latest and len(found) <= rank and len(latest[0]) < model.max_length:
        place = len(latest[0])
        following = every if not model.absolute_positions else there[place] if place < len(there) else []
        tried = [(*prefix, token) for prefix in latest for token in following]
        if not tried:
            break
        ids = torch.tensor(tried, device=rng.device)
        entered = [one[:, -1] for one in model.matrix_inputs([(layer, "v") for layer in blocks], ids)]
        inside = torch.stack([left.inside(one)[0] for left, one in zip(blocks.values(), entered, strict=True)]).all(0)
        down = [one.double() @ left.down.T for left, one in zip(blocks.values(), entered, strict=True)]
        units = torch.nn.functional.normalize(torch.cat(down, 1)[inside], dim=1)
        latest = [prefix for prefix, one in zip(tried, inside.tolist(), strict=True) if one]
        new = ((units @ rows.T) < 1 - _SAME).all(1)
        found += [prefix for prefix, one in zip(latest, new.tolist(), strict=True) if one]
        rows = torch.cat([rows, units[new]])
        if not bool(new.any()):
            break
    if len(found) != rank:
        return []
    return [text for text in found if not any(len(o) > len(text) and o[: len(text)] == text for o in found)]
