"""A batch read from the space of one matrix's inputs: sentence by sentence, each taken out of the space when found."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gradaudit.leakage.decoding.explain import named
from gradaudit.leakage.one_matrix.drawn_masks import DrawnMasks
from gradaudit.leakage.one_matrix.most_telling import signal_of
from gradaudit.leakage.one_matrix.search import SentenceSearch, barred_words
from gradaudit.leakage.one_matrix.signal import Fit, Remaining, Signal
from gradaudit.leakage.one_matrix.word_rows import UsualRows, framing_places, rows_of, usual_rows, word_rows
from gradaudit.leakage.rowspace.deflation import matrices_of
from gradaudit.leakage.rowspace.embedding_rows import words_of
from gradaudit.leakage.uneven.held import HeldBatch, ReadBlock, held_sentences
from gradaudit.models.base import TextModel
from gradaudit.progress import answering
from gradaudit.types import Observation, Reconstruction

_ROUNDS, _ALONE, _MASKED = 4, 6, 2
"""Times that every length is tried where none gives a sentence, each time from one guess more; guesses that are mended
where the space is one sentence's; and with dropout on, where a right one may look wrong."""
_WORDS, _SHORT, _LONGEST = 20_000, 24, 64
"""Rows looked at for the words of a batch, in sentences of so many tokens or more, and the longest sentence looked for:
bounds time."""
_FEW = 2
"""Sentences that are read with dropout on: two take 10 to 50 s. Of four half came back exactly, in two minutes, and
other batches of four took more than five (MiniLM, block 1, q and f, in development)."""
MASKED = "dropout is on: likely sentences are as near to what was sent as masks would let them be, which is no proof"
UNLIKE_MASKED = "dropout is on, and no sentence is as near to what was sent as masks would let the right one be"


