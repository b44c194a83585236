"""Sentences from placed words, dropout off: linked by attention, mended in the span of block 1, proven by deflation.

Where nothing but block 0 was sent, they are mended by what comes back to their tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from gradaudit.leakage.decoding.linking import group, joint_support
from gradaudit.leakage.decoding.mending import descend, misfit
from gradaudit.leakage.decoding.pairs import Pairs, candidate_pairs, framed, placed_signals, sparse_signals
from gradaudit.leakage.decoding.taking_out import take_out
from gradaudit.leakage.one_matrix.own_slopes import OwnSlopes
from gradaudit.leakage.rowspace.deflation import Matrices, Remainder, remainder
from gradaudit.leakage.rowspace.subspace import Span
from gradaudit.models.base import TextModel
from gradaudit.progress import answering, step

_WEAK, _MOST = 1e-3, 2.0
"""Pairs are kept with at least this share of the strongest signal, and at most so many times the rank of them: linking
costs their number cubed."""
_NEAR = 0.02
"""Pairs of the batch stay this near the span of what is left, however much was taken out; others start at 0.05."""
_ROUNDED = 1e-2
"""How near a number of sentences that is read off the gradient must be to a whole one."""


@dataclass(frozen=True)
class Placed:
    """Candidate pairs with what the gradient says of them.

    Args:
        pairs: the pairs that carry signal, strongest first.
        strength: [n] norm of each one's signal.
        support: [n, n] how much pair j takes part in explaining pair i; zero where one of them is not among the linked.
        linked: how many, the strongest, were linked: as many as there are tokens, where a deeper block tells.
        near: all pairs near the span, the weak ones too: a word that is at several positions sends little at each.
    """

    pairs: Pairs
    near: Pairs
    strength: Tensor
    support: Tensor
    linked: int


@dataclass(frozen=True)
class Solved:
    """A sentence that was taken out of the gradient.

    Args:
        tokens: its ids.
        label: the label under which the ranks fell; None where copies may have had several.
        proven: True when every block's rank fell by its length.
        weights: by label, how much of its gradient under that label was in the whole.
    """

    tokens: tuple[int, ...]
    label: int | None
    proven: bool
    weights: tuple[float, ...]


class Mender(Protocol):
    """How far sentences are from those of the batch, and what would bring them nearer."""

    @property
    def limit(self) -> float:
        """Return the misfit up to which it is tried whether a sentence can be taken out."""

    def misfits(self, sentences: Sequence[tuple[int, ...]]) -> Tensor:
        """Return [n] by sentence, below 1 where it fits."""

    def mended(self, near: Sequence[Pairs], sentence: tuple[int, ...]) -> tuple[tuple[int, ...], float]:
        """Return what exchanges for words at positions, the likely ones and all, make of a sentence, and its misfit."""


@dataclass(frozen=True)
class DeeperRows:
    """Mends sentences by their rows in a deeper block.

    Args:
        model: an encoder, dropout off.
        span: of that block.
    """

    model: TextModel
    span: Span
    limit: float = 1.0

    def misfits(self, sentences: Sequence[tuple[int, ...]]) -> Tensor:
        """Return [n] by sentence, below 1 where it fits."""
        return misfit(self.model, self.span, sentences)[1]

    def mended(self, near: Sequence[Pairs], sentence: tuple[int, ...]) -> tuple[tuple[int, ...], float]:
        """Return what exchanges for words at positions make of a sentence, and its misfit."""
        sentence, rows = descend(self.model, self.span, near[-1], sentence)
        return sentence, float(rows.square().mean())


@torch.no_grad()
def place(model: TextModel, rest: Remainder, first: Span, found: Pairs) -> Placed:
    """Return the words at their positions, and who attends to whom.

    Args:
        model: an encoder, dropout off.
        rest: the gradient; its block 0 must hold queries or keys.
        first: block 0's span of it.
        found: candidate pairs.
    """
    if len(found) == 0:
        none = first.values.new_zeros(0)
        return Placed(found, found, none, none.new_zeros((0, 0)), 0)
    placed = placed_signals(model, rest.stacked(0), found)
    signals = sparse_signals(rest.stacked(0), found.rows, first.basis) if placed is None else placed
    strength = signals.norm(dim=1)
    near = found
    order = torch.where(strength > _WEAK * strength.max())[0]
    order = order[strength[order].argsort(descending=True)][: int(_MOST * first.rank) + 8]
    found, strength, signals = found.pick(order), strength[order], signals[order]
    deeper = [layer for layer, _ in rest.left if layer > 0]
    linked = min(len(found), rest.span(min(deeper)).rank if deeper else len(found))
    support = torch.zeros((len(found), len(found)), dtype=torch.double, device=signals.device)
    if linked:
        sizes = {role: len(gradient) for (layer, role), gradient in rest.left.items() if layer == 0}
        support[:linked, :linked] = linked_by(model, found.pick(slice(linked)), signals[:linked], sizes)
    return Placed(found, near, strength, support, linked)


def linked_by(model: TextModel, pairs: Pairs, signals: Tensor, sizes: Mapping[str, int], ridge: float = 1e-4) -> Tensor:
    """Return [n, n], how much pairs take part in explaining each other's signals at queries and keys.

    Of values alone, how alike their signals are: each is a mean of what came back to the same few rows, the first
    token's above all.

    Args:
        model: an encoder, dropout off.
        pairs: tokens at positions.
        signals: [n, out] of each, role after role.
        sizes: by role, in order, how many of the signals are its own.
        ridge: as `joint_support` has it.
    """
    support = torch.zeros((len(pairs), len(pairs)), dtype=torch.double, device=signals.device)
    for role, part in zip(sizes, torch.split(signals, list(sizes.values()), 1), strict=True):
        if role in "qk":
            atoms = model.project(0, "k" if role == "q" else "q", pairs.rows)
            weights = joint_support(part.reshape(atoms.shape), atoms, pairs.positions, ridge=ridge)
            support += weights + weights.T
        elif len(sizes) == 1:
            unit = torch.nn.functional.normalize(part, dim=1)
            support += (unit @ unit.T).clamp_min(0)
    return support


def propose(model: TextModel, placed: Placed, lengths: int = 6) -> list[tuple[int, ...]]:
    """Return sentences to start from: for every pair the strongest partner at each position, at its likeliest lengths.

    Args:
        model: the model.
        placed: from `place`.
        lengths: how many ends are tried a pair.
    """
    positions, tokens = placed.pairs.positions, placed.pairs.tokens
    ending = model.special.suffix[-1:]
    best: dict[tuple[int, ...], float] = {}
    if len(tokens) == 0:
        return []
    last = int(positions.max())
    weak = 1e-9 * placed.strength / placed.strength.max()  # decides where attention says nothing
    for at in range(placed.linked):
        weights = placed.support[at] + weak
        weights[at] = weights.max() * 2 + 1e-300
        ids, heights = [], []
        for position in range(last + 1):
            here = torch.where(positions == position)[0]
            if len(here) == 0:
                break
            inner = here[~torch.isin(tokens[here], torch.tensor(ending, device=tokens.device))] if ending else here
            here = inner if len(inner) else here
            top = here[weights[here].argmax()]
            ids.append(int(tokens[top]))
            heights.append(float(weights[top]))
        if ending:
            ends = torch.where(tokens == ending[0])[0]
            ends = ends[positions[ends] > int(positions[at]) - (int(tokens[at]) == ending[0])]
            ends = ends[weights[ends].argsort(descending=True)][:lengths]
            options = [(*ids[: int(positions[e])], ending[0]) for e in ends.tolist() if int(positions[e]) <= len(ids)]
        else:
            options = [tuple(ids)]
        for option in options:
            best[option] = max(best.get(option, 0.0), float(placed.strength[at]))
    return sorted(best, key=lambda s: -best[s])


def solve(
    model: TextModel,
    left: Matrices,
    eps: float,
    size: int | None,
    longest: int,
    *,
    starts: int = 24,
    slopes: bool = False,
) -> tuple[list[Solved], list[tuple[int, ...]], Remainder]:
    """Recover a batch sentence by sentence, each taken out of the gradient before the next is looked for.

    Args:
        model: an encoder, dropout off.
        left: gradients of q, k, v (what was seen of them) of the first blocks.
        eps: rounding of the gradient's type.
        size: sentences in the batch; when None, found from the first sentence: its share makes the ranks fall.
        longest: positions looked at.
        starts: proposals mended a round, best fitting first.
        slopes: mend them by what comes back to their tokens, where block 0 alone is given; needs the whole model.

    Returns:
        The sentences taken out; the best guesses at the others; what is left of the gradient.
    """
    rest = remainder(left, eps)
    layers = sorted({layer for layer, _ in left if layer > 0}) or [0]
    solved: list[Solved] = []
    taken_shares: list[float | None] = []
    told = size  # a scaled loss makes shares look like those of another number of sentences
    pairs = candidate_pairs(model, framed(model, rest.span(0)), longest)
    shares = [] if size is None else [1 / size]
    ranked: list[tuple[float, tuple[int, ...]]] = []
    placed: Placed | None = None

    def mending() -> Mender | None:
        if layers == [0]:
            return OwnSlopes(model, rest) if slopes and rest.span(0).rank else None
        span = rest.span(layers[0])
        return DeeperRows(model, span) if 0 < span.rank < model.width else None

    with answering(lambda _: (list(solved), [], rest) if solved else None):
        while told is None or len(solved) < told:
            step("decode: sentences", len(solved), size)
            first = framed(model, rest.span(0))
            if not 0 < first.rank < model.width:
                break
            # candidates are those of the whole gradient, which is sharper than what is left of it
            placed = place(model, rest, first, pairs.pick(first.residual(pairs.rows) < _NEAR))
            proposals = propose(model, placed)
            if not proposals:
                break
            mender = mending()
            if mender is None:
                ranked = [(float(at), s) for at, s in enumerate(proposals)]
                break
            values = mender.misfits(proposals)
            before = len(solved)
            ranked = []
            for at in values.argsort().tolist()[:starts]:
                if len(solved) > before and float(values[at]) >= 1:
                    break  # a smaller gradient is easier: place the words anew
                sentence, far = mender.mended((placed.pairs, placed.near), proposals[at])
                if far >= mender.limit:
                    ranked.append((far, sentence))
                    continue
                taken = take_out(model, rest, sentence, shares, layers)
                if taken is None:  # it fits, and cannot be told apart from the rest: the first of the guesses
                    ranked.append((far - mender.limit, sentence))
                    continue
                rest = taken.rest
                if size is None and taken.share is not None and _whole(1 / taken.share):
                    size = round(1 / taken.share)
                # a scaled gradient holds all of them with the same share; of one there twice the others have half
                likely = (taken.share, None if size is None else 1 / size)
                shares = list(dict.fromkeys(share for share in likely if share is not None))
                solved.append(Solved(sentence, taken.label, taken.proven, taken.weights))
                taken_shares.append(taken.share)
                step("decode: sentences", len(solved), size)
                mender = mending()
                if (told is not None and len(solved) >= told) or mender is None:
                    break
            if len(solved) == before:
                break
    if rest.span(0).rank == 0:  # there is no other
        return solved if size is None else copied(solved, taken_shares, size), [], rest
    expected = size or 0
    if size is None and placed is not None and ranked:  # at least as many as pairs with signal at one position
        expected = int(placed.pairs.positions.bincount().max())
    missing = max(0, expected - len(solved))
    guesses = different(ranked, missing)
    if (slopes or layers != [0]) and placed is not None and len(placed.pairs) and len(guesses) < missing:
        guesses += _grouped(model, placed, missing - len(guesses), guesses)
    return solved, guesses, rest


def copied(solved: list[Solved], shares: Sequence[float | None], size: int) -> list[Solved]:
    """Return the sentences that make up a whole gradient, each as often as it was in the batch.

    A loss may be scaled, and all shares with it: a share tells copies only where all are whole parts of a batch's sum.
    """
    told = [share for share in shares if share is not None]
    if len(told) < len(solved):
        return solved
    times = [share * size / sum(told) for share in told]
    if len(solved) >= size or not all(map(_whole, times)):
        return solved
    # copies with several labels look like those of one, scaled
    plain = all(abs(share * size - many) < _ROUNDED for share, many in zip(told, times, strict=True))
    return [
        replace(one, label=one.label if plain else None, weights=tuple(w / round(many) for w in one.weights))
        for one, many in zip(solved, times, strict=True)
        for _ in range(round(many))
    ]


def _whole(number: float) -> bool:
    return round(number) > 0 and abs(number - round(number)) < _ROUNDED


def _grouped(model: TextModel, placed: Placed, count: int, guesses: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return so many further guesses from the words that no guess uses, grouped by attention."""
    special = model.special
    used = {(p, t) for sentence in guesses for p, t in enumerate(sentence)}
    pairs = list(zip(placed.pairs.positions.tolist(), placed.pairs.tokens.tolist(), strict=True))
    free = [i for i, pair in enumerate(pairs) if pair not in used and pair[1] not in special.ids]
    # as many pairs as carry half of the signal: the weaker half are mostly wrong ones
    strength = placed.strength[free]
    free = free[: int((strength.cumsum(0) < strength.sum() / 2).sum()) + 1]
    index = torch.tensor(free, dtype=torch.long, device=placed.strength.device)
    groups = group(placed.support[index][:, index], [pairs[i][0] for i in free], count)
    longest = sorted(groups, key=len, reverse=True)[:count]
    return [(*special.prefix, *(pairs[free[i]][1] for i in members), *special.suffix) for members in longest]


def different(ranked: list[tuple[float, tuple[int, ...]]], count: int) -> list[tuple[int, ...]]:
    """Return the best sentences that differ from one another in at least half of their tokens."""
    chosen: list[tuple[int, ...]] = []
    for _, sentence in sorted(ranked):
        inner = set(sentence[1:-1])
        if all(2 * len(inner & set(other[1:-1])) <= len(inner | set(other[1:-1])) for other in chosen):
            chosen.append(sentence)
        if len(chosen) == count:
            break
    return chosen
