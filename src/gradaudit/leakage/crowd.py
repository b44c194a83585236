"""Decoders past the width: more tokens than a row space has directions, and still sentence by sentence.

A full row space holds every row, but not every row equally. With G the stacked gradients of a block, a row x of the
batch that brought the signal delta has x^T (G^T G)^-1 x of at most about 1 / |delta|^2; a row that was not there is
made of the weak directions too, and is far above. So prefixes are grown by that leverage, many at a time. Where
sentences end is exact at any load: a classifier's last block has a query gradient at the last token of each sentence
only, so its row space has as many directions as there are sentences, and a sentence whose end lies in it was there. Its
own gradient is then taken out; the next round has fewer tokens, and below the width the rest is grown as ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gradaudit.leakage.deflation import Remainder, matrices_of, remainder, sentence_gradient
from gradaudit.leakage.ends import Ends
from gradaudit.leakage.growth import AcceptedTokens, Rules, grow
from gradaudit.leakage.prefixes import leaf_values
from gradaudit.leakage.subspace import Span
from gradaudit.models.base import TextModel
from gradaudit.progress import step
from gradaudit.types import Observation

FULL = 0.02
"""A row space is full when rows that are not the batch's lie nearer than this: right ones are at 1e-6 to 1e-5."""
_PROBES = 64
"""Tokens spread over the vocabulary whose rows show whether a row space is full, and where wrong rows lie."""
_FLOOR = 1e-6
"""Directions weaker than this share of the strongest are rounding."""
_DEEPER = 3
"""The second block that rates prefixes: contrast is best from block 2 on, and each block costs."""
_OTHERS = 8
"""So many prefixes tell how low a word lies after any."""
_MOST = 0.7
"""Share of prefixes after which a word is taken to lie lower than as a wrong one: the others may be its own."""
_CHILDREN = 8
"""Continuations of a prefix that are rated in the deeper block."""
_TELLS = 2.0
"""A continuation so many e-folds of leverage below the others leaves no room for those that tell nothing."""
_WORDS = 1.25
"""Words taken to be in the batch, times the width, where block 0's row space is full too."""
_PATIENCE = (6, 32)
"""Positions without a new sentence that end a round: short sentences first, which make the long ones easier."""


