"""Words of adapters' directions amid noise of known size: taken by what each explains, and exchanged.

Noise of one size a matrix leaves plain least squares: with directions in units of their noise, what a word explains
beside others is a sum of squares over the lines, known for the whole vocabulary at once, and so is what any word would
explain in another's place. A word that is taken while others are missing may stand for them: words give way to those
that explain more in their place.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradaudit.leakage.adapters.chance import ALIKE, FULL, RARE, beyond_chance, could_hide, likest, log_sets
from gradaudit.leakage.uneven.entries import Entries
from gradaudit.progress import step


@dataclass(frozen=True)
class Heard:
    """Words amid noise.

    Args:
        words: strongest first.
        certain: of each, whether no other word would do in its place, nor any that were missed.
        chi2: what they leave, per degree of freedom.
    """

    words: list[int]
    certain: list[bool]
    chi2: float


class _Noisy:
    """Directions in units of their noise and words, both off what positions bring; words are taken and put back."""

    def __init__(self, sent: Tensor, rows: Tensor, out: Tensor, never: Sequence[int]) -> None:
        self.rows, self.sent = (t - (t @ out) @ out.T for t in (rows, sent))
        self.free = rows.shape[1] - out.shape[1]
        self.size = self.rows.square().sum(1)
        self.barred = {*never}
        self.take([])

    def take(self, words: Sequence[int]) -> None:
        """Hold these words and no others."""
        self.words = list(words)
        rows = self.rows[self.words]
        q, t = torch.linalg.qr(rows.T)
        left = self.sent - (self.sent @ q) @ q.T
        self.along: Tensor = left @ self.rows.T
        self.outside: Tensor = self.size - (self.rows @ q).square().sum(1)
        self.chi2 = float(left.square().sum()) / (len(left) * max(self.free - len(words), 1))
        inverse = torch.linalg.solve_triangular(t, torch.eye(len(words), dtype=t.dtype, device=t.device), upper=True)
        # each word's part that no other has
        lone = torch.nn.functional.normalize(inverse @ q.T, dim=1)
        self.own: Tensor = self.sent @ lone.T
        self.like: Tensor = self.rows @ lone.T
        self.strengths: Tensor = self.own.square().sum(0)

    def loudest(self) -> tuple[int, float]:
        """Return the word that would explain most squares beside those held, and how many."""
        gains = self.along.square().sum(0) / self.outside.maximum(ALIKE * self.size).clamp_min(1e-300)
        gains[[*self.words, *self.barred]] = 0
        return int(gains.argmax()), float(gains.max())

    def exchange(self) -> bool:
        """Put the word that explains most more in place of a held one, which stays out; say whether there is one."""
        if not self.words:
            return False
        both = self.along.square().sum(0)[:, None] + 2 * self.like * (self.along.T @ self.own)
        there = (self.outside[:, None] + self.like.square()).maximum(ALIKE * self.size[:, None])
        more = (both + self.like.square() * self.strengths) / there.clamp_min(1e-300)
        more[[*self.words, *self.barred]] = 0
        best = (more - self.strengths).max(0)
        at = int(best.values.argmax())
        if float(best.values[at]) <= 0:
            return False
        self.barred.add(self.words[at])
        self.take([int(best.indices[at]), *self.words[:at], *self.words[at + 1 :]])
        return True

    def drop(self, least: float) -> None:
        """Put back the words that explain fewer squares; they are not taken again."""
        idle = {word for word, one in zip(self.words, self.strengths.tolist(), strict=True) if one < least}
        if idle:
            self.barred |= idle
            self.take([word for word in self.words if word not in idle])


@torch.no_grad()
def heard(sent: Entries, rows: Tensor, out: Tensor, start: Sequence[int], never: Sequence[int]) -> Heard:
    """Return the words that explain more of directions than chance does.

    Args:
        sent: directions, whose errors are of one size in each matrix.
        rows: [V, d] what each word brings.
        out: [d, p] orthonormal, what positions bring.
        start: words to begin with.
        never: words that no sentence has.
    """
    noisy = _Noisy(sent.sent / sent.spread, rows, out, never)
    chance = beyond_chance(len(sent.sent))
    noisy.take(start)
    while len(noisy.words) < int(FULL * noisy.free):
        step("words of adapters", len(noisy.words))
        word, gain = noisy.loudest()
        if gain > chance:
            noisy.take([*noisy.words, word])
        elif not noisy.exchange():
            break
        noisy.drop(chance)
    left = noisy.free - len(noisy.words)
    enough = noisy.strengths > could_hide(noisy.chi2, len(sent.sent) * left, told=True)
    enough &= noisy.strengths * (1 - likest(noisy.rows, noisy.rows[noisy.words], noisy.words, never)) > chance
    # a direction so many times its errors' length lies in other words' span by chance: one factor a free dimension
    sizes = (torch.linalg.svdvals(noisy.sent) / noisy.free**0.5).log().clamp_min(0)
    alone = log_sets(len(rows), len(noisy.words)) - left * float(sizes.sum()) < RARE
    order = noisy.strengths.argsort(descending=True).tolist()
    return Heard([noisy.words[at] for at in order], [alone and bool(enough[at]) for at in order], noisy.chi2)
