"""Sentences of an encoder that no dropout touched, from entries known unevenly.

In the first block a word has one row at each position, the same in every sentence, so that rows tell neither copies nor
sentences apart. In the second block a row depends on the whole sentence. Its low rank, fitted as the first one's, holds
the rows of all sentences of the batch and of no other, within the errors of its directions: sentences are put together
from the first block's words and mended until they lie in it. Nothing of the client's is random then. So the sentences
that were found make a gradient, with no other unknown than the weight of each one's labels, and every entry has an
error to hold it against.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from gradaudit.leakage.decoding.assembly import Solved, copied, descend, different, misfit, place, propose
from gradaudit.leakage.decoding.pairs import Pairs
from gradaudit.leakage.decoding.rows import MaskedInputs, Search, whole_rows
from gradaudit.leakage.rowspace.deflation import Matrices, Remainder, remainder, sentence_gradients
from gradaudit.leakage.rowspace.subspace import Span
from gradaudit.leakage.uneven.entries import Entries, entries
from gradaudit.leakage.uneven.exact_rows import APART, EXPLAINED
from gradaudit.leakage.uneven.followed import NOT_EXPLAINED
from gradaudit.leakage.uneven.low_rank import FLOORS, Fitting
from gradaudit.models.base import TextModel
from gradaudit.progress import step
from gradaudit.types import Observation, Reconstruction

BLOCK = 1
"""The block whose rows tell sentences apart."""
_LARGEST_SHARE = 0.8
"""Largest rank tried, as a share of the width."""
_PER_SENTENCE = 5
"""Directions to start from, a sentence: few sentences are shorter."""
_NEAR = 5e-3
"""A first row this near the span is looked at, whatever the fit's own error."""
_SETTLING = (FLOORS[-1], FLOORS[-1], 0.0, 0.0)
"""Floors at which the weights of labels are solved for, each time with the bounds that then hold."""
_DEPENDENT = 1e-9
"""Gradients under two labels are one, but for their sign: weights of directions below this share are set to zero."""
_PLAIN = 1e-3
"""A sentence's gradient is that of one label where it is so near, in units of its size."""
_PASS = 6.0
"""Rounding of a whole pass forward and back, in times that of a sum over tokens: sentence by sentence and as a batch,
gradients differ by 1e-6 of their size, 1.7 to 6 times what a sum makes (MiniLM, 1 to 16 sentences, blocks 0 to 2)."""
_EVEN = 0.02
"""Shares of a batch are whole multiples of the smallest, copies' too, up to this."""
_WORTH, _WORST, _CLEARER = 10.0, 8, 0.97
"""Sentences so near, in units of what fits, are mended by all words, at so many places at once, while what is left
falls to this share (MiniLM, 1e-5, 106 tokens: one wrong word of 28 leaves 0.74, the right one 0.3)."""
_MOST_HELD = 3
"""Sentences held in turn at most, times those there are: where nothing ever explains all, as under autocast."""
_AT_ONCE = 16
"""Gradients computed together: bounds memory."""

Text = tuple[int, ...]
"""Token ids, first to last."""


class _ReadBlock:
    """One block's entries with their low rank.

    Args:
        model: the model.
        seen: entries of the block.
        layer: its number.
        first: directions to start from.
        rng: draws the noise that errors are measured with.
    """

    def __init__(self, model: TextModel, seen: Entries, layer: int, first: int, rng: torch.Generator) -> None:
        self.seen, self.fitting = seen, Fitting(seen.unread(), rng)
        named = {view.name: (layer, role) for role in "qkv" for view in model.views(layer, role)}
        self.keys = [named[name] for name in seen.groups]
        fit = self.fitting.fit(int(_LARGEST_SHARE * model.width), first=first, beyond=1)
        self.span: Span | None = None
        if fit is not None:
            self.span = Span(fit.basis, torch.ones_like(fit.lost), fit.rank, 1.0, layer, (), fit.lost, fit.scale)
            self.fitted = fit.left @ fit.rows

    def matrices(self, stacked: Tensor) -> Matrices:
        """Return a stack's matrices, by (block, role)."""
        return dict(zip(self.keys, self.seen.parts(stacked).values(), strict=True))

    def stacked(self, some: Matrices) -> Tensor:
        """Return matrices [..., out, d] as a stack, in units of lines and columns."""
        return torch.cat([some[key] for key in self.keys], -2) / self.fitting.unit