class BatchSearch:
    """The search for the sentences of a batch.

    Args:
        model: an encoder.
        signal: the space.
        size: sentences in the batch; None where that is not known.
        lengths: tokens of each; None where they are not known.
        longest: tokens that a sentence may have.
        rng: for the words around, where none are known yet.
        masked: what dropout makes of sentences; None where it is off.
        among: [m] ids of all of the batch's tokens, where they are known.

    Attributes:
        found: sentences that lie in the space, in the order in which they were found.
        best: the best guess for what they leave of it; None where they leave nothing, or nothing was tried.
    """

    def __init__(
        self,
        model: TextModel,
        signal: Signal,
        size: int | None,
        lengths: Sequence[int] | None,
        longest: int,
        rng: torch.Generator,
        masked: DrawnMasks | None = None,
        among: Tensor | None = None,
    ) -> None:
        self.masked, self.barred = masked, barred_words(model, among)
        self.model, self.size, self.lengths, self.rng = model, size, lengths, rng
        self.longest = min(longest, _LONGEST, model.max_length)
        self.signal = self.whole = signal
        self.words = self.every = word_rows(model, signal)
        self.usual: dict[int, UsualRows] = {}
        self.bag: Tensor | None = None
        self.found: list[Fit] = []
        self.best: Fit | None = None

    def run(self) -> None:
        """Read what can be read."""
        shorter: Fit | None = None
        turn = 0
        while turn < _ROUNDS and not self._done():
            turn += 1
            likely: list[Fit] = []
            for length, one in self._lengths(turn):
                if self.signal.rank < length - self.signal.differences and not one:
                    continue  # of one sentence weak directions may lie below the rounding
                bag = torch.zeros(0, dtype=torch.long, device=self.model.device) if one else self._bag()
                search = SentenceSearch(
                    self.model, self.signal, self.words, length, bag, self.rng, self.masked, self.barred
                )
                near = shorter if shorter is not None and len(shorter.tokens) == length - 1 else None
                alone = max(2, _ALONE // (self.signal.doubtful + 1)) if self.masked is None else _MASKED
                starts = alone if one else turn
                fit = shorter = search.run(self._usual(length), starts, near)
                if search.whole(fit):
                    likely.append(fit)
                    if one or self.masked is None:  # what is left is easier to read
                        break
                    continue
                if self.best is None or fit.apart < self.best.apart:
                    self.best = fit
                if one:
                    turn = _ROUNDS
            if likely:
                # with dropout on a part of a sentence, or one with a word more, may be likely, too
                self._take(min(likely, key=self._surprise))
                turn = 0

    def _surprise(self, fit: Fit) -> float:
        return fit.apart if self.masked is None else self.masked.surprise(self.signal, fit)

    def _done(self) -> bool:
        return self.signal.rank < 2 or (self.size is not None and len(self.found) >= self.size)

    def _lengths(self, turn: int) -> Iterator[tuple[int, bool]]:
        """Yield lengths to look for, short ones first, and whether the sentence is the last.

        Of several sentences that share a space the shortest is no longer than their mean.
        """
        whole = self.signal.rank + self.signal.differences
        shortest = len(self.model.special.prefix) + len(self.model.special.suffix) + 1
        missing = 2 if self.size is None else self.size - len(self.found)
        if self.lengths is not None:
            left = list(self.lengths)
            for fit in self.found:
                left.remove(len(fit.tokens))
            yield from ((length, missing == 1) for length in sorted(set(left)))
        elif missing == 1:
            doubtful = self.signal.doubtful
            # where entries have errors one direction more may be theirs: the last resort
            for fewer in (*reversed(range(doubtful + 1)), *([doubtful + 1] if self.signal.blur else [])):
                if whole - fewer >= shortest:
                    yield whole - fewer, True
        else:
            if self.size is None and shortest <= whole <= self.longest:
                yield whole, False  # there may be one sentence, or one left
            longest = min(self.longest, self.signal.rank // missing * turn + self.signal.differences)
            yield from ((length, False) for length in range(shortest, longest + 1))

    def _usual(self, length: int) -> UsualRows:
        if length not in self.usual:
            self.usual[length] = usual_rows(self.model, self.whole, self.every, length, self.rng)
        return self.usual[length].beside(self.signal)

    def _bag(self) -> Tensor:
        """Return words of the batch, whatever their place: those that fill the space one after the other."""
        if self.bag is None:
            longest = min(self.longest, max(_SHORT, self.signal.rank // 2))
            usual = self._usual(longest)
            places = [p for p in range(longest) if p not in framing_places(self.model, longest)]
            told = self.words.shares(self.signal, usual.places[places], usual.framing, [None] * len(places))
            told[:, self.barred] = -1.0
            possible = told.shape[1] - len(self.barred)
            words = told.topk(min(max(50, _WORDS // longest), possible), 1).indices
            rows = (self.words.rows[words] + usual.places[places][:, None]).flatten(0, 1)
            remaining, chosen = Remaining(self.signal, rows, usual.framing), []
            for _ in range(self.signal.rank):
                chosen.append(int(remaining.share.argmax()))
                remaining.choose(rows[chosen[-1]])
            self.bag = torch.unique(words.flatten()[torch.tensor(chosen)])
        return self.bag

    def _take(self, fit: Fit) -> None:
        self.signal = self.signal.without(rows_of(self.model, self.signal, fit.tokens[None])[0])
        self.words, self.bag = self.every.beside(self.signal), None
        self.found.append(fit)
        self.best = None


def read_any(seen: Observation, longest: int, rng: torch.Generator) -> Reconstruction | None:
    """Return an encoder's sentences from whatever matrix of a block its update holds; dropout on, of a gradient alone.

    Args:
        seen: a gradient, or the weight change of one step.
        longest: tokens that a sentence may have.
        rng: for the words around, where none are known yet, and for the noise that errors are measured with.

    Returns:
        None where nothing tells: another kind of update or model, or no matrix that holds rows of several tokens.
    """
    known = seen.knowledge
    few = known.batch_size is not None and known.batch_size <= _FEW
    masks = few and seen.kind == "gradient" and seen.model.spec.loaded is None
    # a matrix that noise fills has no space to tell, and one that a defense left alone has
    found = None if seen.model.causal or (known.dropout and not masks) else signal_of(seen, rng)
    if found is None or (known.dropout and found[1] is not None):
        return None
    signal, block = found
    masked = DrawnMasks(seen.model, known.dropout, rng) if known.dropout else None
    search = BatchSearch(seen.model, signal, known.batch_size, known.lengths, longest, rng, masked, words_of(seen))
    with answering(lambda had: _told(seen, signal, block, search) if search.found or search.best else None):
        search.run()
    return _told(seen, signal, block, search)


def _told(seen: Observation, signal: Signal, block: ReadBlock | None, search: BatchSearch) -> Reconstruction:
    """Return what a search has, proven where the sentences make the matrix that was read."""
    left = search.signal.rank
    notes = [f"read from block {signal.layer}'s {', '.join(signal.roles)} alone"]
    if search.masked is not None:
        notes.append(MASKED if search.found else UNLIKE_MASKED)
    if left < 2 and len(search.found) < (seen.knowledge.batch_size or 1):
        notes.append("the others of the batch are copies of these, or send nothing")
    sentences = [tuple(fit.tokens.tolist()) for fit in search.found]
    if not sentences and search.best is None:
        notes.append(f"what stands out of its errors has {signal.rank} directions, fewer than a sentence has tokens")
    details = {"rank": signal.rank, "left": left}
    if block is None:
        told = named(seen, sentences, notes, details, matrices_of(seen, signal.keys))
    else:
        told = held(seen, block, sentences, notes, details)
    if search.best is None:
        return told
    return replace(
        told,
        sequences=(*told.sequences, tuple(search.best.tokens.tolist())),
        labels=None,
        certificates=(*(told.certificates or ()), "guess"),
        notes=(*told.notes, f"what is left has rank {left}, and the last sentence is the nearest to it"),
    )


def held(
    seen: Observation,
    block: ReadBlock,
    sentences: Sequence[tuple[int, ...]],
    notes: Sequence[str],
    details: dict[str, Any],
) -> Reconstruction:
    """Return sentences with what they explain of entries that have errors."""
    if not sentences:
        return Reconstruction((), certificates=(), notes=tuple(notes), details=details)
    batch = HeldBatch(seen.model, (block,))
    with block.seen.as_computed(seen.model.device):
        for sentence in sentences:
            batch.add(sentence)
        told = held_sentences(batch, seen.knowledge.batch_size, (), details)
    return replace(told, notes=(*notes, *told.notes))