@dataclass(frozen=True)
class Leverage:
    """How hard a row is to make from what a block's gradients hold: low for rows of the batch.

    Args:
        weights: [d, d] directions over their singular values.
        layer: block.
    """

    weights: Tensor
    layer: int

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the logarithm of the leverage of rows [..., d]."""
        unit = torch.nn.functional.normalize(rows, dim=-1)
        leverage: Tensor = (unit @ self.weights.to(rows.dtype)).square().sum(-1).log()
        return leverage


def leverage_of(stacked: Tensor, layer: int) -> Leverage:
    """Return the leverage in stacked gradients [out, d] of a block."""
    _, values, vh = torch.linalg.svd(stacked, full_matrices=False)
    strength = (values / values[0]).square() + _FLOOR**2
    return Leverage(vh.T * strength.rsqrt(), layer)


@torch.no_grad()
def is_full(model: TextModel, span: Span) -> bool:
    """Say whether a row space tells nothing apart: rows that are not the batch's lie in it as well.

    Args:
        model: the model.
        span: of any block.
    """
    if span.rank >= model.width:
        return True
    if span.rank < model.width // 2:
        return False
    probes = _probes(model, span.basis.device)
    # as second tokens: the first of a text has nearly one input in models that attend to it as a sink
    pairs = torch.stack([probes.roll(1), probes], 1)
    residuals = span.residual(model.attention_inputs(span.layer, pairs)[:, 1])
    return float(residuals.median()) < FULL


def _probes(model: TextModel, device: torch.device) -> Tensor:
    apart = max(1, model.vocabulary_size // _PROBES)
    return torch.arange(apart // 2, model.vocabulary_size, apart, device=device)


@dataclass
class Crowd:
    """The sentences of a full row space, found and taken out round by round.

    Args:
        seen: one gradient of a classifier, a decoder of three blocks or more, with known batch size.
        rules: tolerances and bounds of what is grown once it is below the width.
        beam: prefixes kept; twice as many after a long round that found nothing.
        most: prefixes kept at most.
    """

    seen: Observation
    rules: Rules
    beam: int = 96
    most: int = 512
    tried: int = 0
    found: list[tuple[int, ...]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = self.seen.model
        size = self.seen.knowledge.batch_size
        assert size is not None
        self.size = size
        self.last = self.model.depth - 1
        self.deeper = min(_DEEPER, self.last - 1)

    def sentences(self) -> list[tuple[int, ...]]:
        """Return the sentences that are proven, then what is grown exactly from the rest, then the likeliest of it."""
        self.rest = self._begin()
        guesses: list[tuple[int, ...]] = []
        beam, patience = self.beam, _PATIENCE[0]
        while beam <= self.most and len(self.found) < self.size:
            first, second = self.rest.span(0), self.rest.span(1)
            if second.rank == 0:
                guesses = []
                break
            if not is_full(self.model, second) and not is_full(self.model, first):
                guesses = self._grown(first, second)
                break
            before = len(self.found)
            guesses = self._round(first, beam, patience)
            if len(self.found) == before:
                beam = beam if patience < _PATIENCE[1] else 2 * beam
                patience = _PATIENCE[1]
        return self.found + guesses[: self.size - len(self.found)]

    def _begin(self) -> Remainder:
        keys = [(layer, role) for layer in {0, 1, self.deeper} for role in "qkv"] + [(self.last, "q")]
        eps = torch.finfo(next(iter(self.seen.tensors.values())).dtype).eps
        return remainder(matrices_of(self.seen, keys), eps)

    def _grown(self, first: Span, second: Span) -> list[tuple[int, ...]]:
        """Grow what is left below the width."""
        left = self.size - len(self.found)
        fewer = replace(self.seen, knowledge=replace(self.seen.knowledge, batch_size=left))
        grown = grow(fewer, first, second, self.rules)
        self.tried += grown.tried
        self.notes += [note for note in grown.notes if note not in self.notes]
        self._take_out(grown.sentences, Ends(self.model, self.rest, self.size))  # which also counts copies
        return [s for s in grown.sentences if s not in self.found]

    def _round(self, first: Span, beam: int, patience: int) -> list[tuple[int, ...]]:
        """Grow the likeliest prefixes, take out those that are sentences, and return the likeliest of the others."""
        model, quiet = self.model, 0
        full = is_full(model, first)
        accepted = None if full else AcceptedTokens(model, first, self.rules.token)
        words = leverage_of(self.rest.stacked(0), 0)
        prefixes = torch.zeros((1, 0), dtype=torch.long, device=first.basis.device)
        score = torch.zeros(1, device=first.basis.device)
        likely: dict[tuple[int, ...], float] = {}
        blocks = self._leverages()
        for position in range(min(self.rules.longest, model.max_length)):
            candidates = accepted.at(position) if accepted is not None else self._likely_words(words, position)
            if len(candidates) == 0 or len(self.found) >= self.size or quiet >= patience:
                break
            prefixes, score = self._extended(blocks, prefixes, score, candidates, beam)
            step(f"dager: beam {beam}, prefixes of {position + 1} tokens, sentences", len(self.found), self.size)
            likely |= {tuple(p): float(s) for p, s in zip(prefixes.tolist(), score, strict=True)}
            ends = Ends(model, self.rest, self.size)
            if self._take_out([tuple(prefixes[row].tolist()) for row in ends.among(prefixes)], ends):
                quiet, blocks = 0, self._leverages()
                if not is_full(model, self.rest.span(1)):
                    break  # the rest is below the width
            elif position >= _PATIENCE[0]:
                quiet += 1
        return _apart(likely, self.size - len(self.found))

    def _likely_words(self, words: Leverage, position: int) -> Tensor:
        """Return the ids that may be in the batch, where block 0's row space is full too."""
        place = position if self.model.absolute_positions else 0
        count = min(int(_WORDS * self.model.width), self.model.vocabulary_size)
        return words(self.model.first_inputs(place)).topk(count, largest=False).indices

    def _leverages(self) -> list[Leverage]:
        return [leverage_of(self.rest.stacked(layer), layer) for layer in sorted({1, self.deeper})]

    def _extended(
        self, blocks: Sequence[Leverage], prefixes: Tensor, score: Tensor, candidates: Tensor, most: int
    ) -> tuple[Tensor, Tensor]:
        """Return the likeliest prefixes one token longer, and their scores."""
        first, *deeper = blocks
        values = self._rated(first, prefixes, candidates.expand(len(prefixes), -1))
        # some words lie low after any prefix: what tells is a word that lies low after this one
        usual = _usual(values)
        values = values - usual
        few = min(_CHILDREN, len(candidates))
        best = values.topk(few, largest=False)
        total, children = best.values, candidates[best.indices]
        for block in deeper:
            words, place = torch.unique(children, return_inverse=True)
            some = prefixes[:: max(1, len(prefixes) // _OTHERS)]
            usual = _usual(self._rated(block, some, words.expand(len(some), -1)))
            total = total + self._rated(block, prefixes, children) - usual[place]
        # where one tells, those that do not are wrong; where none tells, each may be the right one
        telling = total
        if not self.model.absolute_positions and prefixes.shape[1]:
            # a run of one token has the rows of that token alone (see `grow`): that it fits tells nothing
            run = (prefixes == prefixes[:, :1]).all(1, keepdim=True) & (children == prefixes[:, :1])
            telling = total.masked_fill(run, 0.0)
        best_child = telling.amin(1, keepdim=True)
        total = total.masked_fill((best_child < -_TELLS * len(blocks)) & (total > best_child / 2), torch.inf)
        total = score[:, None] + total / len(blocks)
        kept = total.flatten().topk(min(most, int(total.isfinite().sum())), largest=False)
        parent, child = kept.indices // few, kept.indices % few
        return torch.cat([prefixes[parent], children[parent, child][:, None]], 1), kept.values

    def _rated(self, block: Leverage, prefixes: Tensor, candidates: Tensor) -> Tensor:
        self.tried += candidates.numel()
        return leaf_values(self.model, block.layer, prefixes, candidates, block)

    def _take_out(self, sentences: Iterable[tuple[int, ...]], ends: Ends) -> bool:
        """Take the sentences that were sent out of the gradient, and say whether there was one."""
        before = len(self.found)
        for sentence in sentences:
            for label in ends.labels(sentence):
                own = sentence_gradient(self.model, sentence, label, self.rest.left)
                self.rest = self.rest.without(own, 1 / self.size)
                self.found.append(sentence)
        return len(self.found) > before


def _usual(values: Tensor) -> Tensor:
    """Return the leverage, as a logarithm, that each word [C] has after most of the prefixes of values [P, C]."""
    if len(values) < _OTHERS:
        return values.median().expand(values.shape[1])
    return values.quantile(_MOST, 0)


def _apart(likely: dict[tuple[int, ...], float], count: int) -> list[tuple[int, ...]]:
    """Return the likeliest texts of which none begins another."""
    chosen: list[tuple[int, ...]] = []
    for text in sorted(likely, key=lambda s: likely[s]):
        if not any(text[: len(c)] == c or c[: len(text)] == text for c in chosen):
            chosen.append(text)
        if len(chosen) == count:
            break
    return chosen
