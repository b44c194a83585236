"""Words from fewer directions than there are tokens: all are combinations of the same few rows of a known dictionary.

The gradient of an adapter's A [r, d] is (D B)^T X: r combinations of the inputs X of the batch's tokens. With more
tokens than directions no word lies in their span, and yet the words are determined. What enters block 0 is known for
every token of the vocabulary, and r directions of every adapted matrix are made of the same n of these rows. That is
sparse approximation of several signals at once: generically no other n words explain the directions while

    n <= (d + m - 1) / 2        (m independent directions; Chen and Huo, 2006, theorem 2.4)

Of coefficients that were not made for it far more words are told: a wrong set of n words explains m directions by
chance with a probability of about (error / size)^(m (d - n)), and there are (V over n) sets.

Words are found one by one by the rank-aware order recursive matching pursuit of Davies and Eldar (2012): the word whose
part off those taken lies nearest to what they leave of the directions, all directions counting alike. A wrong word on
the way does no harm. Once all right ones are there, the wrong ones' coefficients are rounding, and they are dropped.

With absolute positions x(t, p) = weight (w_t + p) / s + bias: positions and bias are directions of their own and are
taken out first, each at the cost of one of the d.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradaudit.errors import NotSupportedError
from gradaudit.leakage.adapters.chance import ALIKE, FULL, RARE, beyond_chance, could_hide, likest, log_sets
from gradaudit.leakage.adapters.noisy_words import heard
from gradaudit.leakage.rowspace.ranking import accepted, expected_by_chance
from gradaudit.leakage.uneven.entries import Entries, entries
from gradaudit.leakage.uneven.exact_rows import EXPLAINED
from gradaudit.leakage.uneven.steps import PlainStep
from gradaudit.leakage.uneven.weighted import Weighted
from gradaudit.models.base import TextModel
from gradaudit.progress import step
from gradaudit.types import NamedWord, Observation

_CLEAR = 10.0
"""A direction is known where it is so many times the largest that errors alone would make."""
_LEFT = 2.0
"""Squared residuals, in the middle squared error, at which no more words are taken."""
UNKNOWN, BOUND = 0.3, 3.0
"""Entries known worse than to this share of a typical one count as their bound, up to so many typical ones, until words
explain them."""
_FIRST, _MORE = 16, 3
"""Words taken before they are held against all entries: so many, and a third of those that are there."""
_HEARD = 4
"""Words more a round that explain most of what is left in the entries' own errors."""
IDLE = 25.0
"""A word whose coefficients each explain less than so many squared errors is none (measured, exact gradients: 1 of
wrong words, 10^6 and more of right ones)."""
_PLACES = (24, 96, 256)
"""Positions taken out: most sentences are shorter than the first, notes than the last; each costs a dimension."""
_ROOM = 0.4
"""Words taken first, as a share of the dimensions, before other positions are tried: a longer sentence is likelier than
so many words, and taking all that there is room for takes ten times as long (BERT's base size, 4 sentences: 153 s)."""
_NO_STEP = (
    "the adapters' B is still zero (no step was made with them), so that their A has no gradient, and B's tells words "
    "of fewer tokens than the rank only; an update after the first step carries signal"
)
_SEVERAL = (
    "adapters are read from one gradient, or from steps of AdamW, Adam or plain SGD from a fresh state; of this change "
    "nothing tells the gradients (another optimizer, how it was made was not told, or entries that are all of one size)"
)
_NOTHING = "nothing of the adapters stands above its errors"
_NOT_SENT = (
    "attack 'decode' needs the gradients of adapters on q, k or v of block 0, and none of them is in this update"
)


@dataclass(frozen=True)
class SparseWords:
    """Words that explain directions.

    Args:
        words: in the order in which they were found, special tokens left out; `certain` where no other word would do in
            its place, and no other set of as few explains the directions but by a chance of one in a million.
        explained: whether the words explain everything up to rounding.
        directions: independent ones that were sent.
        limit: what holds where words end, in one sentence.
    """

    words: tuple[NamedWord, ...]
    explained: bool
    directions: int
    limit: str


