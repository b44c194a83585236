"""A decoder's sentences from whatever matrix was shared, dropout off: prefixes that grow in the span of its inputs.

What enters a matrix of a causal model at a token depends on this token and those before it, and on nothing behind it.
So the span of one matrix's inputs tells whether a token may follow a prefix, and sentences grow token by token; DAGER
(Petrov et al., 2024) asks two blocks' queries for the same. Words that the model itself foretells, and frequent ones,
are tried first, and a prefix that was continued is asked again last, so that of one sentence a small share of the
vocabulary is tried. The search ends where as many rows were found as the span has directions.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from gradaudit.errors import NotSupportedError
from gradaudit.leakage.decoding.explain import named
from gradaudit.leakage.one_matrix.batch import held
from gradaudit.leakage.one_matrix.most_telling import doubtful_directions, fitted_span
from gradaudit.leakage.priors import usual_places
from gradaudit.leakage.rowspace.deflation import matrices_of
from gradaudit.leakage.rowspace.growth import ROUNDING, UNRELATED, phantom
from gradaudit.leakage.rowspace.prefixes import Attended, blocks_for, leaf_values
from gradaudit.leakage.rowspace.subspace import Span, cut_above_noise, cut_by_gap, span
from gradaudit.leakage.uneven.entries import entries
from gradaudit.leakage.uneven.held import ReadBlock
from gradaudit.leakage.uneven.steps import PlainStep
from gradaudit.models.base import TextModel
from gradaudit.progress import answering, step
from gradaudit.types import Observation, Reconstruction

_FIRST, _TIMES = 256, 4
"""Words tried behind a prefix at first, and how many times as many after every further try."""
_LATER = 3
"""A prefix that was continued waits for so many tries of the others: one sentence has no second continuation."""
_NEW = 1e-4
"""A row farther than this from the span of those found is one of its own; rounding leaves 1e-6."""
_MOST = 2048
"""Prefixes of one length, beyond which nothing tells sentences: block 0's queries of GPT-2 fit every order of words."""

Text = tuple[int, ...]


