"""What public text says of words that stand side by side, and the likeliest sentence by that and a reading.

A network reads every position by itself, or nearly so, and its own prior is how often a word occurs. Where a defense
leaves little of a word, the words beside it tell more: the reading is multiplied by how much more often two words
stand side by side than by chance, and the likeliest whole sentence is found by dynamic programming (Viterbi).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from gradaudit.errors import BadInputError
from gradaudit.files import stored_tensors
from gradaudit.learned.text.network import in_slots

PAIRS = "pairs.safetensors"
"""File of an inverter's word pairs."""
WEIGHTS = (0.0, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5)
"""Weights of the prior that are tried on held-out public text."""
_DISCOUNT = 0.75
"""Taken off every pair's count, and given to pairs that did not occur."""
_FEW = 64
"""Words a position that are weighed: those that the network finds likeliest."""


@dataclass(frozen=True)
class WordPairs:
    """Counts of public text.

    Args:
        keys: [n] int64, `first * classes + second` of every pair that occurs, ascending.
        counts: [n] how often.
        words: [classes] how often each word occurs.
    """

    keys: Tensor
    counts: Tensor
    words: Tensor

    @property
    def classes(self) -> int:
        """How many words there are, with the one for "no token here"."""
        return len(self.words)

    def to(self, device: torch.device) -> WordPairs:
        """Return the same on a device."""
        return WordPairs(self.keys.to(device), self.counts.to(device), self.words.to(device))

    @cached_property
    def _alone(self) -> Tensor:
        # half a count for what did not occur
        return (self.words + 0.5) / (self.words.sum() + 0.5 * self.classes)

    @cached_property
    def _begun(self) -> Tensor:
        """How many pairs each word begins, and how many kinds of them, [2, classes]."""
        first = self.keys // self.classes
        out = torch.zeros(2, self.classes, device=self.keys.device)
        out[0].index_add_(0, first, self.counts)
        out[1].index_add_(0, first, torch.ones_like(self.counts))
        return out

    def ratios(self, first: Tensor, second: Tensor) -> Tensor:
        """Return log p(second | first) - log p(second) of classes that broadcast.

        Absolute discounting: a pair's count less `_DISCOUNT`, and what was taken off shared out by the words' own
        frequencies. Behind a word that begins no pair it is 0.
        """
        if not len(self.keys):
            return torch.zeros_like(first + second, dtype=torch.float)
        keys = first * self.classes + second
        at = torch.searchsorted(self.keys, keys).clamp(max=len(self.keys) - 1)
        count = torch.where(self.keys[at] == keys, self.counts[at], 0.0)
        begun, kinds = self._begun[0][first], self._begun[1][first]
        seen = (count - _DISCOUNT).clamp(min=0) / self._alone[second]
        return torch.where(begun > 0, ((seen + _DISCOUNT * kinds) / begun.clamp(min=1)).log(), 0.0)

    def likeliest(self, logits: Tensor, weight: float) -> Tensor:
        """Return the likeliest classes [..., T] by a network's reading and the pairs.

        Args:
            logits: [..., T, classes] the network's: log probabilities up to a constant a position, the words' own
                frequencies among them.
            weight: of the pairs, against the reading; 0 takes each position's likeliest.
        """
        values, ids = logits.flatten(0, -3).topk(min(_FEW, self.classes), -1)
        score, back = values[:, 0], []
        for at in range(1, ids.shape[1]):
            beside = self.ratios(ids[:, at - 1, :, None], ids[:, at, None, :])
            score, before = (score[:, :, None] + weight * beside).max(1)
            score = score + values[:, at]
            back.append(before)
        place = score.argmax(-1, keepdim=True)
        out = [ids[:, -1].gather(1, place)]
        for at in range(len(back) - 1, -1, -1):
            place = back[at].gather(1, place)
            out.append(ids[:, at].gather(1, place))
        return torch.cat(out[::-1], 1).view(logits.shape[:-1])


def count_pairs(classes: Tensor, number: int) -> WordPairs:
    """Return the counts of some texts.

    Args:
        classes: [n, B, T], see `classes_of`.
        number: of classes.
    """
    keys, counts = torch.unique(classes[..., :-1] * number + classes[..., 1:], return_counts=True)
    return WordPairs(keys, counts.float(), torch.bincount(classes.flatten(), minlength=number).float())


@torch.no_grad()
def weigh(pairs: WordPairs, read: Iterable[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """Return the weight that reads most positions right, and their share (0 to 100); the smaller one where some tie.

    Args:
        pairs: of public text.
        read: logits [n, B, T, classes] and classes [n, B, T] of public text that was not counted.
    """
    right, count = torch.zeros(len(WEIGHTS)), 0
    for logits, classes in read:
        wanted = classes if classes.shape[1] == 1 else in_slots(logits, classes)
        right += torch.tensor([float((pairs.likeliest(logits, w) == wanted).sum()) for w in WEIGHTS])
        count += wanted.numel()
    best = int(right.argmax())
    return WEIGHTS[best], 100 * float(right[best]) / count


def save_pairs(folder: Path, pairs: WordPairs) -> None:
    """Write word pairs into an inverter's folder.

    Raises:
        OSError, SafetensorError: it cannot be written.
    """
    save_file({"keys": pairs.keys.cpu(), "counts": pairs.counts.cpu(), "words": pairs.words.cpu()}, folder / PAIRS)


def load_pairs(folder: Path, count: int, classes: int) -> WordPairs:
    """Read the word pairs of an inverter; sizes are checked against the file's header before any of it is loaded.

    Args:
        folder: of the inverter.
        count: of pairs, as its manifest says.
        classes: as its manifest says.

    Raises:
        BadInputError: missing, truncated, or not what the manifest describes.
    """
    path = folder / PAIRS
    shapes, dtypes = {"keys": (count,), "counts": (count,), "words": (classes,)}, {"keys": "I64"}
    with stored_tensors(path) as file:
        if file.shapes != shapes or file.dtypes != dict.fromkeys(shapes, "F32") | dtypes:
            raise BadInputError(f"{path} does not hold the word pairs that the manifest describes; it is damaged")
        found = WordPairs(**file.read(shapes, finite=True))
    keys = found.keys
    in_order = bool((keys[1:] > keys[:-1]).all()) and bool((keys >= 0).all()) and bool((keys < classes**2).all())
    if not (in_order and bool((found.counts >= 1).all()) and bool((found.words >= 0).all())):
        raise BadInputError(f"{path} holds word pairs that no text has; it is damaged")
    return found
