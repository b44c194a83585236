"""Decoders past the width: more tokens than a row space has directions, and still sentence by sentence.

A full row space holds every row, but not every row equally, and the feed-forwards' second matrices read rows of several
times as many entries, of which no row space is full: what both say of a row (`leakage.evidence`) is enough to grow
prefixes, many at a time. Where sentences end is exact at any load: a classifier's last block has a query gradient at
the last token of each sentence only, so its row space has as many directions as there are sentences, and a sentence
whose end lies in it was there. Its own gradient is then taken out; the next round has fewer tokens, and below the width
the rest is grown as ever.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gradaudit.leakage.rowspace.deflation import Remainder, matrices_of, remainder, sentence_gradient
from gradaudit.leakage.rowspace.evidence import Rating, deviation, leverage_of, outside_of
from gradaudit.leakage.rowspace.growth import AcceptedTokens, GrowthRules, grow, spread_tokens
from gradaudit.leakage.rowspace.prefixes import Attended, Measures, blocks_for, leaf_values
from gradaudit.leakage.rowspace.sentence_ends import Ends
from gradaudit.leakage.rowspace.subspace import Span
from gradaudit.models.base import TextModel
from gradaudit.progress import step
from gradaudit.types import Observation

FULL = 0.02
"""A row space is full when rows that are not the batch's lie nearer than this: right ones are at 1e-6 to 1e-5."""
_DEEPER = 3
"""The last block whose inputs rate prefixes: more of them tell more, and each costs."""
_OTHERS = 8
"""So many prefixes tell how low a word lies after any."""
_MOST = 0.7
"""Share of prefixes after which a word is taken to lie lower than as a wrong one: the others may be its own."""
_KEPT = 400
"""Words that are looked at after each prefix: those that lie lowest after a few."""
_CHILDREN = 8
"""Continuations of a prefix that are rated in deeper blocks too."""
_BEAM = 96
"""Prefixes kept at least."""
_BRANCHES = (40, 2)
"""So many, while a prefix has at most so many words: many sentences begin alike."""
_TELLS = 4.0
"""A continuation so many deviations below the others leaves no room for those that tell nothing."""
_FORGET = 0.9
"""What a position's evidence still counts at the next: past a sentence's end a prefix lives on what it was."""
_USUAL = (160, 12)
"""Texts of made-up words, and their length, that show which rows a model has for anything."""
_WORDS = 1.25
"""Words taken to be in the batch, times the width, where block 0's row space is full too."""
_STRIDE = 7919
"""A prime: made-up texts take words from all of the vocabulary, and not the same twice."""
_TAIL = (0.02, 2.05)
"""A normal measure has this share below so many deviations; past the first words far fewer pairs are right."""
_AT_MOST = 12.0
"""No single measure counts more deviations."""
_ROUNDING = 16.0
"""Directions of a matrix's gradient so many times its rounding are the batch's."""
_ENOUGH = 5.0
"""All measures together count no more: else prefixes that begin with a loud word leave no room for others."""
_PATIENCE = (6, 32)
"""Positions without a new sentence that end a round: short sentences first, which make the long ones easier."""


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
    probes = spread_tokens(model, span.basis.device)
    # as second tokens: the first of a text has nearly one input in models that attend to it as a sink
    pairs = torch.stack([probes.roll(1), probes], 1)
    residuals = span.residual(model.attention_inputs(span.layer, pairs)[:, 1])
    return float(residuals.median()) < FULL


