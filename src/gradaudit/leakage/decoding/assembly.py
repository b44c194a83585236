"""Sentences from placed words, dropout off: linked by attention, mended in the span of block 1, proven by deflation.

One file because it is one search, whose stages hand the same state on.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gradaudit.leakage.decoding.linking import group, joint_support
from gradaudit.leakage.decoding.pairs import Pairs, candidate_pairs, placed_signals, sparse_signals
from gradaudit.leakage.one_matrix.signal import Signal
from gradaudit.leakage.one_matrix.word_rows import rows_among
from gradaudit.leakage.rowspace.deflation import Matrices, Remainder, remainder, sentence_gradient
from gradaudit.leakage.rowspace.subspace import Span
from gradaudit.models.base import TextModel
from gradaudit.progress import step

_FITS, _FITS_ABOUT, _ABOUT = 5e-4, 3.0, (5e-3, 0.25)
"""A sentence whose rows in block 1 lie this near the span, in their root mean square, fits it: right ones are at 5e-6,
and one wrong word puts a row above 5e-2. In a span that is not known exactly, so many expected distances (MiniLM,
AdamW: right ones at 1.0 to 2.3, wrong ones mostly from 4.8, one wrong word of 28 at 2.6), no nearer than a fit comes to
known entries, and no farther than wrong ones may lie (behind noise of 30% of an entry's size: right ones to 0.17, wrong
ones from 0.4)."""
_WEAK, _MOST = 1e-3, 2.0
"""Pairs are kept with at least this share of the strongest signal, and at most so many times the rank of them: linking
costs their number cubed."""
_NEAR = 0.02
"""Pairs of the batch stay this near the span of what is left, however much was taken out; others start at 0.05."""
_ROUNDED = 1e-2
"""How near a number of sentences that is read off the gradient must be to a whole one."""
_WORST = 8
"""Positions at which exchanges are tried first, those with the worst rows."""
_OPTIONS, _TURNS = 8, 24
"""Tokens tried a position, those whose own rows come nearest, and exchanges of a proposal."""
_GAIN = 1e-3
"""Fall of the mean square distance for which a token is exchanged."""
_ROWS = 8192
"""Token rows of candidate sentences evaluated together: bounds memory."""


_GROWN = 10.0
"""A sentence that was in a gradient leaves no more than so many times its size, however others cancel it."""


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


@torch.no_grad()
def misfit(model: TextModel, span: Span, sentences: Sequence[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
    """Return the distance of each sentence's rows from a deeper block's span, and its mean square, of which 1 fits.

    Args:
        model: the model.
        span: of block 1 or a deeper one.
        sentences: token ids, of any lengths.

    Returns:
        [n, T] by token, 1 after a sentence's end, and [n].
    """
    device = span.basis.device
    lengths = torch.tensor([len(s) for s in sentences], device=device)
    out = torch.ones((len(sentences), int(lengths.max())), device=device)
    for length in sorted({len(s) for s in sentences}):
        for some in torch.split(torch.where(lengths == length)[0], max(1, _ROWS // length)):
            ids = torch.tensor([sentences[i] for i in some.tolist()], device=device)
            rows = model.attention_inputs(span.layer, ids)
            fits = (_FITS_ABOUT * span.expected(rows)).clamp(*(_ABOUT if span.lost is not None else (_FITS, _FITS)))
            out[some, :length] = (span.residual(rows) / fits).to(out)
    inside = torch.arange(out.shape[1], device=device)[None] < lengths[:, None]
    return out, (out.square() * inside).sum(1) / lengths


def descend(
    model: TextModel, second: Span, placed: Placed, sentence: tuple[int, ...]
) -> tuple[tuple[int, ...], Tensor]:
    """Mend a sentence by exchanging tokens, one position at a time, for others of the batch, while that helps.

    At each position those are tried whose own rows fit best among the sentence's other tokens, one pass for all.

    Args:
        model: the model.
        second: block 1's span.
        placed: the words at their positions.
        sentence: where to start.

    Returns:
        The sentence and its residuals in block 1's span, [T].
    """
    near = placed.near
    ending = model.special.suffix[-1:]
    residuals = misfit(model, second, [sentence])[0][0]
    for _ in range(_TURNS):
        if float(residuals.square().mean()) < 1:
            break
        far = own_distances(model, second, near, sentence)
        worst = [p for p in residuals.argsort(descending=True).tolist() if p > 0]
        better = None
        # wrong tokens have the worst rows: the others are tried only where exchanging these does not help
        for part in (worst[:_WORST], worst[_WORST:]):
            tried = []
            for position in part:
                at = torch.where(near.positions == position)[0]
                fits = far[at]
                if ending and position == len(sentence) - 1:  # it would go on: its end stands behind
                    fits = own_distances(model, second, near.pick(at), (*sentence, *ending))
                tokens = near.tokens[at[fits.argsort()[:_OPTIONS]]].tolist()
                tried += exchanged(sentence, position, tokens, ending)
            tried = [one for one in dict.fromkeys(tried) if len(one) <= model.max_length]
            if not tried:
                continue
            scores, values = misfit(model, second, tried)
            short = torch.tensor([len(one) < len(sentence) for one in tried], device=values.device)
            # of a sentence cut short few rows are left to be wrong: that says nothing unless all of them fit
            values[short & (values >= 1)] = torch.inf
            best = int(values.argmin())
            if float(values[best]) < float(residuals.square().mean()) - _GAIN:
                better = tried[best], scores[best, : len(tried[best])]
                break
        if better is None:
            break
        sentence, residuals = better
    return sentence, residuals


def exchanged(
    sentence: tuple[int, ...], position: int, tokens: Sequence[int], ending: Sequence[int]
) -> list[tuple[int, ...]]:
    """Return a sentence with each of other tokens at a position; one that ends sentences ends it there.

    In the place of the end a token makes the sentence longer by one.

    Args:
        sentence: token ids.
        position: in it.
        tokens: to put there.
        ending: the token that ends every sentence, if there is one.
    """
    found: list[tuple[int, ...]] = []
    for token in tokens:
        if token == sentence[position]:
            continue
        if token in ending:
            found.append((*sentence[:position], token))
        elif position < len(sentence) - 1 or not ending:
            found.append((*sentence[:position], token, *sentence[position + 1 :]))
        else:
            found.append((*sentence[:position], token, *ending))
    return found


def own_distances(model: TextModel, second: Span, pairs: Pairs, sentence: tuple[int, ...]) -> Tensor:
    """Return how far from a deeper block's span each pair's own row lies, put alone into a sentence, [n].

    Args:
        model: the model.
        second: the span.
        pairs: tokens at positions; 1 for those behind the sentence's end.
        sentence: token ids.
    """
    far = torch.ones(len(pairs), device=pairs.positions.device)
    inside = pairs.positions < len(sentence)
    places = torch.unique(pairs.positions[inside])
    there = [torch.where(pairs.positions == place)[0] for place in places]
    if not there:
        return far
    words = pad_sequence([pairs.tokens[at] for at in there], batch_first=True)
    signal = Signal(second.layer, "q", second.basis, differences=False)  # q, k and v read the same
    rows = rows_among(model, signal, torch.tensor(sentence, device=far.device), places, words)
    for at, some in zip(there, rows, strict=True):
        far[at] = second.residual(some[: len(at)]).to(far)
    return far


@dataclass(frozen=True)
class TakenOut:
    """A sentence that was in a gradient.

    Args:
        rest: what is left without it.
        weights: by label, how much of the sentence's own gradient under that label was in it: of one label only, unless
            the loss had none such (smoothed labels, copies with several).
        proven: every rank fell by exactly its length.
    """

    rest: Remainder
    weights: tuple[float, ...]
    proven: bool

    @property
    def label(self) -> int:
        """Its class, or the one whose logit the update raises most."""
        return self.weights.index(max(self.weights))

    @property
    def share(self) -> float | None:
        """Its weight: one over the batch size, more where it was there twice, less where the client scaled the whole.

        None where it is none of one label.
        """
        return max(self.weights) if self.weights.count(0.0) == len(self.weights) - 1 else None


def take_out(
    model: TextModel, rest: Remainder, sentence: tuple[int, ...], shares: Sequence[float], layers: Sequence[int]
) -> TakenOut | None:
    """Subtract a sentence under the label and the share, or the slopes, that make the ranks fall; None when none do.

    What is proven holds for any loss of the classes' probabilities: scaled, weighted by sentence or class, of labels
    that are smoothed. A loss that sees each logit by itself (one label of several) is not looked for.

    Args:
        model: the model.
        rest: the gradient so far.
        sentence: token ids.
        shares: tried first, as one over the batch size where it is known; then the one that the gradient itself tells.
        layers: blocks whose ranks must fall, deeper than 0.
    """
    before = [rest.span(layer).rank for layer in layers]
    own = [sentence_gradient(model, sentence, y, rest.left) for y in range(model.spec.labels)]
    best: tuple[int, TakenOut] | None = None
    for tried in (_told(own, shares), _by_label(rest, own, layers[0]), _by_slopes(rest, own, layers)):
        for weights in tried:
            after = rest.without(_joined(own, weights), 1.0)
            if any(after.stacked(layer).norm() > _GROWN * rest.stacked(layer).norm() for layer in layers):
                continue  # so large a share was not in it: what is left is the sentence itself
            ranks = [after.span(layer).rank for layer in layers]
            if sum(ranks) < (sum(before) if best is None else best[0]):
                proven = all(b - a == len(sentence) for b, a in zip(before, ranks, strict=True))
                best = sum(ranks), TakenOut(after, weights, proven)
        if best is not None and best[1].proven:
            break
    return None if best is None else best[1]


def _joined(own: Sequence[Matrices], weights: Sequence[float]) -> Matrices:
    some = [(weight, gradient) for weight, gradient in zip(weights, own, strict=True) if weight]
    return {key: sum((w * g[key] for w, g in some[1:]), some[0][0] * some[0][1][key]) for key in own[0]}


def _of_one(label: int, share: float, labels: int) -> tuple[float, ...]:
    return tuple(share if y == label else 0.0 for y in range(labels))


def _told(own: Sequence[Matrices], shares: Sequence[float]) -> Iterator[tuple[float, ...]]:
    return (_of_one(label, share, len(own)) for label in range(len(own)) for share in shares)


def _by_label(rest: Remainder, own: Sequence[Matrices], layer: int) -> Iterator[tuple[float, ...]]:
    """Yield each label with the share that the gradient itself tells: of a mean, a scaled or a weighted loss."""
    for label, gradient in enumerate(own):
        share = _own_share(rest, gradient, layer)
        if share is not None and share > 0:
            yield _of_one(label, share, len(own))


def _by_slopes(rest: Remainder, own: Sequence[Matrices], layers: Sequence[int]) -> Iterator[tuple[float, ...]]:
    """Yield the weights that tell what a sentence sent, whatever slopes its logits had: smoothed labels, other losses.

    Under any loss of the probabilities its gradient is a sum of differences between those of two labels. The right sum
    lies in the columns of what is left, as each part of it does; no other does, where there are more rows than tokens.
    """
    apart = [{key: own[0][key] - gradient[key] for key in gradient} for gradient in own[1:]]
    if not apart:
        return
    outside = rest.stacked(layers[0]).new_zeros((len(apart), len(apart)))
    for layer in layers:
        left, _, _ = torch.linalg.svd(rest.stacked(layer), full_matrices=False)
        basis = left[:, : rest.span(layer).rank]
        stacked = torch.stack([Remainder(one, rest.whole, rest.eps).stacked(layer) for one in apart])
        flat = (stacked - basis @ (basis.T @ stacked)).flatten(1)
        outside += flat @ flat.T
    slopes = torch.linalg.eigh(outside)[1][:, 0]
    weights = torch.cat([slopes.sum()[None], -slopes])
    share = _own_share(rest, _joined(own, weights.tolist()), layers[0])
    if share is not None:
        yield tuple((share * weights).tolist())


def _own_share(rest: Remainder, gradient: Matrices, layer: int) -> float | None:
    """Return the share s with which a gradient G lies in what is left, M = s G + others; None where it tells none.

    Where rows and columns of the parts are independent, M^+ G has the eigenvalue 1 / s, as often as G has rank, and
    zero besides. With the wrong one of two labels s is below zero.
    """
    whole = rest.stacked(layer)
    rank = rest.span(layer).rank
    if rank == 0:
        return None
    left, values, right = torch.linalg.svd(whole, full_matrices=False)
    own = Remainder(gradient, rest.whole, rest.eps).stacked(layer)
    inner = (left[:, :rank].T @ own @ right[:rank].T) / values[:rank, None]
    once, twice = float(inner.trace()), float((inner * inner.T).sum())
    return once / twice if once != 0 and twice > 0 else None


def solve(
    model: TextModel,
    left: Matrices,
    eps: float,
    size: int | None,
    longest: int,
    *,
    starts: int = 24,
) -> tuple[list[Solved], list[tuple[int, ...]], Remainder]:
    """Recover a batch sentence by sentence, each taken out of the gradient before the next is looked for.

    Args:
        model: an encoder, dropout off.
        left: gradients of q, k, v (what was seen of them) of the first blocks.
        eps: rounding of the gradient's type.
        size: sentences in the batch; when None, found from the first sentence: its share makes the ranks fall.
        longest: positions looked at.
        starts: proposals mended a round, best fitting first.

    Returns:
        The sentences taken out; the best guesses at the others; what is left of the gradient.
    """
    rest = remainder(left, eps)
    deeper = sorted({layer for layer, _ in left if layer > 0})
    solved: list[Solved] = []
    taken_shares: list[float | None] = []
    told = size  # a scaled loss makes shares look like those of another number of sentences
    pairs = candidate_pairs(model, rest.span(0), longest)
    shares = [] if size is None else [1 / size]
    ranked: list[tuple[float, tuple[int, ...]]] = []
    placed: Placed | None = None
    while told is None or len(solved) < told:
        step("decode: sentences", len(solved), size)
        first = rest.span(0)
        if not 0 < first.rank < model.width:
            break
        # candidates are those of the whole gradient, which is sharper than what is left of it
        placed = place(model, rest, first, pairs.pick(first.residual(pairs.rows) < _NEAR))
        proposals = propose(model, placed)
        if not proposals:
            break
        if not deeper or not 0 < rest.span(deeper[0]).rank < model.width:
            ranked = [(float(at), s) for at, s in enumerate(proposals)]
            break
        second = rest.span(deeper[0])
        _, values = misfit(model, second, proposals)
        before = len(solved)
        ranked = []
        for at in values.argsort().tolist()[:starts]:
            if len(solved) > before and float(values[at]) >= 1:
                break  # a smaller gradient is easier: place the words anew
            sentence, residuals = descend(model, second, placed, proposals[at])
            if (far := float(residuals.square().mean())) >= 1:
                ranked.append((far, sentence))
                continue
            taken = take_out(model, rest, sentence, shares, deeper)
            if taken is None:  # it fits, and cannot be told apart from the rest: the first of the guesses
                ranked.append((-1.0, sentence))
                continue
            rest = taken.rest
            if size is None and taken.share is not None and _whole(1 / taken.share):
                size = round(1 / taken.share)
            # a scaled gradient holds all of them with the same share; of one that was there twice the others have half
            likely = (taken.share, None if size is None else 1 / size)
            shares = list(dict.fromkeys(share for share in likely if share is not None))
            solved.append(Solved(sentence, taken.label, taken.proven, taken.weights))
            taken_shares.append(taken.share)
            step("decode: sentences", len(solved), size)
            second = rest.span(deeper[0])
            if (told is not None and len(solved) >= told) or second.rank == 0:
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
    if deeper and placed is not None and len(placed.pairs) and len(guesses) < missing:
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