class _HeldBatch:
    """Sentences that are held to be those of the batch, and what they explain.

    Args:
        model: the model.
        blocks: of the update.

    `weights` [n, C] says how much of each sentence's gradient under each label was sent, `scales` [out, 1] by what each
    matrix was multiplied (tensors may have been normalized one by one), `chi2` what all leave of the entries, per
    degree of freedom.
    """

    def __init__(self, model: TextModel, blocks: Sequence[_ReadBlock]) -> None:
        self.model, self.blocks = model, blocks
        self.whole: Matrices = {}
        for block in blocks:
            self.whole = {**self.whole, **block.matrices(block.fitted * block.fitting.unit)}
        self.sentences: list[Text] = []
        self.own: list[list[Tensor]] = [[] for _ in blocks]
        self.weights, self.chi2 = torch.zeros(0), float("inf")
        self.scales = list[Tensor]()

    def add(self, sentence: Text) -> None:
        """Hold one more."""
        self.sentences.append(sentence)
        for own, made in zip(self.own, self.made([sentence]), strict=True):
            own.append(made[0])
        self.solve()

    def made(self, sentences: Sequence[Text]) -> list[Tensor]:
        """Return each block's gradients under each label, [n, C, out, d] in units."""
        labels = range(self.model.spec.labels)
        found = [sentence_gradients(self.model, sentences, label, self.whole) for label in labels]
        return [torch.stack([block.stacked(one) for one in found], 1) for block in self.blocks]

    def solve(self) -> None:
        """Find the weight of each sentence's labels, [n, C]: least squares over all entries as they are known."""
        count, labels = len(self.sentences), self.model.spec.labels
        fits = [block.fitted for block in self.blocks]
        self.scales = [torch.ones_like(fit[:, :1]) for fit in fits]
        for floor in _SETTLING:
            normal = fits[0].new_zeros((count * labels, count * labels))
            pull = normal[0].clone()
            known = [block.fitting.weights(fit, floor) for block, fit in zip(self.blocks, fits, strict=True)]
            for block, own, some in zip(self.blocks, self.sent(), known, strict=True):
                rows = own.flatten(0, 1).flatten(1)
                weighted = rows * some.flatten()
                normal += weighted @ rows.T
                pull += weighted @ block.fitting.target.flatten()
            scale = normal.diagonal().clamp_min(1e-300).rsqrt()
            inverse = torch.linalg.pinv(normal * scale[:, None] * scale, rtol=_DEPENDENT, hermitian=True)
            self.weights = (scale * (inverse @ (scale * pull))).view(count, labels)
            fits = self.fits()
            self._rescale(fits, known)
        self.chi2 = self._left()

    def _rescale(self, fits: Sequence[Tensor], known: Sequence[Tensor]) -> None:
        """Scale each matrix to what was sent, with 1 in the middle."""
        for at, (block, fit, some) in enumerate(zip(self.blocks, fits, known, strict=True)):
            pairs = ((some * block.fitting.target * fit), (some * fit.square()))
            sums = [[float(part.sum()) for part in block.seen.parts(one).values()] for one in pairs]
            times = [along / size if along > 0 and size > 0 else 1.0 for along, size in zip(*sums, strict=True)]
            lines = [torch.full((n, 1), t) for n, t in zip(block.seen.groups.values(), times, strict=True)]
            self.scales[at] = self.scales[at] * torch.cat(lines).to(fit)
        middle = torch.cat(self.scales).log().mean().exp()
        self.scales = [scale / middle for scale in self.scales]

    def sent(self) -> list[Tensor]:
        """Return each block's gradients of the sentences under each label, [n, C, out, d], as they were scaled."""
        return [torch.stack(own).double() * scale for own, scale in zip(self.own, self.scales, strict=True)]

    def drop(self, most: int | None) -> None:
        """Let go of sentences that explain nothing beside the others, and of the least where there are too many."""
        if not self.sentences:
            return
        fits = self.fits()
        own = self.weights.new_zeros(len(self.sentences))
        for block, some, fit in zip(self.blocks, self.sent(), fits, strict=True):
            sent = torch.einsum("nc,ncod->nod", self.weights, some)
            own += (sent.square() * block.fitting.weights(fit, 0.0)).flatten(1).sum(1)
        loudest = own.argsort(descending=True)[:most].tolist()
        kept = [at for at in sorted(loudest) if float(own[at]) > APART]
        if len(kept) < len(self.sentences):
            self.sentences = [self.sentences[at] for at in kept]
            self.own = [[some[at] for at in kept] for some in self.own]
            self.solve()

    def fits(self) -> list[Tensor]:
        """Return each block's gradient that the sentences make, in units."""
        return [torch.einsum("nc,ncod->od", self.weights, own) for own in self.sent()]

    def rest(self) -> Remainder:
        """Return what the sentences leave of the gradients that were fitted."""
        left = dict(self.whole)
        if self.sentences:
            for block, fit in zip(self.blocks, self.fits(), strict=True):
                left |= {key: left[key] - own for key, own in block.matrices(fit * block.fitting.unit).items()}
        return replace(remainder(self.whole, torch.finfo(torch.float32).eps), left=left)

    def explained(self) -> bool:
        """Say whether the sentences explain all that was sent, to the last rounding."""
        return self.chi2 < EXPLAINED

    def _left(self) -> float:
        """Return the squares that the sentences leave of all entries, per degree of freedom."""
        off, count = 0.0, -self.weights.numel()
        for block, fit in zip(self.blocks, self.fits(), strict=True):
            seen, there, gradient = block.seen, block.fitting.there, fit * block.fitting.unit
            apart = (seen.sent - seen.step.sent(gradient)) / seen.error(gradient, _PASS)
            off += float(apart[there].square().sum())
            count += int(there.sum())
        return off / count

    def solved(self, proven: Sequence[bool]) -> tuple[list[Solved], list[float | None]]:
        """Return the sentences with their labels, and each one's share where it has one label."""
        found, shares = list[Solved](), list[float | None]()
        for at, sentence in enumerate(self.sentences):
            options = torch.cat([own[at].flatten(1) for own in self.own], 1).double()
            sent = self.weights[at] @ options
            along = (options @ sent) / options.square().sum(1).clamp_min(1e-300)
            off = (sent - along[:, None] * options).norm(dim=1) / sent.norm().clamp_min(1e-300)
            off = torch.where(along > 0, off, torch.inf)
            label = int(off.argmin())
            share = float(along[label]) if float(off[label]) < _PLAIN else None
            weights = [share if y == label else 0.0 for y in range(len(along))] if share else self.weights[at].tolist()
            found.append(Solved(sentence, label, proven[at], tuple(weights)))
            shares.append(share)
        return found, shares

    def apart(self, at: int) -> float:
        """Return the growth of chi^2 by the likest other word in each place, the least of them."""
        sentence, parts = self.sentences[at], self.model.first_input_parts()
        special, least = self.model.special.ids, float("inf")
        others = []
        for spot, token in enumerate(sentence):
            if token in special:
                continue
            far = (parts.words - parts.words[token]).norm(dim=1)
            far[[token, *special]] = torch.inf
            others.append((*sentence[:spot], int(far.argmin()), *sentence[spot + 1 :]))
        known = [b.fitting.weights(fit, 0.0) for b, fit in zip(self.blocks, self.fits(), strict=True)]
        for start in range(0, len(others), _AT_ONCE):
            growth = known[0].new_zeros(())
            made = self.made(others[start : start + _AT_ONCE])
            for own, some, scale, weights in zip(self.own, made, self.scales, known, strict=True):
                moved = torch.einsum("c,ncod->nod", self.weights[at].to(some), some - own[at])
                growth = growth + ((moved.double() * scale).square() * weights).flatten(1).sum(1)
            least = min(least, float(growth.min()))
        return least