@dataclass
class Crowd:
    """The sentences of a full row space, found and taken out round by round.

    Args:
        seen: one gradient of a classifier, a decoder of three blocks or more, with known batch size.
        rules: tolerances and bounds of what is grown once it is below the width.
        beam: prefixes kept, twice as many after a long round that found nothing; 0 for twice the batch, 96 at least.
        most: prefixes kept at most.
    """

    seen: Observation
    rules: GrowthRules
    beam: int = 0
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
        rated = [(layer, "q") for layer in sorted({0, 1, self.deeper}) if any(at == layer for at, _ in self.rest.left)]
        rated += [key for key in self.rest.left if key[1] == "p"]
        self.usual = _usual_rows(self.model, rated, next(iter(self.rest.left.values())).device)
        words, longest = self.model.vocabulary_size, self.model.max_length
        fit = [s for s in self.seen.known if s and len(s) <= longest and max(s) < words]
        self._take_out(fit, Ends(self.model, self.rest, self.size))
        guesses: list[tuple[int, ...]] = []
        beam, patience = min(self.beam or max(_BEAM, 2 * self.size), self.most), _PATIENCE[0]
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
        keys += [(layer, "p") for layer in range(self.deeper)]
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
        accepted = None if full else AcceptedTokens(model, first, self.rules.token, self.rules.words)
        words = leverage_of(self.rest.stacked(0), self.usual[0, "q"])
        prefixes = torch.zeros((1, 0), dtype=torch.long, device=first.basis.device)
        score = torch.zeros(1, device=first.basis.device)
        likely: dict[tuple[int, ...], float] = {}
        measures = self._measures()
        self.attended = Attended(model, blocks_for(self.usual))
        for position in range(min(self.rules.longest, model.max_length)):
            candidates = accepted.at(position) if accepted is not None else self._likely_words(words, position)
            if len(candidates) == 0 or len(self.found) >= self.size or quiet >= patience:
                break
            prefixes, score = self._extended(measures, prefixes, score, candidates, beam)
            step(f"dager: beam {beam}, prefixes of {position + 1} tokens, sentences", len(self.found), self.size)
            likely |= {tuple(p): float(s) for p, s in zip(prefixes.tolist(), score, strict=True)}
            ends = Ends(model, self.rest, self.size)
            if self._take_out([tuple(prefixes[row].tolist()) for row in ends.among(prefixes)], ends):
                quiet, measures = 0, self._measures()
                if not is_full(model, self.rest.span(1)):
                    break  # the rest is below the width
            elif position >= _PATIENCE[0]:
                quiet += 1
        return _apart(likely, self.size - len(self.found))

    def _likely_words(self, words: Rating, position: int) -> Tensor:
        """Return the ids that may be in the batch, where block 0's row space is full too."""
        if self.rules.words is not None:
            return self.rules.words
        place = position if self.model.absolute_positions else 0
        count = min(int(_WORDS * self.model.width), self.model.vocabulary_size)
        return words(self.model.first_inputs(place)).topk(count, largest=False).indices

    def _measures(self) -> tuple[Measures, Measures]:
        """Return what rates every word after every prefix, and what rates the best of them."""
        rated = []
        for key, usual in self.usual.items():
            # what is common is learned from one half of the rows, and how far rows deviate from it from the other
            learned, measured = usual[::2], usual[1::2]
            if key == (0, "q"):
                continue  # it knows words, not what comes before them
            if key[1] == "p":
                rounding = _ROUNDING * self.rest.eps * self.rest.whole[key]
                measure = outside_of(self.rest.left[key], rounding, learned)
            else:
                measure = leverage_of(self.rest.stacked(key[0]), learned)
            rated.append((key, deviation(measure, measured)))
        near = ((0, "p"), (1, "q"))
        return [one for one in rated if one[0] in near], [one for one in rated if one[0] not in near]

    def _extended(
        self, measures: tuple[Measures, Measures], prefixes: Tensor, score: Tensor, words: Tensor, most: int
    ) -> tuple[Tensor, Tensor]:
        """Return the likeliest prefixes one token longer, and their scores."""
        at_once, deeper = measures
        some = prefixes[:: max(1, len(prefixes) // _OTHERS)]
        if len(prefixes) > 2 * _OTHERS and len(words) > _KEPT:
            low = self._rated(at_once, some, words).mean(0).median(0).values
            words = words[low.topk(_KEPT, largest=False).indices]
        values = self._rated(at_once, prefixes, words)
        usual = _usual(values)
        values = (values - usual[:, None]) / _tail(values, usual)
        many, short = _BRANCHES
        few = min(many if prefixes.shape[1] <= short else _CHILDREN, len(words))
        few = min(max(few, 2 * most // len(prefixes)), len(words))
        best = values.mean(0).topk(few, largest=False)
        children = words[best.indices]
        total = values.gather(2, best.indices.expand(len(values), -1, -1))
        if deeper:
            every, place = torch.unique(children, return_inverse=True)
            others = self._rated(deeper, some, every)
            usual = _usual(others)
            seen = (self._rated(deeper, prefixes, children) - usual[:, place]) / _tail(others, usual)
            total = torch.cat([total, seen])
        total = total.clamp(-_AT_MOST, _AT_MOST).mean(0).clamp_min(-_ENOUGH)
        if not self.model.absolute_positions and prefixes.shape[1]:
            # a run of one token has the rows of that token alone (see `grow`): that it fits tells nothing
            run = (prefixes == prefixes[:, :1]).all(1, keepdim=True) & (children == prefixes[:, :1])
            total = total.masked_fill(run, 0.0)
        # where one tells, those that do not are wrong; where none tells, each may be the right one
        best_child = total.amin(1, keepdim=True)
        if prefixes.shape[1]:  # but all sentences go on from no word at all
            total = total.masked_fill((best_child < -_TELLS) & (total > -_TELLS / 2), torch.inf)
        total = _FORGET * score[:, None] + total
        kept = total.flatten().topk(min(most, int(total.isfinite().sum())), largest=False)
        parent, child = kept.indices // few, kept.indices % few
        return torch.cat([prefixes[parent], children[parent, child][:, None]], 1), kept.values

    def _rated(self, measures: Measures, prefixes: Tensor, words: Tensor) -> Tensor:
        words = words.expand(len(prefixes), -1)
        self.tried += words.numel()
        return leaf_values(self.attended, prefixes, words, measures)

    def _take_out(self, sentences: Iterable[tuple[int, ...]], ends: Ends) -> bool:
        """Take the sentences that were sent out of the gradient, and say whether there was one."""
        before = len(self.found)
        for sentence in sentences:
            for label in ends.labels(sentence):
                own = sentence_gradient(self.model, sentence, label, self.rest.left)
                self.rest = self.rest.without(own, 1 / self.size)
                self.found.append(sentence)
        return len(self.found) > before


@torch.no_grad()
def _usual_rows(
    model: TextModel, keys: Sequence[tuple[int, str]], device: torch.device
) -> dict[tuple[int, str], Tensor]:
    """Return what enters some matrices for texts of words from all over the vocabulary, [n, in] each."""
    texts, length = _USUAL[0], min(_USUAL[1], model.max_length)
    spread = torch.arange(texts * length, device=device) * _STRIDE % model.vocabulary_size
    rows = model.matrix_inputs(keys, spread.view(texts, length))
    return {key: x.flatten(0, 1) for key, x in zip(keys, rows, strict=True)}


def _usual(values: Tensor) -> Tensor:
    """Return what each word has after most prefixes, [M, C] of values [M, P, C].

    Some words lie low after any prefix: what tells is a word that lies low after this one.
    """
    return values.quantile(_MOST, 1) if values.shape[1] >= _OTHERS else torch.zeros_like(values[:, 0])


def _tail(values: Tensor, usual: Tensor) -> Tensor:
    """Return by what measures [M, P, C] are divided, [M, 1, 1]: wrong words may vary more than rows of any text do."""
    share, deviations = _TAIL
    # torch's quantile takes 16 million values
    low = (values - usual[:, None]).flatten(1)
    low = low[:, :: max(1, low.shape[1] // 100_000)]
    return (-low.quantile(share, 1) / deviations).clamp_min(1.0)[:, None, None]


def _apart(likely: dict[tuple[int, ...], float], count: int) -> list[tuple[int, ...]]:
    """Return the likeliest texts of which none begins another."""
    chosen: list[tuple[int, ...]] = []
    for text in sorted(likely, key=lambda s: likely[s]):
        if not any(text[: len(c)] == c or c[: len(text)] == text for c in chosen):
            chosen.append(text)
        if len(chosen) == count:
            break
    return chosen
