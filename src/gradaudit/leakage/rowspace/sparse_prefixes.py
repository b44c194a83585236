"""Sentences from fewer directions than there are tokens: each prefix has a row of its own in every deeper block.

The directions of adapters in block l (see `sparse_words`) are combinations of the rows that the batch's prefixes have
there: in a decoder a row depends on the words before it and on nothing else. The words are known from block 0, so that
every prefix the batch may hold can be computed, from first words on: those taken bring their continuations, and the
one that lies nearest to what is left of the directions, in all blocks together, is taken next.

Rows of one word behind other prefixes are nearly alike, and a word that sends much, as the last one of a classifier's
sentence does, draws all of its likenesses. So what a word's rows have in common is taken out first: its mean and the
directions in which it varies most over the batch's words in random orders. What is left of a row is the mark of its
prefix. Directions that are known to seven digits lose nothing by it but dimensions, of which there are more than
enough, and a mark is as exact as its row.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from gradaudit.leakage.decoding.explain import named
from gradaudit.leakage.rowspace.growth import phantom
from gradaudit.leakage.rowspace.prefixes import Attended, leaf_values
from gradaudit.models.base import TextModel
from gradaudit.progress import step
from gradaudit.types import NamedWord, Observation, Reconstruction

Prefix = tuple[int, ...]

_KNOWN = 1e-5
"""A direction is used where it is so much of its block's largest."""
_ROUNDED, _LEFT = 5e-7, 4.0
"""What float32 leaves of a direction when the right rows are taken out, as a share of its block's largest (SmolLM2,
blocks 1 to 28, 27 to 149 tokens: at most 2.2e-7), and its mean square that is still rounding."""
_NEEDED = 100.0
"""A row is there where leaving it out, or taking the likest other one, leaves so many squared roundings (measured:
5e5 and more for each direction of right rows, 1e-3 and less of wrong ones)."""
_EVIDENCE, _FEWEST = 4, 4
"""Directions over all blocks for each word, and blocks at least."""
_COMMON, _SHARE = 8, 0.5
"""Directions in which a word's rows vary that are taken out at most, and the share of the width for those of all words.
Without them, likenesses of loud rows are taken for the quiet ones (27 tokens, rank 2: 34 wrong of 50, with them 5 of
32)."""
_ORDERS, _LONG = 3, 24
"""Random orders for each of them, of so many words."""
_ALIKE, _AT_ONCE = 0.95, 8
"""Prefixes that score this share of the best one's are taken with it, one in so many of those that there are."""
_ROOM = 0.95
"""Rows that a block can hold, as a share of its dimensions: with as many rows as those anything is explained."""
_LONE = 1e-10
"""A row of whose square less than this share is left is one of those taken already: in a rotary model "that that" at a
sentence's start has the rows of "that"."""
_FEWER = "fewer sentences than the batch has: one that is there twice, or begins another one, has no row of its own"


