"""Words of a crowded batch put together to sentences, and these in order; guesses.

Which words exchange attention is told as of decoded rows (`decoding.linking`), by signals of words in place of tokens:
nine in ten of a word's nearest share its sentence (MPNet, twice as many tokens as coordinates). A word of several
sentences goes to one of them.
"""

from collections.abc import Sequence
from itertools import islice

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from gradaudit.leakage.crowded.attention_fit import AttentionFit
from gradaudit.leakage.crowded.sources import shares, sources
from gradaudit.leakage.crowded.words import present, word_directions
from gradaudit.leakage.decoding.linking import group, joint_support
from gradaudit.leakage.decoding.order import changes_of
from gradaudit.models.base import TextModel
from gradaudit.progress import step
from gradaudit.types import Observation, Reconstruction

CROWDED = "too many tokens for their rows to be told apart: words are put together to sentences, which are guesses"
_BY_CHANCE = 0.05
"""Share of the words taken that may be there by chance (seven batches of MiniLM and MPNet, 0.9 to 2.2 tokens a
coordinate, 2,227 words: 1,996 right and 58 wrong; at 0.02 1,887 and 21)."""
_PLACES = 32
"""Positions told apart: few sentences of the data sets here are longer."""
_MEAN_ROWS = range(1, 13)
"""A word's key is the mean of these positions' keys: its place is not known yet."""
_STEPS, _RIDGE = 10, 1e-2
"""Of linking: signals are known to about 0.9 of themselves, so that less would fit their errors."""
_TRIES, _AT_ONCE, _BETTER = 300, 32, 1e-4
"""Orders tried a sentence at most, so many in one pass; what counts as a gain in shares explained."""


def read_crowded(seen: Observation, rng: torch.Generator, least: float = 0.0) -> Reconstruction | None:
    """Return the sentences of a batch that fills the row space; None where too little was sent or told.

    Args:
        seen: a gradient; block 0's q, k and v are needed, and the batch size.
        rng: draws the order in which changes are tried.
        least: words that must be told, in times the model's width; and one a sentence.
    """
    model, size = seen.model, seen.knowledge.batch_size
    sent = [seen.role(0, role) for role in "qkv"]
    if size is None or size < 2 or model.causal or not model.absolute_positions or not all(map(len, sent)):
        return None
    gradients = [tensors[0].double() for tensors in sent]
    scale = torch.stack([gradient.norm() for gradient in gradients])
    stacked = torch.cat([gradient / by for gradient, by in zip(gradients, scale, strict=True)])
    special, places = model.special, min(_PLACES, model.max_length)
    words, beside = word_directions(model, places)
    frame, never = (torch.tensor(sorted(ids), device=words.device) for ids in (
        {*special.prefix, *special.suffix}, special.ids
    ))  # fmt: skip
    ids = present(words, beside, never, stacked, _BY_CHANCE)
    if len(ids) < max(size, least * model.width):
        return None
    blur = model.first_inputs(_MEAN_ROWS[0], ids).double().square().mean(0)
    directions = torch.cat([words[ids], words[frame], beside]).double()
    received = sources(stacked, directions, blur)
    count = len(ids)
    of_words, of_places = received[:count], received[count + len(frame) : -1]
    support = together(model, torch.cat([ids, frame]), received[:-1])[:count, :count]
    groups = group(support + support.T, list(range(count)), size)
    told = shares(of_words, of_places)[:, len(special.prefix) :].cpu().numpy()
    fit = AttentionFit(model, ids.tolist(), of_words, scale)
    sentences = []
    for done, members in enumerate(groups):
        step("decode: sentences", done, len(groups))
        at = linear_sum_assignment(-told[members][:, : len(members)])
        first = [members[word] for word, _ in sorted(zip(*at, strict=True), key=lambda pair: pair[1])]
        first += [word for word in members if word not in first]  # more words than places
        sentences.append(in_order(fit, model, [int(ids[word]) for word in first], rng))
    certificates = ("guess",) * len(sentences)
    return Reconstruction(tuple(sentences), None, certificates, (CROWDED,), {"words": count})


@torch.no_grad()
def together(model: TextModel, ids: Tensor, received: Tensor) -> Tensor:
    """Return [n, n], how much each word or position takes part in explaining what came back to each.

    Args:
        model: an encoder.
        ids: [W] token ids.
        received: [n, 3 d] what came back to their queries, keys and values, then to each position's.
    """
    places = len(received) - len(ids)
    rows = torch.stack([model.first_inputs(place, ids).double() for place in range(places)])
    middle = rows[_MEAN_ROWS[0] : _MEAN_ROWS[-1] + 1].mean(0)
    by_place = rows.mean(1)
    # the softmax ignores what all keys share
    atoms = torch.cat([middle - middle.mean(0), by_place - by_place.mean(0)])
    apart = torch.arange(len(atoms), device=atoms.device)
    found = torch.zeros(len(atoms), len(atoms), dtype=torch.double, device=atoms.device)
    for signal, role in zip(received.chunk(3, 1), "kq", strict=False):
        none = model.project(0, role, torch.zeros_like(atoms[:1]))
        keys = model.project(0, role, atoms) - none
        found += joint_support(signal.reshape(keys.shape), keys, apart, _STEPS, _RIDGE)
    return found


def in_order(fit: AttentionFit, model: TextModel, words: Sequence[int], rng: torch.Generator) -> tuple[int, ...]:
    """Return a sentence of words, with its frame, in the order in which its attention explains most.

    Args:
        fit: what came back to the words.
        model: the model.
        words: in the order to start from.
        rng: draws the order in which changes are tried.
    """
    prefix, suffix = model.special.prefix, model.special.suffix

    def explained(some: Sequence[Sequence[int]]) -> Tensor:
        return fit([(*prefix, *inner, *suffix) for inner in some]).sum(1)

    if len(words) > _PLACES:  # several sentences that were not told apart: no order of theirs is one
        return (*prefix, *words, *suffix)
    now, best, left = list(words), float(explained([words])[0]), _TRIES
    options = changes_of(now, (), len(now), len(now), rng)
    while left > 0 and (some := list(islice(options, _AT_ONCE))):
        left -= len(some)
        scores = explained(some)
        at = int(scores.argmax())
        if float(scores[at]) > best + _BETTER:
            now, best = some[at], float(scores[at])
            options = changes_of(now, (), len(now), len(now), rng)
    return (*prefix, *now, *suffix)