def dictionary(model: TextModel, places: int, rounded: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Return [V, d] what each word brings into block 0, and [n, d] what so many positions and the bias bring.

    Args:
        model: the model.
        places: positions.
        rounded: type to which the inputs were rounded before they entered; with positions only their sums were.
    """
    parts = model.first_input_parts()
    words, beside = parts.words.double(), parts.positions[:places].double()
    if parts.centered:
        words, beside = words - words.mean(1, keepdim=True), beside - beside.mean(1, keepdim=True)
    weight = parts.weight.double()
    rows = words * weight
    if rounded is not None and not places:
        rows = model.first_inputs(0).to(rounded).double()
    return rows, torch.cat([beside * weight, parts.bias.double()[None]])


@torch.no_grad()
def adapter_words(seen: Observation, level: float) -> SparseWords:
    """Return the words of block 0 that the gradients of adapters are made of.

    Args:
        seen: an update of adapters on q, k or v of block 0.
        level: where not everything is explained, share of the words returned that may be wrong.

    Raises:
        NotSupportedError: nothing of them was sent, or several steps that do not add up to a gradient.
    """
    sent = {v.name: g for r in "qkv" for v, g in zip(seen.model.views(0, r), seen.role(0, r), strict=False)}
    if not sent:
        raise NotSupportedError(_NOT_SENT)
    if not any(bool(g.any()) for g in sent.values()):
        return SparseWords((), False, 0, _NO_STEP)
    changes = entries(seen, 0)
    if changes is None and seen.kind == "delta":
        raise NotSupportedError(_SEVERAL)
    return sparse_words(seen.model, changes or exact(sent), level, bool(seen.knowledge.dropout))


def exact(gradients: Mapping[str, Tensor]) -> Entries:
    """Return gradients whose only errors are their own rounding, by name."""
    doubles = [g.detach().double() for g in gradients.values()]
    stacked = torch.cat([g / g.norm().clamp_min(1e-300) for g in doubles])
    return Entries(stacked, torch.zeros_like(stacked), PlainStep(), {name: len(g) for name, g in gradients.items()})


@torch.no_grad()
def sparse_words(model: TextModel, sent: Entries, level: float, masked: bool = False) -> SparseWords:
    """Return the words of block 0 that directions are made of.

    Args:
        model: the model.
        sent: gradients of matrices that read block 0's input.
        level: where not everything is explained, share of the words returned that may be wrong.
        masked: dropout was on: no words explain everything, and those that stand out are all there is.
    """
    every = [(_PLACES[0], FULL)] if masked else [(places, room) for room in (_ROOM, FULL) for places in _PLACES]
    if sent.even and not masked:
        every = every[len(_PLACES) :]
    if model.absolute_positions:
        sent = sent.unread()  # a word and its place were rounded together
    found: SparseWords | None = None
    for places, room in every if model.absolute_positions else [(0, FULL)]:
        found = _Pursuit(model, Weighted(sent), places, masked).words(level, room)
        if found.explained:
            break
    assert found is not None
    return found


class _Pursuit:
    """A dictionary and directions, in units of their lines and columns, off what positions bring.

    Args:
        model: the model.
        fitting: of the entries.
        places: positions taken out.
        masked: dropout was on.
    """

    def __init__(self, model: TextModel, fitting: Weighted, places: int, masked: bool = False) -> None:
        self.masked, self.noisy = masked, fitting.seen.even
        words, beside = (rows / fitting.columns for rows in dictionary(model, places, fitting.seen.rounded))
        self.beside = torch.nn.functional.normalize(beside[beside.any(1)], dim=1)
        self.whole = words
        self.out = torch.linalg.qr(self.beside.T).Q if len(self.beside) else self.beside.T
        self.rows = self._off(self.whole)
        self.fitting, self.free = fitting, fitting.target.shape[1] - self.out.shape[1]
        self.error = fitting.deviation(fitting.target)
        self.hardly = ~fitting.known | (self.error > UNKNOWN)
        self.least = _LEFT * float(self.error.median().square())
        special = model.special
        self.special, self.never = special.ids, sorted(special.ids - {*special.prefix, *special.suffix})
        self._believe(fitting.target.clamp(-BOUND, BOUND))

    def _believe(self, fit: Tensor) -> None:
        """Take a fit for the entries that are hardly known, but not below the bound of those that have one."""
        target, known = self.fitting.target, self.fitting.known
        bound = target.sign() * torch.maximum(fit * target.sign(), target.abs().clamp(max=BOUND))
        target = torch.where(self.hardly, torch.where(known, fit, bound), target)
        errors = self.error[~self.hardly]
        self.sigma = float(errors.square().mean().sqrt()) if len(errors) else 1.0
        self.sent = self._off(target)
        edge = len(target) ** 0.5 + self.free**0.5
        _, values, directions = torch.linalg.svd(self.sent, full_matrices=False)
        self.directions = directions[values > _CLEAR * self.sigma * edge]
        self.sizes = (values / (self.sigma * self.free**0.5)).log().clamp_min(0.0)

    def _off(self, rows: Tensor) -> Tensor:
        return rows - (rows @ self.out) @ self.out.T

    def words(self, level: float, room: float = FULL) -> SparseWords:
        """Return the words that explain the directions; those that stand out where none do.

        Args:
            level: see `sparse_words`.
            room: share of the dimensions that words may fill.
        """
        used: list[int] = []
        order: list[tuple[int, float]] = []
        taken: list[int] = []
        chi2 = math.inf
        while chi2 > EXPLAINED and len(self.directions):
            # a weak word may show in the entries that are known best and in no others
            heard = self._gains(used).topk(_HEARD).indices.tolist() if used and not self.masked else []
            more = self._more([*used, *heard], max(_FIRST, len(used) // _MORE))
            order += [one for one in more if one[0] not in {word for word, _ in order}]
            if self.masked and sum(chance for _, chance in order) > level * FULL * self.free:
                break  # no number of words behind these could make up for them
            taken = [*used, *(word for word, _ in more), *heard][: int(room * self.free)]
            left, own, chi2 = self._held(taken)
            self._believe(left @ self._with(taken))
            before, used = used, [word for word, one in zip(taken, own.tolist(), strict=True) if one > IDLE]
            if len(used) < len(taken):
                _, _, chi2 = self._held(used) if used else (left, own, math.inf)
            if len(used) <= len(before) or len(taken) >= int(room * self.free):
                break
        count = len(self.directions)
        told = f"{count} directions, {self.free} dimensions"
        if self.noisy and not self.masked:
            return self._amid_noise(used, told)
        if not count:
            return SparseWords((), False, 0, _NOTHING)
        if chi2 > EXPLAINED:
            first = [word for word, _ in order[: accepted([chance for _, chance in order], level)]]
            limit = f"adapters: no {len(taken)} words explain the {told}: there are more, or dropout changed their rows"
            if self.masked:
                limit = f"adapters: {len(first)} words stand out of the {told}; dropout was on, so that none is certain"
            return SparseWords(self._named(first, [False] * len(first)), False, count, limit)
        certain = self._certain(used)
        limit = f"adapters: {len(used)} words explain the {told}, {sum(certain)} of them for certain"
        return SparseWords(self._named(used, certain), True, count, limit)

    def _amid_noise(self, start: Sequence[int], told: str) -> SparseWords:
        """Return the words that stand out of noise of known size."""
        columns = self.fitting.columns
        out = torch.linalg.qr((self.beside * columns).T).Q if len(self.beside) else self.out
        found = heard(self.fitting.seen, self.whole * columns, out, start, self.never)
        explained = found.chi2 < EXPLAINED
        certain = [explained and one for one in found.certain]
        limit = (
            f"adapters: {len(found.words)} words stand out of the noise on {told}, {sum(certain)} of them for certain"
        )
        if not found.words:
            limit = _NOTHING
        return SparseWords(self._named(found.words, certain), explained, len(self.directions), limit)

    def _certain(self, used: list[int]) -> list[bool]:
        """Say of each word whether no other would do in its place, nor others that were missed."""
        lines, chance = len(self.sent), beyond_chance(len(self.sent))
        if self._by_chance(len(used)) > RARE or float(self._gains(used).max()) > chance:
            return [False] * len(used)
        _, own, chi2 = self._held(used)
        hidden = could_hide(chi2, int(self.fitting.there.sum()) - lines * len(self._with(used)))
        enough = (own * lines > hidden) & (
            own * lines * (1 - likest(self.rows, self.rows[used], used, self.never)) > chance
        )
        return [bool(one) for one in enough.tolist()]

    def _named(self, tokens: Sequence[int], certain: Sequence[bool]) -> tuple[NamedWord, ...]:
        both = zip(tokens, certain, strict=True)
        return tuple(NamedWord(token, certain=sure) for token, sure in both if token not in self.special)

    def _by_chance(self, words: int) -> float:
        """Return the logarithm of how many sets of so many words explain the directions by chance."""
        # a direction so many times its errors' length lies in other words' span by chance: one factor a free dimension
        return log_sets(len(self.rows), words) - max(self.free - words, 0) * float(self.sizes.sum())

    def _with(self, words: Sequence[int]) -> Tensor:
        """Return the rows of words, and behind them what positions bring."""
        return torch.cat([self.whole[list(words)], self.beside])

    def _more(self, known: Sequence[int], most: int) -> list[tuple[int, float]]:
        """Return words beside those known, until nothing is left, each with how many would score as high by chance."""
        rows, size = self.rows, self.rows.square().sum(1)
        units = torch.linalg.qr(rows[list(known)].T).Q.T if known else rows[:0]
        left, sent = (t - (t @ units.T) @ units for t in (self.directions, self.sent))
        along, length = rows @ left.T, size - (rows @ units.T).square().sum(1)
        found: list[tuple[int, float]] = []
        barred = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        barred[[*self.never, *known]] = True
        while len(found) < most and len(units) < FULL * self.free:
            if float(sent.square().sum()) < self.least * len(sent) * (self.free - len(units)):
                break
            step("words of adapters", len(units))
            turn, values, _ = torch.linalg.svd(left, full_matrices=False)
            whole = values > 1e-6
            score = (along @ (turn[:, whole] / values[whole])).square().sum(1)
            score = score / length.maximum(ALIKE * size).clamp_min(1e-300)
            best = int(torch.where(barred, -1.0, score).argmax())
            found.append((best, expected_by_chance(score[~barred])))
            barred[best] = True
            unit = rows[best]
            for _ in range(2):  # once more for what rounding leaves
                unit = unit - (unit @ units.T) @ units
            unit = unit / unit.norm()
            units = torch.cat([units, unit[None]])
            part = rows @ unit
            length = length - part.square()
            along = along - part[:, None] * (left @ unit)
            left = left - (left @ unit)[:, None] * unit
            sent = sent - (sent @ unit)[:, None] * unit
        return found

    def _held(self, words: Sequence[int]) -> tuple[Tensor, Tensor, float]:
        """Return signals of words held fixed, what each explains in squared errors, and what all leave of them."""
        left, own, chi2 = self.fitting.held(self._with(words))
        return left, own[: len(words)], chi2

    def _gains(self, words: Sequence[int]) -> Tensor:
        """Return [V] how much of chi^2 each word beside these explains of what they leave."""
        rows = self._with(words)
        left = self.fitting.signals(rows, 0.0)
        weights = self.fitting.weights(left @ rows, 0.0)
        rest = weights * (self.fitting.target - left @ rows)
        q = torch.linalg.qr(self.rows[list(words)].T).Q
        outside = (self.rows - (self.rows @ q) @ q.T).square().sum(1) / self.whole.square().sum(1).clamp_min(1e-300)
        # the part of a word that those held do not have, as a share: the same in every line, but for their weights
        size = (weights @ self.whole.square().T) * outside.clamp_min(ALIKE)
        gain: Tensor = ((rest @ self.whole.T).square() / size.clamp_min(1e-300)).sum(0)
        gain[[*words, *self.never]] = 0
        return gain
