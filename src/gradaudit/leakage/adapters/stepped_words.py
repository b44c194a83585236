"""Words from adapters after several steps of Adam or AdamW, which no step shows by itself.

A of an adapter has moved by a sum of K steps, and each step's entries are its gradient's signs but for what lies near
zero. Yet all K gradients are combinations of the same few rows, those of the batch's words in block 0, and thousands of
entries share each row. Words are taken one by one: that which explains most of what the fit leaves, as the fit stands;
then all signals are fitted anew with priors of their own (see `step_signals`), and a word that no line needs is let go.

With all words there, lines are explained to the last rounding, which no other set of words does: these prove the words
they need. Lines are fitted each by itself, and some end in a wrong valley; they prove nothing and are left out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import normalize

from gradaudit.leakage.adapters.chance import RARE, beyond_chance, could_hide, likest, log_sets
from gradaudit.leakage.adapters.sparse_words import IDLE, SparseWords, dictionary
from gradaudit.leakage.rowspace.ranking import accepted, expected_by_chance
from gradaudit.leakage.uneven.step_signals import SignalFit, StepSignals
from gradaudit.leakage.uneven.summed import Summed
from gradaudit.models.base import TextModel
from gradaudit.progress import step
from gradaudit.types import NamedWord

_DEGREE = 2
"""Of the polynomial by which a word's signals change over the steps of a whole batch, while words are sought."""
_AT_ONCE, _MORE, _NEAR, _ALIKE = 3, 10, 0.5, 0.4
"""Words taken together: so many, and one for so many that are there; each explains this share of the best one's at
least, and resembles no other (cosine)."""
_LOUD = 100.0
"""A line counts no more than this for a word: few entries near zero make chance look loud."""
_NEEDED, _FEW = 3.0, 6
"""A word whose signals are on average less than so many times their variance is let go, once there are so many."""
_TURNS, _TRIES = 3, 4
"""Turns in which priors are learned after each taking, of so many steps of descent."""
_STANDS_OUT, _OUT = 0.1, 2
"""Words expected to explain as much by chance, of one that is taken (ten batches of one to eight sentences: right ones
mostly below, down to 1e-27; wrong ones mostly above, to 30), and times that one is let go before it is barred."""
_BOLD = 6
"""Times that the best words are taken though they do not stand out: what they are shows when the rest is there."""
_FINE = 0.3
"""Signals of a line, as a share of its entries, up to which a word's may change more freely from step to step."""
_FULL = 0.6
"""Signals of a line at most, as a share of its entries."""
_SETTLE = 12
"""Turns at the end, and from each new start."""
_STARTS = (-2.0, -1.0, -0.3, 0.3, 0.7, 1.5, 2.5)
"""Last step's signals over the first one's, of the starts for lines that are not explained."""
_SIZES = (100.0, 10.0, 30.0)
"""Sizes of those starts, in units of eps."""
_ENOUGH = 0.5
"""Share of the lines that are explained with which the search for better starts ends."""
_ALIKE_AMONG = 60
"""Best words among which those that are taken together are looked for."""
_DEVIATIONS = 6.0
"""A line is explained where its chi^2 is so many of its standard deviations above 1 at most (right words, settled: 0.6
to 1.1, by hand; lines that did not settle 2 to 10^10)."""
_PLACES = 24
"""Positions whose rows may be there beside words, in models that add them."""


def times(steps: int, whole: bool, silent: bool, most: int) -> Tensor:
    """Return [P, K] how the signals of a word may change from step to step.

    Args:
        steps: K.
        whole: every step saw the whole batch: signals change smoothly. Else a word is there or not.
        silent: the first step's gradient was zero.
        most: functions at most, for a whole batch.
    """
    seen = steps - silent
    if not whole or seen <= most:
        some = torch.eye(seen, dtype=torch.double)
    else:
        at = torch.linspace(-1, 1, seen, dtype=torch.double)
        some = torch.linalg.qr(torch.stack([at**power for power in range(most)], 1)).Q.T * math.sqrt(seen)
    return torch.cat([torch.zeros(len(some), steps - seen, dtype=torch.double), some], 1)


@torch.no_grad()
def stepped_words(model: TextModel, sent: Summed, level: float, whole: bool) -> SparseWords:
    """Return the words of block 0 that the gradients of several steps are made of.

    Args:
        model: the model.
        sent: what the steps took of matrices that read block 0's input.
        level: share of the words returned that may be wrong, where no line is explained.
        whole: every step saw the whole batch.
    """
    return _Search(model, sent, whole).words(level)


@dataclass(frozen=True)
class _Taken:
    """Words with their signals; positions' rows are the first, where a model adds them."""

    words: tuple[int, ...]
    rows: Tensor
    found: StepSignals


