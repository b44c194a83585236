"""What whole sentences explain of an update that no dropout touched: only the weights of their labels are free."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gradaudit.leakage.decoding.assembly import Solved, copied, different
from gradaudit.leakage.rowspace.deflation import Matrices, Remainder, remainder, sentence_gradients
from gradaudit.leakage.rowspace.subspace import Span
from gradaudit.leakage.uneven.entries import Entries
from gradaudit.leakage.uneven.exact_rows import APART, EXPLAINED, NOT_EXPLAINED
from gradaudit.leakage.uneven.low_rank import FLOORS, LARGEST_SHARE, Fitting
from gradaudit.models.base import TextModel
from gradaudit.models.views import ROLES
from gradaudit.types import Reconstruction

_SETTLING = (FLOORS[-1], FLOORS[-1], 0.0, 0.0)
"""Floors at which the weights of labels are solved for, each time with the bounds that then hold."""
_DEPENDENT = 1e-9
"""Gradients under two labels are one, but for their sign: weights of directions below this share are set to zero."""
_PLAIN = 1e-3
"""A sentence's gradient is that of one label where it is so near, in units of its size, or half a unit in the last
place of the type that a pass was rounded to: a processor may round one sentence otherwise than the batch (bfloat16 on
AMX: 2e-3, without 3e-4; the other label is at 1e-2)."""
PASS = 6.0
"""Rounding of a whole pass forward and back, in times that of a sum over tokens: sentence by sentence and as a batch,
gradients differ by 1e-6 of their size, 1.7 to 6 times what a sum makes (MiniLM, 1 to 16 sentences, blocks 0 to 2)."""
_EVEN = 0.02
"""Shares of a batch are whole multiples of the smallest, copies' too, up to this."""
_AT_ONCE = 16
"""Gradients computed together: bounds memory."""

Text = tuple[int, ...]
"""Token ids, first to last."""


class ReadBlock:
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
        named = {view.name: (layer, role) for role in ROLES for view in model.views(layer, role)}
        self.keys = [named[name] for name in seen.groups]
        try:
            fit = self.fitting.fit(int(LARGEST_SHARE * model.width), first=first, beyond=1)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # bounds alone let both factors grow without end
            fit = None
        self.span: Span | None = None
        if fit is not None:
            self.span = fit.span(layer)
            self.fitted = fit.left @ fit.rows

    def matrices(self, stacked: Tensor) -> Matrices:
        """Return a stack's matrices, by (block, role)."""
        return dict(zip(self.keys, self.seen.parts(stacked).values(), strict=True))

    def stacked(self, some: Matrices) -> Tensor:
        """Return matrices [..., out, d] as a stack, in units of lines and columns."""
        return torch.cat([some[key] for key in self.keys], -2) / self.fitting.unit


class HeldBatch:
    """Sentences that are held to be those of the batch, and what they explain.

    Args:
        model: the model.
        blocks: of the update.

    `weights` [n, C] says how much of each sentence's gradient under each label was sent, `scales` [out, 1] by what each
    matrix was multiplied (tensors may have been normalized one by one), `chi2` what all leave of the entries, per
    degree of freedom.
    """

    def __init__(self, model: TextModel, blocks: Sequence[ReadBlock]) -> None:
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
        """Scale each matrix to what was sent."""
        for at, (block, fit, some) in enumerate(zip(self.blocks, fits, known, strict=True)):
            pairs = ((some * block.fitting.target * fit), (some * fit.square()))
            sums = [[float(part.sum()) for part in block.seen.parts(one).values()] for one in pairs]
            times = [along / size if along > 0 and size > 0 else 1.0 for along, size in zip(*sums, strict=True)]
            lines = [torch.full((n, 1), t) for n, t in zip(block.seen.groups.values(), times, strict=True)]
            self.scales[at] = self.scales[at] * torch.cat(lines).to(fit)

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
            apart = (seen.sent - seen.step.sent(gradient)) / seen.error(gradient, PASS)
            off += float(apart[there].square().sum())
            count += int(there.sum())
        return off / count

    def solved(self, proven: Sequence[bool]) -> tuple[list[Solved], list[float | None]]:
        """Return the sentences with their labels, and each one's share where it has one label."""
        found, shares = list[Solved](), list[float | None]()
        narrow = [torch.finfo(kind).eps / 2 for block in self.blocks if (kind := block.seen.rounded) is not None]
        plain = max([_PLAIN, *narrow])
        for at, sentence in enumerate(self.sentences):
            options = torch.cat([own[at].flatten(1) for own in self.own], 1).double()
            sent = self.weights[at] @ options
            along = (options @ sent) / options.square().sum(1).clamp_min(1e-300)
            off = (sent - along[:, None] * options).norm(dim=1) / sent.norm().clamp_min(1e-300)
            off = torch.where(along > 0, off, torch.inf)
            label = int(off.argmin())
            share = float(along[label]) if float(off[label]) < plain else None
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


def held_sentences(
    batch: HeldBatch, size: int | None, near: Iterable[tuple[float, Text]], details: dict[str, Any]
) -> Reconstruction:
    """Return what is held, each sentence proven that no other word could replace where all of them explain everything.

    Args:
        batch: sentences that are held.
        size: of the batch; None where that is not known.
        near: other sentences with how far they are from fitting, which stand in for those that are missing.
        details: of how they were found.
    """
    whole = batch.explained()
    solved, shares = batch.solved([whole and batch.apart(at) > APART for at in range(len(batch.sentences))])
    if whole and size is not None:
        solved = copied(solved, shares, size)
    missing = 0 if whole or size is None else size - len(solved)
    guesses = different(list(near), missing) if missing else []
    certificates = ["proven" if one.proven else "likely" for one in solved] + ["guess"] * len(guesses)
    labels = [one.label for one in solved if one.label is not None]
    # smoothed labels may turn a gradient's sign; their shares differ, and are no multiples of one
    plain = [share for share in shares if share is not None]
    even = len(plain) == len(shares) and all(abs(s / min(plain) - round(s / min(plain))) < _EVEN for s in plain)
    named = tuple(labels) if even and not guesses and len(labels) == len(solved) else None
    notes = () if whole else (NOT_EXPLAINED,)
    sequences = (*(one.tokens for one in solved), *guesses)
    return Reconstruction(sequences, named, tuple(certificates), notes, details | {"chi2": round(batch.chi2, 3)})
