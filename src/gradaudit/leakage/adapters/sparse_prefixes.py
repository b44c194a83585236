"""Sentences from fewer directions than there are tokens: each prefix has a row of its own in every deeper block.

The directions of adapters in block l (see `sparse_words`) are combinations of the rows that the batch's prefixes have
there: in a decoder a row depends on the words before it and on nothing else. The words are known from block 0, so that
every prefix the batch may hold can be computed, from first words on: those taken bring their continuations, and the
one that lies nearest to what is left of the directions, in all blocks together, is taken next.

Rows of one word behind other prefixes are nearly alike, and a word that sends much, as the last one of a classifier's
sentence does, draws all of its likenesses. So what a word's rows have in common is taken out first: its mean and the
directions in which it varies most over the batch's words in random orders. What is left of a row is the mark of its
prefix. Nothing is lost by it but dimensions, of which there are more than enough: a mark is as exact as its row.

To find prefixes, entries count by the errors of their lines and columns. Then the rows of those found are held against
every entry in its own error, and what explains nothing beside the others is dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from gradaudit.leakage.adapters.chance import beyond_chance
from gradaudit.leakage.adapters.sparse_words import BOUND, IDLE, UNKNOWN, exact
from gradaudit.leakage.decoding.explain import named
from gradaudit.leakage.rowspace.growth import phantom
from gradaudit.leakage.rowspace.prefixes import Attended, leaf_values
from gradaudit.leakage.uneven.entries import Entries, entries
from gradaudit.leakage.uneven.exact_rows import EXPLAINED
from gradaudit.leakage.uneven.followed import LAST_MISSING
from gradaudit.leakage.uneven.held import PASS
from gradaudit.leakage.uneven.least_squares import inverses, normal_matrices
from gradaudit.leakage.uneven.weighted import Weighted
from gradaudit.models.base import TextModel
from gradaudit.progress import step
from gradaudit.types import NamedWord, Observation, Reconstruction

Prefix = tuple[int, ...]

_CLEAR, _LEFT = 3.0, 1.5
"""A direction is used where it is so many times the largest that errors alone would make, and as long as so much of it
is left."""
_EVIDENCE, _FEWEST = (4, 9), 4
"""Directions over all blocks for each word, first and where these were too few (rank 8, AdamW at 5e-5, 27 tokens: 14
found among 248, and 22 among 33), and blocks at least."""
_COMMON, _SHARE = 8, 0.5
"""Directions in which a word's rows vary that are taken out at most, and the share of the width for those of all words.
Without them, likenesses of loud rows are taken for the quiet ones (27 tokens, rank 2: 34 wrong of 50, with them 5 of
32)."""
_ORDERS, _LONG = 3, 24
"""Random orders for each of them, of so many words."""
_ALIKE, _AT_ONCE = 0.95, 8
"""Prefixes that score this share of the best one's are taken with it, one in so many of those that there are."""
_SOME = 1.1
"""Times as many prefixes as at the last time are held against the entries."""
_ROOM, _OFTEN = 0.95, 3
"""Rows that a block can hold, as a share of its dimensions: with as many rows as those anything is explained. And
prefixes taken at most for each word of the batch."""
_LONE = 1e-10
"""A row of whose square less than this share is left is one of those taken already: in a rotary model "that that" at a
sentence's start has the rows of "that"."""
_LITTLE = 1e-4
"""A row of which less than this share is left is heard as if so much were: it resembles those taken too much."""
_LOUDEST = 256
"""Candidates of which it is told exactly how much of what is left they explain: those that explain most as if all
entries of a line weighed alike, which is up to five times too much (9 tokens of a tiny model, SGD: 93 for 18)."""
_RIDGE, _TINY = 1e-12, 1e-300
"""Of a line's normal matrix, as a share of its diagonal, and in place of a square of nothing."""
_UNREPEATED = (
    "no sentence's rows explain what deeper blocks sent: these compute otherwise than the attacker's model, as a base "
    "in half precision does, or the words are too many"
)
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
    if common < 0 or not words:
        return {}
    found: dict[Prefix, bool] = {}
    tried = set[tuple[int, int]]()
    for vary, evidence in ((common, _EVIDENCE[0]), *((vary, _EVIDENCE[1]) for vary in (common, common // 2, 0))):
        blocks = _blocks(seen, evidence * len(ids)) if not found else {}
        if blocks and (vary, len(blocks)) not in tried:
            tried.add((vary, len(blocks)))  # all blocks may be asked already
            found = PrefixPursuit(model, blocks, ids, vary, rng).sentences()
    return found


def _blocks(seen: Observation, evidence: int) -> "dict[int, BlockDirections]":
    """Return the directions of the first blocks behind block 0, so many in all where there are as many."""
    blocks = dict[int, BlockDirections]()
    for layer in range(1, seen.model.depth):
        if len(blocks) >= _FEWEST and sum(len(block.whole) for block in blocks.values()) >= evidence:
            break
        if (sent := _sent(seen, layer)) is not None:
            blocks[layer] = BlockDirections(sent)
    return blocks


def _sent(seen: Observation, layer: int) -> Entries | None:
    """Return what was sent of a block's adapters; None for nothing."""
    sent = {v.name: g for r in "qkv" for v, g in zip(seen.model.views(layer, r), seen.role(layer, r), strict=False)}
    if not any(bool(g.any()) for g in sent.values()):
        return None
    changes = entries(seen, layer) or (exact(sent) if seen.kind == "gradient" else None)
    if changes is None:
        return None
    gradient, _ = changes.step.behind(changes.sent, changes.spread)
    return replace(changes, spread=changes.error(gradient, PASS))


def put_together(seen: Observation, words: Sequence[NamedWord], rng: torch.Generator) -> Reconstruction:
    """Return the sentences of a batch of which all words are known, with their labels.

    Args:
        seen, rng: see `sparse_sentences`.
        words: all of the batch.
    """
    sure = {word.token for word in words if word.certain} | seen.model.special.ids
    found = sparse_sentences(seen, [word.token for word in words], rng)
    if not found:
        deeper = (seen.role(layer, role) for layer in range(1, seen.model.depth) for role in "qkv")
        return Reconstruction(notes=(_UNREPEATED,) if any(deeper) else ())
    read = named(seen, list(found), (), {})
    # without labels, which tell that these are all, the directions alone prove them, but not those of some blocks
    alone = read.labels is None and seen.model.spec.loaded is None
    plain = ("proven",) * len(found) if alone else read.certificates or ()
    size, lost = seen.knowledge.batch_size or len(found), seen.model.spec.task == "causal-lm"
    all_used = {word.token for word in words} <= {token for text in found for token in text}
    whole = all_used and len(found) <= size and not lost
    certificates = tuple(
        told if whole and one and sure.issuperset(text) else "likely"
        for told, (text, one) in zip(plain, found.items(), strict=True)
    )
    notes = (*read.notes, *[_FEWER] * (len(found) < size), *[LAST_MISSING] * lost)
    return replace(read, certificates=certificates, notes=notes)


class BlockDirections:
    """The directions of a block, and what candidates' rows explain of them.

    Args:
        seen: entries of its adapters.
    """

    def __init__(self, seen: Entries) -> None:
        self.fitting = Weighted(seen)
        target, known = self.fitting.target, self.fitting.known & self.fitting.there
        error = torch.where(known, self.fitting.deviation(target), 1.0).clamp(max=1.0)
        across = error.square().mean(0).sqrt()
        along = (error / across).square().mean(1, keepdim=True).sqrt()
        self.columns = self.fitting.columns * across
        sent = torch.where(error > UNKNOWN, target.clamp(-BOUND, BOUND), target)
        self.lines = sent / (across * along)
        self.edge = len(target) ** 0.5 + target.shape[1] ** 0.5
        _, values, rows = torch.linalg.svd(self.lines, full_matrices=False)
        clear = values > _CLEAR * self.edge
        self.whole, self.size = rows[clear], values[clear, None]

    def without(self, rows: Tensor) -> None:
        """Look from now on at what no combination of some rows [k, d] explains, in units of the columns."""
        common = torch.linalg.qr(rows.T).Q
        self.free = torch.linalg.qr(common, mode="complete").Q[:, common.shape[1] :]
        self.left = self.whole @ self.free
        self.units, self.taken = self.left[:0], list[int]()
        self.rows = self.whole[:0]
        self.along, self.length, self.square = self.rows @ self.whole.T, self.rows.new_zeros(0), self.rows.new_zeros(0)

    def add(self, rows: Tensor) -> None:
        """Add candidates' rows [n, d]."""
        rows = rows / self.columns
        marks = rows @ self.free
        off = marks - (marks @ self.units.T) @ self.units
        self.rows = torch.cat([self.rows, rows])
        self.along = torch.cat([self.along, off @ self.left.T])
        self.length = torch.cat([self.length, off.square().sum(1)])
        self.square = torch.cat([self.square, rows.square().sum(1)])

    def take(self, at: int) -> None:
        """Take a candidate's row out of the directions and of all candidates."""
        unit = self.rows[at] @ self.free
        self.taken.append(at)
        for _ in range(2):  # once more for what rounding leaves
            unit = unit - (unit @ self.units.T) @ self.units
        unit = unit / unit.norm()
        self.units = torch.cat([self.units, unit[None]])
        part, own = self.rows @ (self.free @ unit), self.left @ unit
        self.length = self.length - part.square()
        self.along = self.along - part[:, None] * own
        self.left = self.left - own[:, None] * unit

    def score(self) -> Tensor:
        """Return [n] the share of each candidate's mark that lies in what is left, each direction counting alike."""
        turn, values, _ = torch.linalg.svd(self.size * self.left, full_matrices=False)
        there = values > _LEFT * self.edge
        along = ((self.along * self.size.T) @ (turn[:, there] / values[there])).square().sum(1)
        return torch.where(self.length > _LONE * self.square, along / self.length.clamp_min(_TINY), 0.0)

    def all_taken(self) -> Tensor:
        """Return the rows taken, [t, d]."""
        rows: Tensor = self.rows[self.taken] * self.columns
        return rows

    def held(self, rows: Tensor) -> tuple[Tensor, float]:
        """Return what each of some rows [t, d] explains of the entries, and what all leave: see `Weighted.held`."""
        _, own, chi2 = self.fitting.held(rows / self.fitting.columns)
        return own, chi2

    def unheard(self) -> "Unheard":
        """Return what the rows taken leave, for candidates to explain."""
        fitting, rows = self.fitting, self.all_taken() / self.fitting.columns
        left = fitting.signals(rows, 0.0)
        weights = fitting.weights(left @ rows, 0.0)
        candidates = self.rows * (self.columns / fitting.columns)
        return Unheard(rows, candidates, weights, weights * (fitting.target - left @ rows))

    def costs(self) -> Tensor:
        """Return [n, t] by how much chi^2 grows with each candidate in the place of each row taken."""
        marks = self.rows @ self.free
        inverse = torch.linalg.pinv(marks[self.taken])
        lone = 1 / inverse.norm(dim=0)
        alone = (self.lines @ self.free @ inverse * lone).square().sum(0)
        along = (marks @ (inverse * lone)).square()
        outside = marks.square().sum(1) - (marks @ self.units.T).square().sum(1)
        grown: Tensor = alone * (1 - along / (along + outside.clamp_min(0)[:, None]).clamp_min(_TINY))
        return grown


@dataclass(frozen=True, slots=True)
class Unheard:
    """What rows leave of entries, and how much of it candidates explain, in squared errors.

    Args:
        rows: [t, d] those taken, fitted line by line.
        candidates: [n, d].
        weights: [lines, d] one over the variance of each entry.
        left: [lines, d] what the rows leave, times the weights.
    """

    rows: Tensor
    candidates: Tensor
    weights: Tensor
    left: Tensor

    def about(self) -> Tensor:
        """Return [n] what each explains, as if all entries of a line weighed alike."""
        basis = torch.linalg.qr(self.rows.T).Q
        squares = self.candidates.square()
        outside = 1 - (self.candidates @ basis).square().sum(1) / squares.sum(1).clamp_min(_TINY)
        size = (self.weights @ squares.T) * outside.clamp_min(_LITTLE)
        gain: Tensor = ((self.left @ self.candidates.T).square() / size.clamp_min(_TINY)).sum(0)
        return gain

    def exactly(self, some: Tensor) -> Tensor:
        """Return what some candidates explain, given their places."""
        candidates = self.candidates[some]
        gain = candidates.new_zeros(len(some))
        between = inverses(normal_matrices(self.rows, self.weights), _RIDGE)
        for weights, left, inverse in zip(self.weights, self.left, between, strict=True):
            own, across = candidates.square() @ weights, (candidates * weights) @ self.rows.T
            size = (own - ((across @ inverse) * across).sum(1)).clamp_min(_LITTLE * own)
            gain += (candidates @ left).square() / size.clamp_min(_TINY)
        return gain


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
        self.candidates: list[Prefix] = []
        long = min(_LONG, model.max_length)
        count = -(-_ORDERS * (common + 1) * len(words) // long)
        orders = torch.randint(len(words), (count, long), generator=rng, device=rng.device).to(words.device)
        inputs = model.matrix_inputs([(layer, "q") for layer in blocks], words[orders])
        last = orders[:, 1:].flatten()
        for block, rows in zip(blocks.values(), inputs, strict=True):
            behind = rows[:, 1:].double().flatten(0, 1) / block.columns
            some = [behind[last == word] for word in range(len(words))]
            varied = [torch.linalg.svd(own - own.mean(0), full_matrices=False).Vh[:common] for own in some if len(own)]
            block.without(torch.cat([own.mean(0, keepdim=True) for own in some if len(own)] + varied))
        self._follow([()])

    def sentences(self) -> dict[Prefix, bool]:
        """Return the sentences that explain everything; none where none do."""
        room = min(_OFTEN * len(self.words), *(int(_ROOM * block.free.shape[1]) for block in self.blocks.values()))
        first, before = next(iter(self.blocks.values())), 0
        while some := self._next():
            for at in some:
                for block in self.blocks.values():
                    block.take(at)
            self._follow([self.candidates[at] for at in some])
            count = len(first.taken)
            step("decode: words put to sentences", count)
            if count >= _SOME * before:
                before = count
                if found := self._held():
                    return found
            if count > room:
                return {}
        return self._held()

    def _next(self) -> list[int]:
        """Return the candidates that score best."""
        blocks = list(self.blocks.values())
        score = torch.stack([block.score() for block in blocks]).sum(0)
        score[blocks[0].taken] = 0
        best = score.topk(min(1 + len(blocks[0].taken) // _AT_ONCE, len(score)))
        near: list[int] = best.indices[(best.values > 0) & (best.values >= _ALIKE * best.values[0])].tolist()
        return near

    def _follow(self, prefixes: Sequence[Prefix]) -> None:
        """Add every word behind some prefixes to the candidates."""
        layers = list(self.blocks)
        grown = sorted((prefix for prefix in prefixes if len(prefix) < self.model.max_length), key=len)
        for length, group in groupby(grown, key=len):
            some = list(group)
            ids = torch.tensor(some, dtype=torch.long, device=self.words.device).view(len(some), length)
            measures = [((layer, "q"), Tensor.double) for layer in layers]
            found = leaf_values(Attended(self.model, max(layers)), ids, self.words, measures)
            for layer, rows in zip(layers, found, strict=True):
                self.blocks[layer].add(rows.flatten(0, 1))
            self.candidates += [(*prefix, word) for prefix in some for word in self.words.tolist()]

    def _held(self) -> dict[Prefix, bool]:
        """Return the sentences of the rows that are needed, if these alone explain everything; none if they do not."""
        blocks = list(self.blocks.values())
        if not blocks[0].taken or blocks[0].held(blocks[0].all_taken())[1] > EXPLAINED:
            return {}
        prefixes = [self.candidates[at] for at in blocks[0].taken]
        own = torch.stack([block.held(block.all_taken())[0] for block in blocks]).mean(0)
        there = {
            part for prefix, one in zip(prefixes, own.tolist(), strict=True) if one > IDLE for part in _parts(prefix)
        }
        ended = sorted(there - {prefix[:-1] for prefix in there})
        if not ended or not self._explained(ended):
            return {}
        other = torch.stack([block.costs() for block in blocks]).sum(0)
        runs = [at for at, one in enumerate(self.candidates) if phantom(self.model, one)]
        other[[*blocks[0].taken, *runs]] = torch.inf
        chance = beyond_chance(sum(len(block.lines) for block in blocks))
        # entries that are hardly known are explained by too few rows, too: then others are still heard
        left = [block.unheard() for block in blocks]
        about = torch.stack([one.about() for one in left]).sum(0)
        about[blocks[0].taken] = 0
        loudest = about.topk(min(_LOUDEST, len(about))).indices
        unheard = torch.stack([one.exactly(loudest) for one in left]).sum(0)[about[loudest] > 0]
        sure = (other.min(0).values > chance) & bool((unheard < chance).all())
        certain = {prefix for prefix, one in zip(prefixes, sure.tolist(), strict=True) if one}
        return {sentence: certain.issuperset(_parts(sentence)) for sentence in ended}

    def _explained(self, sentences: Sequence[Prefix]) -> bool:
        """Say whether the rows of sentences, made anew, explain every block."""
        wanted, seen = [(layer, "q") for layer in self.blocks], set[Prefix]()
        rows: dict[int, list[Tensor]] = {layer: [] for layer in self.blocks}
        for one in sentences:
            new = [at for at, part in enumerate(_parts(one)) if part not in seen]
            seen.update(_parts(one))
            inputs = self.model.matrix_inputs(wanted, torch.tensor([one], device=self.words.device))
            for layer, some in zip(self.blocks, inputs, strict=True):
                rows[layer].append(some[0, new].double())
        return all(block.held(torch.cat(rows[layer]))[1] < EXPLAINED for layer, block in self.blocks.items())


def _parts(sentence: Prefix) -> list[Prefix]:
    """Return the prefixes of a sentence, itself the last."""
    return [sentence[: n + 1] for n in range(len(sentence))]
