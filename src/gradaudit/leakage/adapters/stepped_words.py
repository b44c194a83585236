"""Words from adapters after several steps of Adam or AdamW, which no step shows by itself.

A of an adapter has moved by a sum of K steps, and each step's entries are its gradient's signs but for what lies near
zero. Yet all K gradients are combinations of the same few rows, those of the batch's words in block 0, and thousands of
entries share each row. Some hundred candidates are weighed together (see `propagation`); the weak ones give way to the
words that explain most of what is left, until nothing is.

With all words there, lines are explained to the last rounding, which no other set of words does: these prove the words
they need. Lines are fitted each by itself, and some end in a wrong valley; they prove nothing and are left out.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import normalize

from gradaudit.leakage.adapters.chance import RARE, beyond_chance, could_hide, likest, log_sets
from gradaudit.leakage.adapters.sparse_words import IDLE, SparseWords, dictionary
from gradaudit.leakage.uneven.propagation import MOST_PARTS, Propagation
from gradaudit.leakage.uneven.step_signals import SignalFit, StepSignals
from gradaudit.leakage.uneven.summed import Summed
from gradaudit.models.base import TextModel
from gradaudit.progress import step
from gradaudit.streams import stream
from gradaudit.types import NamedWord

_SMOOTH = 2
"""Parts in which a word's signals change over the steps of a whole batch, while words are sought: mean and slope."""
_FIRST, _NEW, _MOST = 200, 40, 600
"""Words weighed at first, words that come in together, and signals a line at most (words times parts): time goes with
their third power."""
_RIDGE = 0.5
"""Share of a word's own direction that the first view takes for what all words have in common."""
_APART, _AGAIN = 20.0, 12
"""Words so many times as strong as all others may be all that there are: descent tries, and again so many turns later
(a single sentence: 7,113 to 41 after 12 turns, and noise far from gone after 90)."""
_TWINS = 0.98
"""Cosine of two rows above which they are taken for one."""
_TURNS, _EVERY, _YOUNG = 200, 3, 2
"""Turns at most, turns between exchanges of candidates, and exchanges before a new one is judged."""
_HEARD, _SENT = 2.0, 3.0
"""Squared errors a line that a word explains to stay a candidate, and to count as sent (chance makes 1 of one word; the
strongest wrong one of a batch of eight made 2 on the way, and right ones 6 at least when all were there)."""
_MARGIN = 2.0
"""A word counts where it is so many times as strong as decoys: chance's best ones are often words (of changes that no
word made, three tiny models: 3 and 4 words were stronger than any decoy, none twice as strong)."""
_CLEAR, _STILL, _PATIENT, _ANEW, _HELD = 300.0, 0.95, 4, 2, 4
"""Noise at which descent does the rest, in errors; what is left of it after an exchange where nothing moves, such
exchanges in a row that end a search, and how often it begins again (eight sentences of 59 words over two steps, 49 of
them held: 58 after the first time)."""
_FULL = 0.6
"""Signals of a line at most, as a share of its entries."""
_SETTLE, _TRIES = 12, 4
"""Turns in which the last fit learns its priors, of so many steps of descent."""
_ENOUGH = 0.5
"""Share of the lines that are explained with which words that these do not need are not named beside them."""
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
        most: functions at most: of a whole batch polynomials, else steps that follow each other share one.
    """
    seen = steps - silent
    count = min(seen, most)
    if whole:
        at = torch.linspace(-1, 1, seen, dtype=torch.double)
        some = torch.linalg.qr(torch.stack([at**power for power in range(count)], 1)).Q.T * math.sqrt(seen)
    else:
        some = torch.eye(count, dtype=torch.double)[:, torch.arange(seen) * count // seen]
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
    """Words with what they sent in each step, [K, n, r]; positions' rows are the first, where a model adds them."""

    words: tuple[int, ...]
    rows: Tensor
    sent: Tensor
    noise: Tensor


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
        # decoys hang together as words do, and nothing was made of them
        signs = 2.0 * torch.randint(2, (model.width,), generator=stream(0, "decoys")).to(words) - 1
        self.every = torch.cat([self.rows, self.rows * signs])
        self.beside = size * normalize(beside[beside.any(1)], dim=1)
        special = model.special
        self.special, self.never = special.ids, sorted(special.ids - {*special.prefix, *special.suffix})
        self.steps = len(sent.step.shares)

    def words(self, level: float) -> SparseWords:
        """Return the words that explained lines need; those that stand out where no line is explained."""
        count = len(self.sent.sent)
        for taken in self._sought(level):
            proven = self._proven(taken) if taken.words else None
            if proven is not None and proven[2] > _ENOUGH * count:
                break
        first = taken.words
        told = f"the changes of {count} directions over {self.steps} steps"
        if proven is not None:
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

    def _times(self, most: int) -> Tensor:
        return times(self.steps, self.whole, self.silent, most).to(self.rows)

    def _sought(self, level: float) -> Iterator[_Taken]:
        """Yield the words that were sent, the strongest first: where they stand apart from all others, and at the end.

        Args:
            level: share that may be wrong: so many decoys come among them.
        """
        base, lines = self._times(_SMOOTH if self.whole else MOST_PARTS), len(self.sent.sent)
        words, most = self._first_view(), _MOST // len(base)
        words, age = words[: most - _NEW], dict.fromkeys(words, 0)
        own = len(self.beside)
        belief = Propagation(
            self.sent.sent, self.sent.spread, self.sent.step, base, self.whole,
            torch.cat([self.beside, self.every[words]]),
        )  # fmt: skip
        before, still, tried, anew = math.inf, 0, 0, _ANEW
        best: _Taken | None = None
        for turn in range(_TURNS):
            belief.turn()
            step(f"words of adapters, {self.steps} steps together", turn + 1, _TURNS)
            if turn % _EVERY < _EVERY - 1:
                continue
            strengths = belief.strengths()[own:].tolist()
            kept = [n for n, word in enumerate(words) if strengths[n] > _HEARD * lines or age[word] < _YOUNG]
            kept = sorted(sorted(kept, key=strengths.__getitem__, reverse=True)[: most - _NEW])
            noise = float((belief.noise / self.sent.spread.median(dim=1).values).median())
            grown = any(strengths[n] > _SENT * lines and age[word] < _YOUNG for n, word in enumerate(words))
            still = 0 if noise < _STILL * before or grown else still + 1
            if noise < _CLEAR or (still == _PATIENT and not anew):
                break
            if still == _PATIENT:
                best = self._quieter(best, self._taken(belief, words, base, level))
                belief.loosen()
                # amid the first noise right words are weak, too
                anew, before, still, age = anew - 1, math.inf, 0, dict.fromkeys(words, -_HELD)
                continue
            sent = [one for one in strengths if one > _SENT * lines]
            others = [one for one in strengths if one <= _SENT * lines]
            if not grown and turn >= tried + _AGAIN and min(sent, default=0.0) > _APART * max(others, default=0.0):
                tried = turn
                yield self._taken(belief, words, base, level)
            before = min(noise, before)
            gains = belief.gains(self.every)
            gains[[*self._barred(), *words]] = 0
            words = [words[n] for n in kept]
            new = self._best(gains, _NEW, words)
            age = {word: age[word] + 1 for word in words} | dict.fromkeys(new, 0)
            belief.exchange([*range(own), *(own + n for n in kept)], self.every[new])
            words += new
        yield self._quieter(best, self._taken(belief, words, base, level))

    @staticmethod
    def _quieter(one: _Taken | None, other: _Taken) -> _Taken:
        """Return what leaves less."""
        return other if one is None or float(other.noise.median()) < float(one.noise.median()) else one

    def _taken(self, belief: Propagation, words: Sequence[int], base: Tensor, level: float) -> _Taken:
        """Return the words that are strong, up to so large a share of decoys among them."""
        own, lines = len(self.beside), len(self.sent.sent)
        strengths = belief.strengths()[own:].tolist()
        sent = [n for n, one in enumerate(strengths) if one > _SENT * lines]
        sent.sort(key=lambda n: strengths[n] * (_MARGIN if words[n] >= len(self.rows) else 1), reverse=True)
        decoys = [0, *accumulate(words[n] >= len(self.rows) for n in sent)]
        last = max(n for n, some in enumerate(decoys) if some <= level * (n - some))
        sent = [n for n in sent[:last] if words[n] < len(self.rows)]
        every = [*range(own), *(own + n for n in sent)]
        per_step = torch.einsum("pk,pnr->knr", base, belief.signals()[:, :, every])
        return _Taken(tuple(words[n] for n in sent), belief.rows[every], per_step, belief.noise)

    def _barred(self) -> list[int]:
        """Return what no sentence has, words and decoys."""
        return [at + word for at in (0, len(self.rows)) for word in self.never]

    def _first_view(self) -> list[int]:
        """Return the words and decoys that a linear view of what was sent shows first."""
        rows = self.every.float()  # half of the time, and it is a first view
        common = rows.T @ rows / len(rows)
        common.diagonal().add_(_RIDGE)
        inverse = torch.linalg.inv(common)
        seen = self.sent.sent.float() @ inverse
        chance = (seen * self.sent.sent).mean(1, keepdim=True)
        gains = ((seen @ rows.T).square() / chance).sum(0) / ((rows @ inverse) * rows).sum(1)
        gains[self._barred()] = 0
        return self._best(gains, _FIRST, [])

    def _best(self, gains: Tensor, most: int, held: Sequence[int]) -> list[int]:
        """Return the words that explain most, none with nearly another's row: two such would share their signals."""
        best = gains.topk(min(2 * most, len(gains))).indices
        every = torch.cat([torch.tensor(held, dtype=torch.long, device=best.device), best])
        alike = (self.every[best] @ self.every[every].T / self.every.shape[1] > _TWINS).tril(len(held) - 1)
        return [int(word) for word in best[~alike.any(1)][:most]]

    def _proven(self, taken: _Taken) -> tuple[list[int], list[bool], int] | None:
        """Return the words that explained lines need, which of them are certain, and how many lines; None for none."""
        most = max(int(_FULL * self.rows.shape[1] / len(taken.rows)), 1)
        for count in (2 * _SMOOTH, most):
            fit = SignalFit(self.sent.sent, self.sent.spread, self.sent.step, self._times(min(count, most)))
            found = fit.settled(self._start(fit, taken), taken.rows, _SETTLE, _TRIES)
            taken = replace(taken, sent=torch.einsum("pk,pnr->knr", fit.times, found.signals), noise=found.left.sqrt())
        alone = self._free(fit, found, taken.rows)
        lines = torch.where(self._chi2(fit, alone, taken.rows) < self._limit(fit, taken.rows))[0]
        if len(lines) == 0:
            return None
        fit, found, words, rows = fit.lines(lines), found.lines(lines), list(taken.words), taken.rows
        own = len(self.beside)
        # of two words with one row neither is needed beside the other: the weaker half goes, and those left are asked
        while words and float((need := self._needs(fit, found, rows)).mean(0).min()) <= IDLE:
            order = need.mean(0).argsort().tolist()
            gone = order[: (int((need.mean(0) <= IDLE).sum()) + 1) // 2]
            kept = [n for n in range(len(words)) if n not in gone]
            words, every = [words[n] for n in kept], [*range(own), *(own + n for n in kept)]
            rows = rows[every]
            found = self._only(fit, found, every, rows)
        need = self._needs(fit, found, rows)
        chi2 = self._chi2(fit, self._free(fit, found, rows), rows, lines)
        still = chi2 < self._limit(fit, rows)
        if not words or not bool(still.any()):
            return None
        chance = beyond_chance(int(still.sum()))
        strengths = need[still].sum(0)
        alone_costs = strengths * (1 - likest(self.rows, rows, words, self.never))
        free = self.rows.shape[1] - fit.times.shape[0] * len(rows)
        error = float((fit.error[still] / fit.sent[still].square().mean(1, keepdim=True).sqrt()).log().mean())
        lone = log_sets(len(self.rows), len(words)) + int(still.sum()) * free * error < RARE
        hidden = could_hide(float(chi2[still].mean()), int(still.sum()) * free)
        certain = lone & (strengths > hidden) & (alone_costs > chance)
        return words, [bool(one) for one in certain.tolist()], int(still.sum())

    @staticmethod
    def _start(fit: SignalFit, taken: _Taken) -> StepSignals:
        """Return the signals that were found, as the fit's functions of the steps."""
        shape = (len(fit.times), *taken.sent.shape[1:])
        signals = torch.linalg.lstsq(fit.times.T, taken.sent.flatten(1)).solution.reshape(shape)
        wide, left = signals.square().mean(1).clamp_min(1.0), taken.noise.square()
        made, slopes = fit.step.taken(fit.gradients(signals, taken.rows))
        return StepSignals(signals, torch.ones_like(signals), wide, made, slopes, left, left)

    @staticmethod
    def _only(fit: SignalFit, found: StepSignals, kept: Sequence[int], rows: Tensor) -> StepSignals:
        """Return the signals of some of the rows, with what they make."""
        signals = found.signals[:, :, kept]
        made, slopes = fit.step.taken(fit.gradients(signals, rows))
        less = replace(found, signals=signals, spread=found.spread[:, :, kept], wide=found.wide[:, kept])
        return replace(less, fit=made, slopes=slopes)

    @staticmethod
    def _free(fit: SignalFit, found: StepSignals, rows: Tensor) -> StepSignals:
        """Return signals of which nothing but their errors is known before."""
        start = replace(found, left=torch.zeros_like(found.left), wide=torch.full_like(found.wide, 1e12))
        return fit.descended(start, rows, 5 * _TRIES)

    def _needs(self, fit: SignalFit, found: StepSignals, rows: Tensor) -> Tensor:
        """Return [n, words] by how many squared errors each line needs each word."""
        free = self._free(fit, found, rows)
        need: Tensor = (free.signals.square() / free.spread).amax(0)[:, len(self.beside) :]
        return need

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