class PrefixSearch:
    """Prefixes that lie in the span of what enters one matrix, or several that read the same.

    Args:
        model: a decoder.
        inside: the span.
        size: sentences in the batch; None where that is not known.
        longest: tokens that a sentence may have.

    Attributes:
        crowded: more prefixes fit than can be told apart.
    """

    def __init__(self, model: TextModel, inside: Span, size: int | None, longest: int) -> None:
        self.model, self.inside, self._size, self.crowded = model, inside, size, False
        self._longest = min(longest, model.max_length)
        self._key = (inside.layer, inside.roles[0])
        self._attended = Attended(model, blocks_for([self._key]))
        device = inside.basis.device
        self._usual = torch.tensor(usual_places(model), device=device)
        framing = {*model.special.prefix, *model.special.suffix}
        never = [token for token in sorted(model.special.ids - framing) if token < model.vocabulary_size]
        self._never = torch.tensor(never, dtype=torch.long, device=device)
        ends = [0, _FIRST]
        while ends[-1] < model.vocabulary_size - len(self._never):
            ends.append(_TIMES * ends[-1])
        self._parts = [slice(*pair) for pair in pairwise(ends)]
        self._waiting: dict[tuple[int, int], dict[Text, int]] = {}
        self._continued: dict[Text, bool] = {}
        self._directions = inside.basis.new_zeros(0, len(inside.basis))

    @property
    def sentences(self) -> list[Text]:
        """Prefixes that nothing continues."""
        ends = [text for text, continued in self._continued.items() if not continued]
        own = [text for text in ends if not phantom(self.model, text)]
        runs = {text[:1] for text in ends if phantom(self.model, text)}
        return own + sorted(run for run in runs if not any(text[:1] == run for text in own))

    @property
    def missing(self) -> int:
        """Directions of the span that no row was found for, less those that may be of errors."""
        return self.inside.rank - len(self._directions) - doubtful_directions(self.inside)

    def run(self) -> None:
        """Grow prefixes until the span is full, or nothing fits."""
        known = self.model.special.prefix
        for at in range(len(known)):
            self._accept([known[:at]], torch.zeros(1, dtype=torch.long), torch.tensor([[known[at]]]), known=True)
        self._continued.clear()
        self._wait(known, 0)
        while self._waiting and self.missing > 0:
            some = self._waiting.pop(min(self._waiting))
            if len(some) > _MOST:
                self.crowded = True
                return
            by_chunk: dict[int, list[Text]] = {}
            for text, chunk in some.items():
                by_chunk.setdefault(chunk, []).append(text)
            for chunk, texts in by_chunk.items():
                self._try(texts, chunk)
            step(f"growing prefixes, {self.missing} rows missing", len(self._directions), self.inside.rank)

    def _wait(self, text: Text, chunk: int) -> None:
        """Let a prefix wait for the next words to be tried behind it."""
        if chunk < len(self._parts) and len(text) < self._longest:
            # sentences of a batch part early
            later = _LATER if self._size == 1 else min(_LATER, len(text) - len(self.model.special.prefix))
            turn = chunk + later * self._continued.get(text, False)
            # a run of a sentence's first word always fits without positions, and is seldom what was sent
            turn += _LATER * len(text) * phantom(self.model, text)
            self._waiting.setdefault((turn, len(text)), {})[text] = chunk

    def _try(self, texts: list[Text], chunk: int) -> None:
        """Try some words behind prefixes of one length."""
        prefixes = self._tensor(texts)
        words = self._in_turn(prefixes)[:, self._parts[chunk]]
        measures = [(self._key, self.inside.residual), (self._key, self.inside.expected)]
        residuals, expected = leaf_values(self._attended, prefixes, words, measures)
        if self.inside.lost is None:
            limit = cut_by_gap(residuals.flatten(), ROUNDING, UNRELATED)
        else:
            limit = cut_above_noise(residuals.flatten(), expected.flatten(), self.inside.rank, ROUNDING)
        parent, at = torch.where(residuals < limit)
        self._accept(texts, parent, words[parent, at][:, None])
        for text in texts:
            self._wait(text, chunk + 1)

    def _in_turn(self, prefixes: Tensor) -> Tensor:
        """Return all words in the order in which they are tried behind each prefix, [P, V less special tokens]."""
        places = self._usual.expand(len(prefixes), -1)
        if prefixes.shape[1]:
            foretold = self.model.foretold(prefixes).argsort(descending=True).argsort()
            places = torch.minimum(places, foretold)
        places = places.index_fill(1, self._never, len(self._usual))
        return places.argsort(stable=True)[:, : len(self._usual) - len(self._never)]

    def _accept(self, texts: list[Text], parent: Tensor, tokens: Tensor, known: bool = False) -> None:
        """Take up prefixes with a token behind each, and their rows; of known tokens only rows that are in the span."""
        if len(parent) == 0:
            return
        prefixes = self._tensor(texts)[parent.to(self.inside.basis.device)]
        rows = leaf_values(self._attended, prefixes, tokens.to(prefixes.device), [(self._key, lambda x: x)])[0, :, 0]
        for text, token, row in zip((texts[n] for n in parent.tolist()), tokens[:, 0].tolist(), rows, strict=True):
            if not known or float(self.inside.residual(row)) < UNRELATED / 10:
                self._fill(row)
            self._continued[text] = True
            self._continued.setdefault((*text, token), False)
            if not known:
                self._wait((*text, token), 0)

    def _fill(self, row: Tensor) -> None:
        """Count a row that adds a direction to those found."""
        unit = torch.nn.functional.normalize(row.double(), dim=0)
        left = unit
        for _ in range(2):  # once is not orthogonal to rounding
            left = left - (left @ self._directions.T) @ self._directions
        size = float(left.norm())
        if size > _NEW:
            self._directions = torch.cat([self._directions, left[None] / size])

    def _tensor(self, texts: list[Text]) -> Tensor:
        return torch.tensor(texts, dtype=torch.long, device=self.inside.basis.device).view(len(texts), -1)


