"""Several sentences from a noisy or compressed gradient: words placed and linked, then taken out one by one.

Words are placed where their rows stand above the noise (`order`), and the attention signals link them (`linking`), less
surely than on a clean gradient. No span is left to mend a sentence in or to prove it: the likeness of its own gradient
to what is left of the one sent decides, and what it explains of that is taken off before the next sentence is looked
for. In the end each is mended in what the others leave.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradaudit.leakage.decoding.assembly import Placed, linked_by, propose
from gradaudit.leakage.decoding.order import AT_ONCE, Ordered, Places, classes_of, judged, mended
from gradaudit.leakage.decoding.pairs import Pairs
from gradaudit.leakage.rowspace.deflation import Matrices, sentence_gradient
from gradaudit.models.base import TextModel
from gradaudit.progress import step

_SPARE = 1.25
"""So many pairs are linked for each word and special token: words may occur more than once."""
_BEYOND = 4
"""Positions looked at beyond those that as long sentences as the words allow would fill."""
_RIDGE = 1e-2
"""Of linking, a hundred times that on clean signals, and of the signals: singular values below this share are noise."""
_JUDGED = 96
"""Proposals whose gradients are computed, those of the strongest pairs first."""


@torch.no_grad()
def place_words(
    model: TextModel, stacked: Tensor, roles: Sequence[str], words: Sequence[int], size: int
) -> tuple[Placed, Places]:
    """Return words at positions and who attends to whom, and what speaks for any word at any position.

    Args:
        model: an encoder.
        stacked: [out, d] block 0's gradients that share an input.
        roles: what is stacked, in order; q and k are linked.
        words: token ids of the batch, special ones left out.
        size: sentences.
    """
    special = model.special
    before = len(special.prefix)
    # the last position is not known: sentences rarely are twice as long as their mean
    longest = min(model.max_length, 2 * -(-len(words) // size) + _BEYOND)
    places = Places(model, stacked, words, longest - before - 1)
    chosen = [(token, at) for at, token in enumerate(special.prefix)]
    for tokens, most in ((list(words), int(_SPARE * len(words))), (list(special.suffix[-1:]), int(_SPARE * size))):
        fits = places.fits(tokens)
        best = (-fits).argsort(axis=None, kind="stable")[:most].tolist()
        chosen += [(tokens[at // fits.shape[1]], before + at % fits.shape[1]) for at in best]
    ids, positions = (torch.tensor(one, device=stacked.device) for one in zip(*chosen, strict=True))
    rows = torch.stack([model.first_inputs(at, ids[n : n + 1])[0].double() for n, (_, at) in enumerate(chosen)])
    signals = torch.linalg.pinv(rows.T, rtol=_RIDGE) @ stacked.double().T
    strength = signals.norm(dim=1)
    order = strength.argsort(descending=True)
    pairs, signals = Pairs(positions[order], ids[order], rows[order]), signals[order]
    sizes = dict.fromkeys(roles, signals.shape[1] // len(roles))
    support = linked_by(model, pairs, signals, sizes, _RIDGE)
    return Placed(pairs, pairs, strength[order], support, len(pairs)), places


def explained(model: TextModel, found: Ordered, left: Matrices) -> Matrices:
    """Return a sentence's own gradient, scaled to fit what is left best, tensor by tensor."""
    own = sentence_gradient(model, found.tokens, found.label, left)
    return {k: ((g * own[k]).sum() / own[k].square().sum().clamp_min(1e-300)) * own[k] for k, g in left.items()}


def unmix(
    model: TextModel,
    placed: Placed,
    places: Places,
    sent: Matrices,
    words: Sequence[int],
    size: int,
    evaluations: int,
    rng: torch.Generator,
) -> list[Ordered]:
    """Return the sentences of a batch: one after the other is taken off, then each is mended in what the others leave.

    Args:
        model: an encoder that classifies.
        placed, places: from `place_words`.
        sent: the gradients compared, by (block, role).
        words: token ids of the batch.
        size: sentences.
        evaluations: gradients computed at most in each of two turns of mending.
        rng: draws the order in which changes are tried.
    """
    proposals = propose(model, placed, lengths=3)
    ends = (len(model.special.prefix), len(model.special.suffix))
    share = evaluations // size
    left, found, parts = dict(sent), list[Ordered](), list[Matrices]()
    while len(found) < size and proposals:
        step("decode: sentences", len(found), size)
        options = [option for p in proposals[:_JUDGED] if (option := p[ends[0] : len(p) - ends[1]])]
        if not options:
            break
        several = [options[at : at + AT_ONCE] for at in range(0, len(options), AT_ONCE)]
        starts = [one for some in several for y in classes_of(model) for one in judged(model, some, y, left, places)]
        start = max(starts, key=lambda one: one.score)
        found.append(mended(model, start, words, left, share, rng, places=places))
        parts.append(explained(model, found[-1], left))
        left = {k: g - parts[-1][k] for k, g in left.items()}
        # a word goes with its sentence, unless it stands in others too
        used = set(found[-1].inner)
        proposals = [p for p in proposals if 2 * len(used & set(p)) <= len(p)]
    for at in range(len(found)):
        step("decode: each sentence in what the others leave", at, len(found))
        left = {k: g + parts[at][k] for k, g in left.items()}
        start = judged(model, [found[at].inner], found[at].label, left, places)[0]
        found[at] = mended(model, start, words, left, share, rng, places=places)
        parts[at] = explained(model, found[at], left)
        left = {k: g - parts[at][k] for k, g in left.items()}
    return found
