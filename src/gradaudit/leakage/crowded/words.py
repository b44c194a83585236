"""The words of a batch that fills block 0's row space.

With as many tokens as the model is wide no row lies outside the span. The gradient still has more of some directions
than of others: along a row that is in it, x^T (G^T G)^-1 x is at most the inverse of that row's own energy, and far
more along one that is not (Capon's beam, 1969). Dropout takes a tenth of each row and leaves the other nine.
"""

import math

import torch
from torch import Tensor

from gradaudit.models.base import TextModel

_FLOOR = 1e-3
"""Singular values below this share of the largest count as that much: masks blur the weaker ones (MPNet, 821 tokens on
768 coordinates: the first 356 words are the batch's 356; 355 of them without a floor, 347 at 1e-2)."""
_DEEPER = 30
"""Scores by chance fall off like a power, told from this part of the vocabulary on as well as from as many words as
there are coordinates (MPNet, 546 words: 465 by the former, 4 by the latter; MiniLM, 180 words: 15 and 173)."""


@torch.no_grad()
def word_directions(model: TextModel, count: int) -> tuple[Tensor, Tensor]:
    """Return what words [V, d], and positions and the bias [count + 1, d], bring to block 0's inputs.

    x(t, p) = a (g w_t + g p_p) + b, with a scale a of the token's own.

    Args:
        model: one with absolute positions and a LayerNorm.
        count: positions.
    """
    parts = model.first_input_parts()
    tables = (parts.words, parts.positions[:count])
    words, places = ((table - table.mean(1, keepdim=True)) * parts.weight for table in tables)
    return words, torch.cat([places, parts.bias[None]])


@torch.no_grad()
def present(words: Tensor, beside: Tensor, never: Tensor, stacked: Tensor, level: float) -> Tensor:
    """Return the ids of the words that a gradient was made of, the surest first; at most as many as coordinates.

    Args:
        words: [V, d] from `word_directions`.
        beside: [n, d] directions that are no evidence for a word.
        never: ids that are not looked for; nor are they evidence.
        stacked: [out, d] block 0's gradients that share an input.
        level: share of the words returned that may be there by chance.
    """
    _, values, vh = torch.linalg.svd(stacked.double(), full_matrices=False)
    metric = (vh.T / values.clamp_min(_FLOOR * float(values[0]))).to(words)
    known = torch.linalg.qr((torch.cat([beside, words[never]]) @ metric).T).Q
    seen = words @ metric
    seen = seen - (seen @ known) @ known.T
    left = (seen.square().sum(1) / words.square().sum(1).clamp_min(1e-30)).log()
    left[never] = math.inf
    ordered, ids = left.sort()
    count = torch.arange(1, len(left) + 1, device=left.device)
    taken = 0
    # no more words are told than there are coordinates; where many are, those near them in meaning follow them, and
    # chance begins behind these
    for low in (words.shape[1], len(left) // _DEEPER):
        low = min(low, (len(left) - len(never) - 1) // 2)
        power = math.log(2) / float((ordered[2 * low] - ordered[low]).clamp_min(1e-9))
        by_chance = low * (power * (ordered - ordered[low])).exp()
        right = torch.where(by_chance <= level * count)[0]
        taken = max(taken, int(right.max()) + 1 if len(right) else 0)
    found: Tensor = ids[: min(taken, words.shape[1])]
    return found