@torch.no_grad()
def sparse_sentences(seen: Observation, words: Sequence[int], rng: torch.Generator) -> dict[Prefix, bool]:
    """Return the sentences that explain the directions of all blocks to the last rounding; none where none do.

    Each with whether it is certain: all of its rows are needed, and no other prefix's would do in their place.

    Args:
        seen: one gradient of a decoder's adapters on q, k or v.
        words: ids of all words of the batch.
        rng: draws the random orders.
    """
    model = seen.model
    device = next(iter(seen.tensors.values())).device
    ids = torch.tensor(sorted({*words, *model.special.prefix, *model.special.suffix}), device=device)
    common = min(_COMMON, int(_SHARE * model.width / max(len(ids), 1)) - 1)
    if common < 0:
        return {}
    blocks = dict[int, BlockDirections]()
    for layer in range(1, model.depth):
        evidence = sum(len(block.whole) for block in blocks.values())
        if evidence >= _EVIDENCE * len(ids) and len(blocks) >= _FEWEST:
            break
        sent = [g.detach().double() for role in "qkv" for g in seen.role(layer, role)]
        if any(bool(g.any()) for g in sent):
            blocks[layer] = BlockDirections(torch.cat([g / g.norm().clamp_min(1e-300) for g in sent]))
    found: dict[Prefix, bool] = {}
    for vary in (common, common, common // 2, 0) if blocks else ():
        found = found or PrefixPursuit(model, blocks, ids, vary, rng).sentences()
    return found


def put_together(seen: Observation, words: Sequence[NamedWord], rng: torch.Generator) -> Reconstruction:
    """Return the sentences of a batch of which all words are known, with their labels.

    Args:
        seen, rng: see `sparse_sentences`.
        words: all of the batch.
    """
    sure = {word.token for word in words if word.certain} | seen.model.special.ids
    found = sparse_sentences(seen, [word.token for word in words], rng)
    if not found:
        return Reconstruction()
    read = named(seen, list(found), (), {})
    # without labels, which tell that these are all, the directions alone prove them
    plain = ("proven",) * len(found) if read.labels is None else read.certificates or ()
    certain = [one and sure.issuperset(text) for text, one in found.items()]
    certificates = tuple(told if one else "likely" for told, one in zip(plain, certain, strict=True))
    few = len(found) < (seen.knowledge.batch_size or 0)
    return replace(read, certificates=certificates, notes=(*read.notes, *[_FEWER] * few))


class BlockDirections:
    """The directions of a block, and what candidates' rows explain of them.

    Args:
        sent: [n, d] what was sent of it.
    """

    def __init__(self, sent: Tensor) -> None:
        _, values, rows = torch.linalg.svd(sent, full_matrices=False)
        known = values > _KNOWN * values[0]
        self.whole, self.error = rows[known], _ROUNDED * values[0] / values[known]
        self.free = torch.eye(sent.shape[1], dtype=sent.dtype, device=sent.device)

    def without(self, rows: Tensor) -> None:
        """Look from now on at what no combination of some rows [k, d] explains."""
        self.free = torch.linalg.qr(rows.T, mode="complete").Q[:, len(rows) :]
        self.left = self.sent = self.whole @ self.free
        self.taken = self.marks = self.units = self.left[:0]
        self.along, self.length, self.size = self.left[:0] @ self.left.T, self.left.new_zeros(0), self.left.new_zeros(0)

    def add(self, rows: Tensor) -> None:
        """Add candidates' rows [n, d]."""
        marks = rows @ self.free
        off = marks - (marks @ self.units.T) @ self.units
        self.marks = torch.cat([self.marks, marks])
        self.along = torch.cat([self.along, off @ self.left.T])
        self.length = torch.cat([self.length, off.square().sum(1)])
        self.size = torch.cat([self.size, rows.square().sum(1)])

    def take(self, at: int) -> None:
        """Take a candidate's row out of the directions and of all candidates."""
        unit = self.marks[at]
        self.taken = torch.cat([self.taken, unit[None]])
        for _ in range(2):  # once more for what rounding leaves
            unit = unit - (unit @ self.units.T) @ self.units
        unit = unit / unit.norm()
        self.units = torch.cat([self.units, unit[None]])
        part, own = self.marks @ unit, self.left @ unit
        self.length = self.length - part.square()
        self.along = self.along - part[:, None] * own
        self.left = self.left - own[:, None] * unit

    def score(self) -> Tensor:
        """Return [n] the share of each candidate's mark that lies in what is left, each direction counting alike."""
        turn, values, _ = torch.linalg.svd(self.left, full_matrices=False)
        there = values > 10 * self.error.max()
        along = (self.along @ (turn[:, there] / values[there])).square().sum(1)
        return torch.where(self.length > _LONE * self.size, along / self.length.clamp_min(1e-300), 0.0)

    def misfit(self, left: Tensor) -> Tensor:
        """Return [m] the squares that are left of the directions, in their errors'."""
        squares: Tensor = left.square().sum(1) / self.error.square()
        return squares

    def costs(self) -> tuple[Tensor, Tensor]:
        """Return [t] by how much the misfit grows without each row taken, and [n, t] with a candidate in its place."""
        inverse = torch.linalg.pinv(self.taken)
        lone = 1 / inverse.norm(dim=0)
        alone = ((self.sent @ inverse * lone) / self.error[:, None]).square().sum(0)
        along = (self.marks @ (inverse * lone)).square()
        outside = self.marks.square().sum(1) - (self.marks @ self.units.T).square().sum(1)
        return alone, alone * (1 - along / (along + outside.clamp_min(0)[:, None]).clamp_min(1e-300))


class PrefixPursuit:
    """Prefixes whose rows explain directions.

    Args:
        model: a decoder.
        blocks: directions by block.
        words: [W] ids that may follow any prefix.
        common: directions of each word's rows that are taken out.
        rng: draws orders of words.
    """

    def __init__(
        self, model: TextModel, blocks: dict[int, BlockDirections], words: Tensor, common: int, rng: torch.Generator
    ) -> None:
        self.model, self.blocks, self.words = model, blocks, words
        self.taken: list[int] = []
        self.candidates: list[Prefix] = []
        count = -(-_ORDERS * (common + 1) * len(words) // _LONG)
        orders = torch.randint(len(words), (count, _LONG), generator=rng, device=rng.device).to(words.device)
        inputs = model.matrix_inputs([(layer, "q") for layer in blocks], words[orders])
        last = orders[:, 1:].flatten()
        for block, rows in zip(blocks.values(), inputs, strict=True):
            behind = rows[:, 1:].double().flatten(0, 1)
            some = [behind[last == word] for word in range(len(words))]
            varied = [torch.linalg.svd(own - own.mean(0), full_matrices=False).Vh[:common] for own in some if len(own)]
            block.without(torch.cat([own.mean(0, keepdim=True) for own in some if len(own)] + varied))
        self._follow([()])

    def sentences(self) -> dict[Prefix, bool]:
        """Return the sentences that explain everything; none where none do."""
        room = _ROOM * min(block.free.shape[1] for block in self.blocks.values())
        while not self._explained({layer: block.left for layer, block in self.blocks.items()}):
            score = torch.stack([block.score() for block in self.blocks.values()]).sum(0)
            score[self.taken] = 0
            best = score.topk(min(1 + len(self.taken) // _AT_ONCE, len(score)))
            some = best.indices[(best.values > 0) & (best.values >= _ALIKE * best.values[0])].tolist()
            if not some or len(self.taken) + len(some) > room:
                return {}
            for at in some:
                for block in self.blocks.values():
                    block.take(at)
            self.taken += some
            self._follow([self.candidates[at] for at in some])
            step(f"decode: {len(self.taken)} words put to sentences", len(self.taken))
        return self._held()

    def _follow(self, prefixes: Sequence[Prefix]) -> None:
        """Add every word behind some prefixes to the candidates."""
        layers = list(self.blocks)
        for length, group in groupby(sorted(prefixes, key=len), key=len):
            some = list(group)
            ids = torch.tensor(some, dtype=torch.long, device=self.words.device).view(len(some), length)
            measures = [((layer, "q"), Tensor.double) for layer in layers]
            found = leaf_values(Attended(self.model, max(layers)), ids, self.words, measures)
            for layer, rows in zip(layers, found, strict=True):
                self.blocks[layer].add(rows.flatten(0, 1))
            self.candidates += [(*prefix, word) for prefix in some for word in self.words.tolist()]

    def _explained(self, left: dict[int, Tensor]) -> bool:
        """Say whether what is left of the directions is their rounding."""
        misfits = torch.cat([self.blocks[layer].misfit(one) for layer, one in left.items()])
        return float(misfits.mean()) < _LEFT

    def _held(self) -> dict[Prefix, bool]:
        """Return the sentences of the rows that are needed, if these alone explain everything; none if they do not."""
        both = [block.costs() for block in self.blocks.values()]
        alone, other = (torch.stack(one).sum(0) for one in zip(*both, strict=True))
        runs = [at for at, one in enumerate(self.candidates) if phantom(self.model, one)]
        other[[*self.taken, *runs]] = torch.inf
        needed = alone > _NEEDED
        sure = needed & (other.min(0).values > _NEEDED)
        prefixes = [self.candidates[at] for at in self.taken]
        certain = {prefix for prefix, one in zip(prefixes, sure.tolist(), strict=True) if one}
        held = {part for prefix, one in zip(prefixes, needed.tolist(), strict=True) if one for part in _parts(prefix)}
        ended = sorted(held - {prefix[:-1] for prefix in held})
        if not ended or not self._explained(self._off(ended)):
            return {}
        return {sentence: certain.issuperset(_parts(sentence)) for sentence in ended}

    def _off(self, sentences: Sequence[Prefix]) -> dict[int, Tensor]:
        """Return what the rows of sentences, made anew, leave of each block's directions."""
        wanted, seen = [(layer, "q") for layer in self.blocks], set[Prefix]()
        rows: dict[int, list[Tensor]] = {layer: [] for layer in self.blocks}
        for one in sentences:
            new = [at for at, part in enumerate(_parts(one)) if part not in seen]
            seen.update(_parts(one))
            inputs = self.model.matrix_inputs(wanted, torch.tensor([one], device=self.words.device))
            for layer, some in zip(self.blocks, inputs, strict=True):
                rows[layer].append(some[0, new].double())
        left = dict[int, Tensor]()
        for layer, own in rows.items():
            basis = torch.linalg.qr(torch.cat(own).T).Q
            left[layer] = self.blocks[layer].whole - (self.blocks[layer].whole @ basis) @ basis.T
        return left


def _parts(sentence: Prefix) -> list[Prefix]:
    """Return the prefixes of a sentence, itself the last."""
    return [sentence[: n + 1] for n in range(len(sentence))]