def undropped(
    seen: Observation, first: Entries, how: Search, starts: int, rng: torch.Generator
) -> Reconstruction | None:
    """Return the sentences of a batch; None where none was found: masked rows, no low rank, the second block not sent.

    Args:
        seen: the observation, of an encoder that classifies.
        first: entries of its block 0.
        how: how far to look.
        starts: proposals mended a turn, best fitting first.
        rng: draws the noise that errors are measured with.
    """
    model = seen.model
    second = entries(seen, BLOCK) if model.depth > BLOCK and model.absolute_positions else None
    if second is None:
        return None
    how, start = replace(how, rate=0.0), _PER_SENTENCE * (how.size or 1) + 1
    one = _ReadBlock(model, first, 0, start, rng)
    if one.span is None:
        return None
    pairs = _pairs(model, MaskedInputs(model, one.span, _NEAR, first.rounded, first.weights), how)
    if not bool((pairs.positions == 0).any()):
        return None
    two = _ReadBlock(model, second, BLOCK, start, rng)
    if two.span is None:
        return None
    batch = _HeldBatch(model, (one, two))
    kind = first.rounded if first.weights is None else None
    with torch.autocast(model.device.type, kind, enabled=kind is not None):
        nearest = _found(model, batch, two.span, pairs, how.size, starts)
        if not batch.sentences:
            return None
        chi2, whole = batch.chi2, batch.explained()
        solved, shares = batch.solved([whole and batch.apart(at) > APART for at in range(len(batch.sentences))])
    if whole and how.size is not None:
        solved = copied(solved, shares, how.size)
    missing = 0 if whole or how.size is None else how.size - len(solved)
    guesses = different(nearest, missing) if missing else []
    certificates = ["proven" if one.proven else "likely" for one in solved] + ["guess"] * len(guesses)
    told = [one.label for one in solved if one.label is not None]
    # smoothed labels may turn a gradient's sign; their shares differ, and are no multiples of one
    plain = [share for share in shares if share is not None]
    even = len(plain) == len(shares) and all(abs(s / min(plain) - round(s / min(plain))) < _EVEN for s in plain)
    labels = tuple(told) if even and not guesses and len(told) == len(solved) else None
    details: dict[str, Any] = {"rank": one.span.rank, "rank_of_block_1": two.span.rank, "chi2": round(chi2, 3)}
    notes = () if whole else (NOT_EXPLAINED,)
    sequences = (*(one.tokens for one in solved), *guesses)
    return Reconstruction(sequences, labels, tuple(certificates), notes, details)