class _Search:
    """A dictionary, and what several steps took.

    Args:
        model, sent, whole: see `stepped_words`.
    """

    def __init__(self, model: TextModel, sent: Summed, whole: bool) -> None:
        self.sent, self.whole, self.silent = sent, whole, sent.silent
        words, beside = dictionary(model, _PLACES)
        size = math.sqrt(model.width)
        self.rows = size * normalize(words, dim=1)
        self.beside = size * normalize(beside[beside.any(1)], dim=1)
        special = model.special
        self.special, self.never = special.ids, sorted(special.ids - {*special.prefix, *special.suffix})
        self.steps = len(sent.step.shares)
        self.fit = self._fit(_DEGREE + 1)

    def _fit(self, most: int) -> SignalFit:
        base = times(self.steps, self.whole, self.silent, most).to(self.rows.device)
        return SignalFit(self.sent.sent, self.sent.spread, self.sent.step, base)

    def words(self, level: float) -> SparseWords:
        """Return the words that explained lines need; those that stand out where no line is explained."""
        taken, chances = self._sought()
        count = len(self.sent.sent)
        told = f"the changes of {count} directions over {self.steps} steps"
        first = sorted(taken.words, key=chances.__getitem__)
        first = first[: accepted([chances[word] for word in first], level)]
        if taken.words and (proven := self._proven(taken)) is not None:
            words, sure, lines = proven
            limit = f"adapters: {len(words)} words explain {lines} of {told}, {sum(sure)} of them for certain"
            # a word may send nothing to these lines, as a sentence's first one does to queries
            more = [word for word in first if word not in words] if lines < _ENOUGH * len(self.sent.sent) else []
            return SparseWords(self._named([*words, *more], [*sure, *[False] * len(more)]), False, count, limit)
        limit = f"adapters: {len(first)} words stand out of {told}, and explain none wholly: none is certain"
        return SparseWords(self._named(first, [False] * len(first)), False, count, limit)

    def _named(self, tokens: Sequence[int], certain: Sequence[bool]) -> tuple[NamedWord, ...]:
        both = zip(tokens, certain, strict=True)
        return tuple(NamedWord(token, certain=sure) for token, sure in both if token not in self.special)

    def _start(self) -> _Taken:
        sent, base = self.sent.sent, self.fit.times
        signals = sent.new_zeros(len(base), len(sent), len(self.beside))
        slopes = torch.stack([torch.full_like(sent, share) for share in self.sent.step.shares])
        zero, wide = torch.zeros_like(sent), signals.new_ones(len(base), len(self.beside))
        left = sent.square().mean(1)
        return _Taken((), self.beside, StepSignals(signals, signals + 1, wide, zero, slopes, left, left))

    def _sought(self) -> tuple[_Taken, dict[int, float]]:
        """Return the words taken, and of each how many would by chance have explained as much."""
        taken, chances, out = self._start(), dict[int, float](), dict[int, int]()
        tries = bold = 0
        while self._room(taken) > 0:
            barred = [word for word, count in out.items() if count >= _OUT]
            new = self._standing_out(taken, barred, _STANDS_OUT)
            if not new and (not taken.words or tries == len(_SIZES)) and bold < _BOLD:
                new, bold = self._standing_out(taken, barred, math.inf), bold + 1
            elif new:
                tries = 0
            if new:
                taken = self._with(taken, list(new))
                chances |= {word: chance for word, chance in new.items() if word not in chances}
                taken = replace(taken, found=self.fit.settled(taken.found, taken.rows, _TURNS, _TRIES))
                taken, gone = self._pruned(taken)
                for word in gone:
                    out[word] = out.get(word, 0) + 1
            elif not taken.words or tries == len(_SIZES) or self._enough(taken):
                break
            elif self._finer(taken):
                fit = self._fit(2 * len(self.fit.times))
                found = self._as(fit, taken)
                self.fit, taken = fit, replace(taken, found=fit.settled(found, taken.rows, _TURNS, _TRIES))
            else:
                every = torch.ones(len(self.sent.sent), dtype=torch.bool, device=self.rows.device)
                taken = replace(taken, found=self._tried(self.fit, taken.rows, taken.found, every, _SIZES[tries]))
                tries += 1
            step(f"words of adapters, {self.steps} steps together", len(taken.words))
        return taken, chances

    def _room(self, taken: _Taken) -> int:
        """Return how many words more a line can tell."""
        return int(_FULL * self.rows.shape[1] / len(self.fit.times)) - len(taken.rows)

    def _enough(self, taken: _Taken) -> bool:
        """Say whether so many lines are explained that nothing is missing."""
        return float(self._explained(self.fit, taken.found, taken.rows).double().mean()) > _ENOUGH

    def _finer(self, taken: _Taken) -> bool:
        """Say whether signals may change from step to step more freely than they do, with so many words."""
        count = len(self.fit.times)
        return (
            self.whole and count < self.steps - self.silent and 2 * count * len(taken.rows) < _FINE * self.rows.shape[1]
        )

    def _standing_out(self, taken: _Taken, barred: Sequence[int], most: float) -> dict[int, float]:
        """Return words that explain most of what is left, with how many would by chance, while these are at most so."""
        gains, found = self._gains(taken, barred), dict[int, float]()
        for word in self._best(gains, min(_AT_ONCE + len(taken.words) // _MORE, self._room(taken))):
            chance = expected_by_chance(gains)
            if chance > most:
                break
            found[word] = chance
            gains[word] = 0
        return found

    def _gains(self, taken: _Taken, barred: Sequence[int]) -> Tensor:
        """Return [V] how much of what is left each word explains."""
        base = self.fit.times
        if not taken.words:
            groups = [base[:1]] if self.whole else list(base[:, None])
        else:
            groups = [base[:2]] if self.whole else list(base[:, None])
        found = [self.fit.gains(taken.found, self.rows, some).clamp(max=_LOUD).sum(0) for some in groups]
        gains = torch.stack(found).amax(0)
        gains[[*self.never, *taken.words, *barred]] = 0
        return gains

    def _best(self, gains: Tensor, most: int) -> list[int]:
        """Return the words that explain most, none of them like another one."""
        found: list[int] = []
        best = float(gains.max())
        for word in gains.topk(min(_ALIKE_AMONG, len(gains))).indices.tolist():
            if len(found) == most or float(gains[word]) <= _NEAR * best:
                break
            near = self.rows[found] @ self.rows[word] / self.rows.shape[1]
            if not bool((near > _ALIKE).any()):
                found.append(word)
        return found

    def _with(self, taken: _Taken, words: Sequence[int]) -> _Taken:
        """Return what was taken and words more, of which nothing was sent yet."""
        found, more = taken.found, (0, len(words))
        wide = float(found.wide[:, len(self.beside) :].median()) if taken.words else 1.0
        grown = replace(
            found,
            signals=torch.nn.functional.pad(found.signals, more),
            spread=torch.nn.functional.pad(found.spread, more),
            wide=torch.nn.functional.pad(found.wide, more, value=wide),
        )
        return _Taken((*taken.words, *words), torch.cat([taken.rows, self.rows[list(words)]]), grown)

    def _pruned(self, taken: _Taken) -> tuple[_Taken, list[int]]:
        """Return what was taken without the words that no line needs, and these."""
        need = (taken.found.signals.square() / taken.found.spread).mean(1).amax(0)[len(self.beside) :].tolist()
        if len(taken.words) <= _FEW or min(need) > _NEEDED:
            return taken, []
        kept = [at for at, one in enumerate(need) if one > _NEEDED]
        gone = [word for word, one in zip(taken.words, need, strict=True) if one <= _NEEDED]
        return self._only(taken, kept, self.fit), gone

    def _only(self, taken: _Taken, kept: Sequence[int], fit: SignalFit) -> _Taken:
        """Return some of the words taken, with what they make."""
        at = [*range(len(self.beside)), *(len(self.beside) + one for one in kept)]
        found, rows = taken.found, taken.rows[at]
        signals = found.signals[:, :, at]
        made, slopes = fit.step.taken(fit.gradients(signals, rows))
        less = replace(
            found, signals=signals, spread=found.spread[:, :, at], wide=found.wide[:, at], fit=made, slopes=slopes
        )
        return _Taken(tuple(taken.words[one] for one in kept), rows, less)

    def _proven(self, taken: _Taken) -> tuple[list[int], list[bool], int] | None:
        """Return the words that explained lines need, which of them are certain, and how many lines; None for none."""
        fit = self._fit(max(int(_FULL * self.rows.shape[1] / len(taken.rows)), 1))
        found = fit.settled(self._as(fit, taken), taken.rows, _SETTLE, _TRIES)
        explained = self._explained(fit, found, taken.rows)
        for size in _SIZES:
            if float(explained.double().mean()) > _ENOUGH:
                break
            found = self._tried(fit, taken.rows, found, ~explained, size)
            explained = self._explained(fit, found, taken.rows)
        lines = torch.where(explained)[0]
        if len(lines) == 0:
            return None
        fit = fit.lines(lines)
        alone = _Taken(taken.words, taken.rows, found.lines(lines))
        need = self._needs(fit, alone)
        kept = torch.where(need.mean(0) > IDLE)[0].tolist()
        only = self._only(alone, kept, fit)
        need = self._needs(fit, only)
        chi2 = self._chi2(fit, self._free(fit, only), only.rows, lines)
        still = chi2 < self._limit(fit, only.rows)
        if not kept or not bool(still.any()):
            return None
        chance = beyond_chance(int(still.sum()))
        strengths = need[still].sum(0)
        alone_costs = strengths * (1 - likest(self.rows, only.rows, only.words, self.never))
        free = self.rows.shape[1] - fit.times.shape[0] * len(only.rows)
        error = float((fit.error[still] / fit.sent[still].square().mean(1, keepdim=True).sqrt()).log().mean())
        lone = log_sets(len(self.rows), len(kept)) + int(still.sum()) * free * error < RARE
        hidden = could_hide(float(chi2[still].mean()), int(still.sum()) * free)
        certain = lone & (strengths > hidden) & (alone_costs > chance)
        return list(only.words), [bool(one) for one in certain.tolist()], int(still.sum())

    def _as(self, fit: SignalFit, taken: _Taken) -> StepSignals:
        """Return the signals that were found, as other functions of the steps."""
        per_step = torch.einsum("pk,pnr->knr", self.fit.times, taken.found.signals)
        return self._from(fit, per_step, taken.found.left, taken.rows)

    def _from(self, fit: SignalFit, per_step: Tensor, left: Tensor, rows: Tensor) -> StepSignals:
        """Return signals [K, n, r] to start from."""
        shape = (len(fit.times), *per_step.shape[1:])
        signals = torch.linalg.lstsq(fit.times.T, per_step.flatten(1)).solution.reshape(shape)
        wide = signals.square().mean(1).clamp_min(1.0)
        made, slopes = fit.step.taken(fit.gradients(signals, rows))
        return StepSignals(signals, torch.ones_like(signals), wide, made, slopes, left, left)

    def _tried(self, fit: SignalFit, rows: Tensor, found: StepSignals, open_: Tensor, size: float) -> StepSignals:
        """Return signals with the open lines found anew from other starts, where one leaves less."""
        lines = torch.where(open_)[0]
        some = fit.lines(lines)
        sign = torch.linalg.lstsq(rows.T, some.sent.sign().T).solution.T
        at = torch.linspace(0, 1, self.steps, dtype=rows.dtype, device=rows.device)
        for last in _STARTS if self.steps > 1 else _STARTS[-1:]:
            per_step = (size * (1 + (last - 1) * at))[:, None, None] * sign
            start = self._from(some, per_step, some.sent.square().mean(1), rows)
            new = some.settled(start, rows, _SETTLE, _TRIES)
            better = new.left < found.left[lines]
            found = found.put(lines[better], new.lines(torch.where(better)[0]))
        return found

    def _free(self, fit: SignalFit, taken: _Taken) -> StepSignals:
        """Return signals of which nothing but their errors is known before."""
        start = replace(
            taken.found, left=torch.zeros_like(taken.found.left), wide=torch.full_like(taken.found.wide, 1e12)
        )
        return fit.descended(start, taken.rows, 5 * _TRIES)

    def _needs(self, fit: SignalFit, taken: _Taken) -> Tensor:
        """Return [n, words] by how many squared errors each line needs each word."""
        found = self._free(fit, taken)
        need: Tensor = (found.signals.square() / found.spread).amax(0)[:, len(self.beside) :]
        return need

    def _explained(self, fit: SignalFit, found: StepSignals, rows: Tensor) -> Tensor:
        """Say of each line whether the fit explains it up to its errors."""
        explained: Tensor = self._chi2(fit, found, rows) < self._limit(fit, rows)
        return explained

    @staticmethod
    def _limit(fit: SignalFit, rows: Tensor) -> float:
        """Return what an explained line leaves at most, per degree of freedom."""
        return 1 + _DEVIATIONS * math.sqrt(2 / (rows.shape[1] - len(fit.times) * len(rows)))

    def _chi2(self, fit: SignalFit, found: StepSignals, rows: Tensor, lines: Tensor | None = None) -> Tensor:
        """Return what a fit leaves of each line, in squared errors per degree of freedom."""
        gradients = fit.gradients(found.signals, rows)
        some = (
            self.sent if lines is None else replace(self.sent, spread=self.sent.spread[lines], groups={"": len(lines)})
        )
        off = (fit.sent - found.fit).square() / some.error(gradients, found.slopes).square()
        chi2: Tensor = off.sum(1) / (rows.shape[1] - len(fit.times) * len(rows))
        return chi2