def read_prefixes(seen: Observation, longest: int, rng: torch.Generator) -> Reconstruction | None:
    """Return a decoder's sentences, dropout off, from whatever matrix of a block its update holds.

    Args:
        seen: a gradient, or the weight change of a step of SGD.
        longest: tokens that a sentence may have.
        rng: draws the noise that errors are measured with.

    Returns:
        None where nothing tells: another kind of update or model, or no matrix whose inputs tell prefixes apart.
    """
    known = seen.knowledge
    found = None if known.dropout or not seen.model.causal else telling_span(seen, rng)
    if found is None:
        return None
    inside, block = found
    search = PrefixSearch(seen.model, inside, known.batch_size, longest)
    with answering(lambda had: _told(seen, search, block) if search.sentences else None):
        search.run()
    return _told(seen, search, block)


def telling_span(seen: Observation, rng: torch.Generator) -> tuple[Span, ReadBlock | None] | None:
    """Return the span of the inputs of the shared matrix that costs least to search; None where none tells sentences.

    With it come the entries and their low rank, where each has an error of its own: those of a step of SGD.

    Block 0's q, k and v read single words, which with absolute positions is enough for one sentence; so does its
    feed-forward where that stands beside the attention (Phi). A classifier's last block sends its keys and values at
    every token, and all else at the last one alone. Keys behind absolute positions hold differences of a sentence's
    rows alone, and are left out where they come alone.

    Raises:
        NotSupportedError: only queries were sent, and the first token is not known: it attends to itself alone, so that
            its query changes nothing.
    """
    model, blind = seen.model, False
    alone = seen.knowledge.batch_size == 1 and model.absolute_positions
    last = model.depth - 1 if model.spec.task == "classification" else model.depth
    for layer in range(model.depth):
        for roles in ("qkv", "f", "o", "p"):
            there = {role for role in roles if seen.role(layer, role)}
            if not there or (layer == last and not there & {"k", "v"}):
                continue
            if there == {"k"} and model.absolute_positions:
                continue
            if layer == 0 and not alone and not _contextual(model, roles[0]):
                continue
            if there == {"q"} and not model.special.prefix:
                blind = not seen.role(0, "q")  # block 0's tell words
                continue
            found = _spanned(seen, layer, roles, rng)
            if found is not None and 1 < found[0].rank < len(found[0].basis):
                return found
    if blind:
        raise NotSupportedError(
            "attack 'decode' does not read a decoder's queries alone where its tokenizer puts no token first: the "
            "first word sends no query; it needs a key, value, output or feed-forward matrix"
        )
    return None


def _spanned(seen: Observation, layer: int, roles: str, rng: torch.Generator) -> tuple[Span, ReadBlock | None] | None:
    """Return the span of what enters some matrices, by their entries where each has an error of its own."""
    if (some := entries(seen, layer, roles)) is not None:
        # of AdamW's steps (5e-5, SmolLM2) one of five trials gave the sentence, and none a proof; of a gate's two
        # matrices one would be explained by the other's gradient
        plain = seen.kind == "delta" and isinstance(some.step, PlainStep)
        alone = len(seen.model.views(layer, roles[0])) == 1
        return fitted_span(seen, layer, some, rng) if plain and alone else None
    exact = span(seen, layer, roles) if seen.kind == "gradient" else None
    return None if exact is None else (exact, None)


def _contextual(model: TextModel, role: str) -> bool:
    """Say whether what enters a matrix of block 0 depends on the words before."""
    ids = torch.tensor([[0, 1], [1, 1]], device=model.device)
    first, second = model.matrix_inputs([(0, role)], ids)[0][:, 1]
    return not torch.allclose(first, second)


def _told(seen: Observation, search: PrefixSearch, block: ReadBlock | None) -> Reconstruction:
    """Return what a search has, proven where the sentences make the matrix that was read."""
    inside = search.inside
    notes = [f"read from block {inside.layer}'s {', '.join(inside.roles)} alone"]
    if search.crowded:
        notes.append("more prefixes fit than can be told apart")
        return Reconstruction((), certificates=(), notes=tuple(notes), details=inside.told())
    if search.missing > 0:
        notes.append(f"{search.missing} of {inside.rank} rows belong to none of these sentences")
    elif len(search.sentences) < (seen.knowledge.batch_size or 0):
        notes.append("the others of the batch are copies of these, or begin one of them")
    if block is not None:
        return held(seen, block, search.sentences, notes, inside.told())
    keys = [(inside.layer, role) for role in inside.roles]
    return named(seen, search.sentences, notes, inside.told(), matrices_of(seen, keys))
