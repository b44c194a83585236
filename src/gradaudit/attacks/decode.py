"""Exact decoding: batches back from their attention gradients, exactly and with proof, dropout on or off."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from gradaudit.attacks.base import Attack
from gradaudit.defense_traits import ANYTHING, Trait, all_traits
from gradaudit.errors import BadInputError, NotSupportedError
from gradaudit.leakage.adapters.fresh import read_fresh
from gradaudit.leakage.adapters.sparse_prefixes import put_together
from gradaudit.leakage.adapters.sparse_words import SparseWords, adapter_words
from gradaudit.leakage.adapters.stepped_words import stepped_words
from gradaudit.leakage.crowded.sentences import read_crowded
from gradaudit.leakage.decoding.agreement import doubted, overfull
from gradaudit.leakage.decoding.assembly import solve
from gradaudit.leakage.decoding.dropout_masks import BEHIND, unmasked
from gradaudit.leakage.decoding.explain import named, taken_apart
from gradaudit.leakage.decoding.missing_rows import completing
from gradaudit.leakage.decoding.noisy import FULL, Limits, orderable, out_of_noise
from gradaudit.leakage.decoding.rows import MaskedInputs, Search, find_rows, least_kept
from gradaudit.leakage.decoding.sentences import DecodedRows, Linked, unchecked_for
from gradaudit.leakage.decoding.table_rows import rows_of_tables
from gradaudit.leakage.one_matrix.batch import read_any
from gradaudit.leakage.one_matrix.growing import read_prefixes
from gradaudit.leakage.rowspace.deflation import matrices
from gradaudit.leakage.rowspace.embedding_places import sentence_of_tables, words_alone
from gradaudit.leakage.rowspace.embedding_rows import words_of
from gradaudit.leakage.rowspace.growth import GrowthRules, grow, words_within
from gradaudit.leakage.rowspace.subspace import Span, span
from gradaudit.leakage.uneven.by_step import named_by_step
from gradaudit.leakage.uneven.decoded import decode_change
from gradaudit.leakage.uneven.entries import entries
from gradaudit.leakage.uneven.exact_rows import NOT_EXPLAINED
from gradaudit.leakage.uneven.followed import LAST_MISSING, followed
from gradaudit.leakage.uneven.summed import summed
from gradaudit.leakage.uneven.undropped import undropped
from gradaudit.leakage.uneven.untold import UNTOLD, shown, step_shown
from gradaudit.leakage.uneven.words import read_words
from gradaudit.progress import answering
from gradaudit.registry import hyper, register
from gradaudit.types import Observation, Reconstruction

_WORTH = 0.2
"""A round of programs for copies finds so much of what is missing, or other programs look for it (`completing`)."""
_MOST_ROWS = 0.7
"""Fewer rows than this share of the rank say less than words that stand out of noise, in the likeliest order."""
_TOO_MANY = 0.78
"""With more masked rows a coordinate too few decode, and words put together say more (MiniLM: of 0.80 21%, ROUGE-L 31
by rows and 37 by words; of 0.68 71%, 91 by rows)."""
_TOLD_TOO_MANY = 0.88
"""The same where the embedding tables tell four in ten rows to begin with (MiniLM: of 0.80 all 309, of 0.92 few in four
minutes)."""
_MANY_WORDS = 0.4
"""So many words, in times the width, fill a row space, and no noise does (MiniLM and MPNet: 0.46 to 0.61 at 0.9 to 1.1
tokens a coordinate, 0.31 at 0.5)."""
TOLD_BY_TABLES = (
    "too many tokens for all of their rows to be told apart: the embedding tables tell the words that stand once, "
    "and where; the others are left out"
)
_DROWNED = 0.5
"""Entries known to no better than this share of their size, in the middle, tell words and places, and no masks: those
are read at noise of .0003 (0.24 to 0.39), not of .001 (0.69 to 0.9; MiniLM, 1 and 4 sentences)."""
_READ: frozenset[Trait] = frozenset({"zero mean", "support", "unit norm", "scaled", "stand-ins", "one example clipped"})
"""What entries with errors can be read behind: it shows in the entries themselves, or is a scale."""


@register
@dataclass(frozen=True)
class Decode(Attack):
    """Read a batch back from the row spaces of its attention gradients, and prove each sentence without the truth.

    With dropout on, every row of block 0 is a known one with coordinates set to zero: linear programs decode tokens,
    masks and copies, and the attention gradients say which tokens belong together (BERT, RoBERTa, MPNet, GPT-2). With
    dropout off, an encoder's words are placed by what each brought and each position received, linked, mended in the
    span of block 1, and taken out of the gradient one after the other; a decoder's prefixes grow as in DAGER. A matrix
    of another kind or block is enough, too: with dropout on for few sentences, and without a proof. Labels, lengths and
    the dropout rate need not be known.

    Raises:
        BadInputError: a count below 1.
    """

    name: ClassVar[str] = "decode"
    source: ClassVar[str] = "ours: docs/exact-decoding.md; decoding by linear programs after Candes and Tao (2005)"
    tasks: ClassVar[tuple[str, ...]] = ("classification", "causal-lm")
    models_dropout: ClassVar[bool] = True
    handles: ClassVar[frozenset[Trait]] = ANYTHING - {"other"}
    """It reads what was done off the spectrum: scales leave row spaces as they are, and where the space is full words
    are ranked against the noise that is there."""
    candidates: int = hyper(
        200,
        "dropout on: tokens a position that are decoded, nearest to the span first; at least as many as the rank",
        source="the worst right one ranked 51st at b = 85, 154th at b = 291 (MiniLM), 200th at b = 400 (MPNet)",
    )
    blocks: int = hyper(3, "dropout off, encoders: blocks read; those after the first check and prove")
    starts: int = hyper(24, "dropout off, encoders: proposals mended a round")
    most_words: int = hyper(32, "noise and compression: words taken at most, times the batch size")
    false_discoveries: float = hyper(
        0.01,
        "noise and compression: share of the words taken that may be wrong",
        source="ours; benchmarks/word_evidence.py",
    )
    order_evaluations: int = hyper(
        1500, "noise and compression: gradients computed to put words in order", source="20 to 40 s, two cores"
    )
    max_length: int = hyper(512, "longest sentence looked for", unit="tokens")

    def __post_init__(self) -> None:
        self._at_least(1, "candidates", "blocks", "starts", "most_words", "order_evaluations", "max_length")
        if not 0 < self.false_discoveries < 1:
            raise BadInputError(f"attack 'decode': false_discoveries must be in (0, 1), got {self.false_discoveries}")

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        if seen.model.spec.lora is not None:
            return self._adapted(seen, rng)
        if seen.kind == "delta" and seen.knowledge.training is None:
            return self._untold(seen, rng)
        words = read_words(seen)
        if words is None:
            return self._read(seen, rng)
        if (seen.knowledge.steps or 1) > 1:
            by_tables = sentence_of_tables(seen)
            return replace(by_tables, words=words) if by_tables else named_by_step(seen, words, rng)
        try:
            found = self._read(seen, rng)
        except NotSupportedError as refusal:
            found = Reconstruction(notes=(str(refusal),))
        if found.sequences:
            return replace(found, words=words)
        bags = named_by_step(seen, words, rng)
        return replace(bags, notes=(*bags.notes, *found.notes))

    def _untold(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        """Read a weight change as the one step that it looks like."""
        how, by_tables = step_shown(seen), sentence_of_tables(seen)
        if how is None:
            return by_tables or self._read(seen, rng)
        found = self.run(replace(seen, knowledge=replace(seen.knowledge, training=how)), rng)
        if by_tables and "proven" not in (found.certificates or ()):
            return by_tables  # of several steps no one step tells the text
        said = UNTOLD if found.certificates and "proven" not in found.certificates else shown(how)
        return replace(found, notes=(*found.notes, said))

    def _read(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        """Read sentences, or what is left of them.

        Raises:
            NotSupportedError: what it would need was not sent.
        """
        first = span(seen, 0)
        full = first is not None and first.rank >= 0.95 * seen.model.width
        if full and first is not None and (crowded := self._crowded(seen, first, rng, _MANY_WORDS)):
            return crowded
        found = self._changed(seen, rng)
        if found is not None:
            one = seen.knowledge.batch_size == 1 and orderable(seen)
            doubted = one and NOT_EXPLAINED in found.notes
            return out_of_noise(seen, first, self._limits, rng, found) if doubted and first else found
        # block 0's keys alone lack a direction a sentence, and of several sentences tell no more than their words
        if first is None or (first.roles == ("k",) and seen.knowledge.batch_size == 1):
            deeper = sentence_of_tables(seen) or read_any(seen, self.max_length, rng)
            deeper = deeper or read_prefixes(seen, self.max_length, rng)
            if deeper is not None:
                return deeper
        if first is None:
            return words_alone(seen)
        if full or self._coarse(seen, first):
            return out_of_noise(seen, first, self._limits, rng)
        rate = seen.knowledge.dropout
        if rate is None and unmasked(seen, first):
            rate = 0.0
        if rate and seen.kind == "gradient" and not seen.model.causal and unmasked(seen, first, rate):
            found = self._placed(seen, first, 1)
            return replace(found, notes=(BEHIND, *found.notes))
        if rate != 0.0:
            return self._masked(seen, first, rng)
        if seen.kind == "gradient" and not unmasked(seen, first):
            return out_of_noise(
                seen, first, self._limits, rng
            )  # few coordinates were sent: neither full nor the batch's span
        if seen.model.causal:
            return self._grown(seen, first, rng)
        return self._placed(seen, first)

    def gradient_evaluations(self, batch_size: int, tokens: int) -> int:
        return 20 + tokens // 4

    @staticmethod
    def _coarse(seen: Observation, first: Span) -> bool:
        """Say whether what follows the rank lies above the rounding of the gradient's type: noise, or a coarser type.

        A weight change rounds as the weights do, so nothing follows for it.
        """
        if seen.kind != "gradient" or first.rank >= len(first.values):
            return False
        eps = torch.finfo(next(iter(seen.tensors.values())).dtype).eps
        return float(first.values[first.rank]) > 32 * eps * float(first.values[0])

    @property
    def _limits(self) -> Limits:
        return Limits(self.most_words, self.false_discoveries, self.order_evaluations, self.blocks)

    # adapters

    def _adapted(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        """Return the words of adapters' directions, and the sentences where the blocks behind tell them."""
        if (fresh := read_fresh(seen, rng)) is not None:
            return fresh
        found = self._words(seen)
        details: dict[str, Any] = {"directions": found.directions, "words": len(found.words)}
        read = Reconstruction()
        if seen.model.causal and seen.model.depth > 1 and found.explained:
            read = put_together(seen, found.words, rng)
        notes = (found.limit, *read.notes)
        return replace(read, notes=notes, details=details | dict(read.details), words=found.words)

    def _words(self, seen: Observation) -> SparseWords:
        """Return the words of adapters: of a gradient or one step, or of what several steps of Adam made together."""
        how, steps = seen.knowledge.training, seen.knowledge.steps or 1
        sent = summed(seen, 0) if seen.kind == "delta" and steps > 1 else None
        if how is None or sent is None:
            return adapter_words(seen, self.false_discoveries)
        whole = how.minibatch is None or how.minibatch >= (seen.knowledge.batch_size or 1)
        return stepped_words(seen.model, sent, self.false_discoveries, whole)

    def _changed(self, seen: Observation, rng: torch.Generator) -> Reconstruction | None:
        """Read an optimizer's step entry by entry, each with its error, dropout on; None where there is no such step.

        Several steps of SGD that pass over the batch once add up to one gradient; where they do not, what was decoded
        explains nothing, and the change is read like any other.
        """
        known, model = seen.knowledge, seen.model
        # what acts on a weight change is none of the optimizer's errors
        countered = all_traits(known.defenses) <= _READ if seen.kind == "gradient" else True
        whole = not model.absolute_positions or known.dropout == 0.0
        changes = entries(seen, 0) if countered else None
        if changes is None:
            return None
        rate, least = 0.0 if whole else known.dropout or 0.1, least_kept(known.dropout, model.width)
        how = Search(known.batch_size, self.candidates, self.max_length, rate, least)
        drowned = orderable(seen) and changes.unsure() > _DROWNED
        if not (known.dropout or model.causal) and (clean := undropped(seen, changes, how, self.starts, rng, drowned)):
            return clean
        if drowned or (whole and not model.causal):
            return None
        found = decode_change(model, changes, how, rng)
        if found is None or len(found.rows) < _MOST_ROWS * found.rank:
            return None
        details = {"rank": found.rank, "rows": len(found.rows), "chi2": round(found.told.chi2, 3)}
        if whole:
            return followed(seen, changes, found, details)
        drawn = found.blurred(seen, changes)
        rows = DecodedRows(found.gradient(seen, changes), found.inputs, found.rows, drawn)
        signals = rows.signals()
        notes = []
        if signals is None:
            sequences, certificates = rows.unchecked()
            notes.append(unchecked_for(seen, "changes"))
        else:
            linked = rows.link(signals)
            sequences, certificates = rows.texts(linked.groups), linked.certificates
        if not found.told.whole:
            certificates = ["likely" if one == "proven" else one for one in certificates]
            notes.append(NOT_EXPLAINED)
        if model.spec.task == "causal-lm":
            certificates = ["likely" if one == "proven" else one for one in certificates]
            notes.append(LAST_MISSING)
        details["estimated_dropout"] = round(rows.rate(), 3)
        return Reconstruction(tuple(sequences), certificates=tuple(certificates), notes=tuple(notes), details=details)

    # dropout on

    def _crowded(
        self, seen: Observation, first: Span, rng: torch.Generator, least: float = 0.0
    ) -> Reconstruction | None:
        """Return sentences of a batch whose rows are not told apart, where no defense is known to have blurred them."""
        if seen.knowledge.defenses or seen.kind != "gradient":
            return None
        inputs = MaskedInputs(seen.model, first, words=words_of(seen))
        rows = DecodedRows(seen, inputs, rows_of_tables(seen, inputs, rng))
        if rows.found and (signals := rows.signals()) is not None:
            return self._linked(seen, first, rows, rows.link(signals), TOLD_BY_TABLES)
        return read_crowded(seen, rng, least)

    def _masked(self, seen: Observation, first: Span, rng: torch.Generator) -> Reconstruction:
        model, known = seen.model, seen.knowledge
        if not model.absolute_positions:
            raise NotSupportedError(
                "attack 'decode' decodes dropout at the first normalization (BERT, RoBERTa, MPNet, GPT-2); this model "
                "has none there: set dropout = false, or use 'dager'"
            )
        # not by the rate that was told: where a client drops more, every row would be passed over
        inputs = MaskedInputs(model, first, words=words_of(seen))
        how = Search(known.batch_size, self.candidates, self.max_length, known.dropout or 0.1)
        told = rows_of_tables(seen, inputs, rng)
        most = _TOLD_TOO_MANY if told else _TOO_MANY
        if first.rank > most * model.width and (crowded := self._crowded(seen, first, rng)):
            return crowded
        found = find_rows(inputs, how, rng, told, worth=_WORTH)
        if not found:
            none = (f"none of {first.rank} rows was decoded",)
            return Reconstruction(sequences=(), notes=none, details=first.told())
        rows = DecodedRows(seen, inputs, found)
        signals = rows.signals()
        if signals is None:
            return self._linked(seen, first, rows, None)
        had: list[tuple[DecodedRows, Linked]] = []
        with answering(lambda _: self._linked(seen, first, *had[-1]) if had else None):
            for one in completing(rows, signals, how, rng):
                had.append(one)
        return self._linked(seen, first, *had[-1])

    @staticmethod
    def _linked(
        seen: Observation, first: Span, rows: DecodedRows, linked: Linked | None, left: str | None = None
    ) -> Reconstruction:
        """Return what masked rows tell, put together to sentences or, where nothing links them, by their positions."""
        details: dict[str, Any] = first.told()
        notes = []
        if linked is None:
            notes.append(unchecked_for(seen, "gradients"))
            sequences, certificates = rows.unchecked()
        else:
            sequences, certificates = rows.texts(linked.groups), linked.certificates
            proven = [s for s, sure in zip(sequences, certificates, strict=True) if sure == "proven"]
            if proven:
                certificates = doubted(certificates, overfull(seen, proven, first.rank), notes)
        if seen.model.spec.task == "causal-lm" and sequences:
            # no loss follows the last word, so that it leaves no row: what looks complete lacks it
            certificates = ["likely" if one == "proven" else one for one in certificates]
            notes.append(LAST_MISSING)
        if left is None and len(rows.found) < first.rank:
            left = f"{first.rank - len(rows.found)} of {first.rank} rows were not decoded"
        if left:
            notes.insert(0, left)
        details |= {"rows": len(rows.found), "estimated_dropout": round(rows.rate(), 3)}
        return Reconstruction(tuple(sequences), certificates=tuple(certificates), notes=tuple(notes), details=details)

    # dropout off

    def _placed(self, seen: Observation, first: Span, blocks: int | None = None) -> Reconstruction:
        if seen.kind != "gradient":
            raise NotSupportedError(
                "attack 'decode' found no sentence: of a change with dropout off it needs one step's blocks 0 and 1; "
                "use 'dager'"
            )
        left = matrices(seen, blocks or self.blocks)
        eps = torch.finfo(next(iter(seen.tensors.values())).dtype).eps
        size = seen.knowledge.batch_size
        # what comes back to tokens needs the whole model, and is a sum over labels for a loss of probabilities
        spec = seen.model.spec
        whole = spec.loaded is None and spec.task == "classification" and spec.loss == "cross-entropy"
        slopes = blocks is None and whole
        with answering(lambda had: taken_apart(seen, first, left, slopes, *had) if had else None):
            found = solve(seen.model, left, eps, size, self.max_length, starts=self.starts, slopes=slopes)
        return taken_apart(seen, first, left, slopes, *found)

    def _grown(self, seen: Observation, first: Span, rng: torch.Generator) -> Reconstruction:
        second = span(seen, 1) if seen.model.depth > 1 else None
        if second is None:
            if (told := read_prefixes(seen, self.max_length, rng)) is not None:
                return told
            return words_within(seen.model, first)
        if second.rank >= seen.model.width:
            return Reconstruction(sequences=(), notes=(FULL,), details=first.told())
        grown = grow(seen, first, second, GrowthRules(longest=self.max_length))
        return named(seen, grown.sentences, grown.notes, first.told())