def _pairs(model: TextModel, inputs: MaskedInputs, how: Search) -> Pairs:
    """Return the words that lie in the first block's span, at each position."""
    first = model.special.prefix[:1]
    rows = [row for row in whole_rows(inputs, how, []) if not first or (row.position == 0) == (row.token == first[0])]
    width = len(inputs.basis)
    clean = torch.stack([row.clean for row in rows]) if rows else inputs.basis.new_zeros((0, width))
    positions, tokens = (
        torch.tensor([getattr(row, name) for row in rows], dtype=torch.long, device=clean.device)
        for name in ("position", "token")
    )
    return Pairs(positions, tokens, clean)


def _found(
    model: TextModel, batch: _HeldBatch, span: Span, pairs: Pairs, size: int | None, starts: int
) -> list[tuple[float, Text]]:
    """Hold the sentences that lie in the second block's span, and return the others that were near, with how far."""
    nearest: list[tuple[float, Text]] = []
    first = batch.rest().span(0)
    tried: set[Text] = set()
    while not batch.explained() and len(tried) < _MOST_HELD * (size or span.rank):
        step(f"decode: {len(batch.sentences)} of {size or '?'} sentences", len(batch.sentences), size)
        before = len(tried)
        placed = place(model, batch.rest(), first, pairs)
        proposals = propose(model, placed)
        if not proposals:
            break
        _, values = misfit(model, span, proposals)
        nearest = []
        for at in values.argsort().tolist()[:starts]:
            if any(_alike(proposals[at], one) for one in batch.sentences):
                continue
            sentence, rows = descend(model, span, placed, proposals[at])
            if float(rows.square().mean()) < _WORTH:
                sentence, rows = _mended(model, span, pairs, sentence, rows)
            if (far := float(rows.square().mean())) >= 1:
                nearest.append((far, sentence))
            elif sentence not in tried:
                tried.add(sentence)
                batch.add(sentence)
                if batch.explained():
                    break
        # what all of them explain, a wrong one does not
        batch.drop(size)
        if len(tried) == before:
            break
    return nearest


def _mended(model: TextModel, span: Span, pairs: Pairs, sentence: Text, rows: Tensor) -> tuple[Text, Tensor]:
    """Exchange words whose rows lie farthest off for others of the first block's span, or two, while that helps.

    In a long sentence one wrong word moves the mean little, and words of weak signals are not among those proposed.
    """
    while True:
        worst = [p for p in rows.argsort(descending=True).tolist() if 0 < p < len(sentence) - 1][:_WORST]
        options: list[tuple[tuple[int, int], ...]] = [
            ((p, t),) for p in worst for t in pairs.tokens[pairs.positions == p].tolist()
        ]
        options += [((p, sentence[q]), (q, sentence[p])) for p, q in combinations(worst, 2)]
        allowed = [one for one in options if not {t for _, t in one} & model.special.ids]
        tried = [_with(sentence, one) for one in allowed if any(sentence[p] != t for p, t in one)]
        if not tried:
            return sentence, rows
        every, values = misfit(model, span, tried)
        best = int(values.argmin())
        if float(values[best]) > _CLEARER * float(rows.square().mean()):
            return sentence, rows
        sentence, rows = tried[best], every[best, : len(sentence)]


def _with(sentence: Text, words: Iterable[tuple[int, int]]) -> Text:
    """Return a sentence with other tokens at some places."""
    other = dict(words)
    return tuple(other.get(place, token) for place, token in enumerate(sentence))


def _alike(one: Text, other: Text) -> bool:
    """Say whether most words of one sentence stand in the other where they stand."""
    return 2 * sum(a == b for a, b in zip(one, other, strict=False)) > len(one)
