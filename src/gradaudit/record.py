"""What an audit leaves behind: one `Record` a batch, one `Summary` a run, and the private texts apart from both.

`records.jsonl` holds no text and no image and may be shown to others; `texts.jsonl` and `images.jsonl` hold originals
and what was recovered, are readable by their owner alone, and are what `gradaudit report --show-text` reads.
"""

import base64
import binascii
import math
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, field_validator

Mark = Literal["right", "misplaced", "wrong", "missing"]
"""A word of a recovered text against the original: right place, right word in the wrong place, wrong, not found."""


class _Plain(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Spectrum(_Plain):
    """Singular values of one block's stacked attention gradient, largest first, relative to the largest.

    Args:
        layer: block.
        roles: roles that were stacked, for example "qkv".
        values: singular values divided by the largest, at most `width` of them.
        rank: numerical rank by the gap of the spectrum.
        tokens: b, real tokens in the batch; None when nobody knows (an audit without truth).
        width: d.
        confidence: ratio of the singular values on both sides of the gap.
    """

    layer: int
    roles: str
    values: tuple[float, ...]
    rank: int
    tokens: int | None
    width: int
    confidence: float


class Diagnosis(_Plain):
    """Matching loss at the truth against the guess: did the optimizer fail, or the objective?

    Args:
        truth: 1 - cosine of the truth's update (dropout off) with the observed one, over all seen tensors.
        guess: the same for the guess; None when there was no guess.
        verdict: "solved" (the guess is the truth), "optimizer failed" (the truth fits better), "objective failed"
            (the wrong guess fits at least as well), or "no guess".
    """

    truth: float
    guess: float | None
    verdict: Literal["solved", "optimizer failed", "objective failed", "no guess"]


class SentenceMarks(_Plain):
    """Word marks of one sentence, without its text.

    Args:
        recovered: one mark a word of the recovered text: right, misplaced or wrong.
        original: one mark a word of the original: right, misplaced or missing.
        certificate: "proven", "likely", "guess" or None.
        rougeL: 0 to 100.
        exact: token ids equal.
    """

    recovered: tuple[Mark, ...]
    original: tuple[Mark, ...]
    certificate: str | None
    rougeL: float  # noqa: N815 - the field's name for it
    exact: bool


class WordScores(_Plain):
    """Words named as a set, 0 to 100: a leak that no score of sentences shows.

    Args:
        precision: share of the named words that are in the batch.
        recall: share of the batch's distinct words that were named.
        minibatch: share of the batch's distinct words whose local steps were told exactly; None where nobody told any.
        alone, twice: the same among the words that one minibatch held, and two.
        sensitive: share of names and numbers all of whose words were named; None when the texts have none.
        certain: share of the batch's distinct words that were named for certain.
        certain_right: share of the words named for certain that are in the batch; None where none was.
    """

    precision: float
    recall: float
    minibatch: float | None = None
    alone: float | None = None
    twice: float | None = None
    sensitive: float | None = None
    certain: float = 0.0
    certain_right: float | None = None


class ImageMarks(_Plain):
    """Scores of one original image, without its pixels.

    Args:
        found: something was recovered for it; otherwise the scores are the worst there are.
        mse: 0 to 1.
        psnr: dB, at most 100.
        ssim: -1 to 1; None for images of less than 6 pixels a side.
        lpips: None: not measured.
    """

    found: bool
    mse: float
    psnr: float
    ssim: float | None = None
    lpips: float | None = None


class Record(_Plain):
    """Everything measured on one batch by one attack; failures are records too.

    Args:
        case: content hash of the case.
        setting: a short name of the setting, for the report ("dropout off").
        batch: 0-based index of the batch.
        attack: the attack's name.
        scores: ours, one to one, special tokens stripped; None only where undefined (ROUGE-2 of one-word texts). Of
            images MSE, PSNR, SSIM and LPIPS.
        baseline: the same scores of the blind guess on the same batch.
        published: scores in the papers' own ways of scoring, by name.
        load: tokens / width (b/d); None of images.
        tokens: b; None of images.
        batch_size: B.
        seconds: the attack's wall time.
        flags: names of flags (docs/flags.md).
        error: why this batch failed, else None; its scores are then 0, or the worst there are.
        unsupported: the attack does not support what was to be attacked, and said so.
        knowledge: what the attacker was given.
        sensitive: share (0 to 100) of names and numbers recovered; None when the texts have none.
        sensitive_baseline: the same for the blind guess.
        words: what an attack that names words scores on them; None of one that names none.
        baseline_words: the same of the blind guess's words.
        certificates: how many sentences are proven, likely, guess.
        spectrum: of the first seen attention block.
        share_of_parameters: share of the model's parameters that was seen (0 to 1).
        diagnosis: see `Diagnosis`.
        sentences: word marks, one entry an original sentence, in the batch's order.
        notes: remarks of the attack.
        details: what the attack reports of its own run (loss, ranks, candidates tried); never text.
        images: scores of each original image, in the batch's order.
        images_baseline: the same of the blind guess.
    """

    case: str
    setting: str
    batch: int
    attack: str
    scores: dict[str, float | None]
    baseline: dict[str, float | None]
    published: dict[str, dict[str, float | None]] = {}
    load: float | None = None
    tokens: int | None = None
    batch_size: int
    seconds: float
    flags: tuple[str, ...] = ()
    error: str | None = None
    unsupported: bool = False
    knowledge: dict[str, Any] = {}
    sensitive: float | None = None
    sensitive_baseline: float | None = None
    words: WordScores | None = None
    baseline_words: WordScores | None = None
    certificates: dict[str, int] = {}
    spectrum: Spectrum | None = None
    share_of_parameters: float = 0.0
    diagnosis: Diagnosis | None = None
    sentences: tuple[SentenceMarks, ...] = ()
    notes: tuple[str, ...] = ()
    details: dict[str, Any] = {}
    images: tuple[ImageMarks, ...] = ()
    images_baseline: tuple[ImageMarks, ...] = ()

    @property
    def proven(self) -> int:
        """How many sentences are proven."""
        return self.certificates.get("proven", 0)


def readers(records: Iterable[Record]) -> str:
    """Return an attack's name, and in brackets those of the attacks that read its answers where it tried several.

    Args:
        records: of one attack.
    """
    records = list(records)
    by = dict.fromkeys(str(r.details["read_by"]) for r in records if "read_by" in r.details)
    return records[0].attack + (f" ({', '.join(by)})" if by else "")


class _PrivateSide(_Plain):
    """The private side of one record: kept apart, shown only when asked for.

    Args:
        case, setting, batch, attack: which record it belongs to.
        originals: the batch's examples.
        recovered: what was recovered for each, None where nothing was.
    """

    case: str
    setting: str
    batch: int
    attack: str
    originals: tuple[str, ...]
    recovered: tuple[str | None, ...]


class Pictures(_PrivateSide):
    """The private side of one record of images: each is a PNG in base64."""

    @field_validator("originals", "recovered")
    @classmethod
    def _pngs(cls, value: tuple[str | None, ...]) -> tuple[str | None, ...]:
        # they are put into a page as they are: nothing but a PNG may come in
        for one in value:
            try:
                if one is not None and not base64.b64decode(one, validate=True).startswith(b"\x89PNG\r\n\x1a\n"):
                    raise ValueError("an image is no PNG")
            except binascii.Error:
                raise ValueError("an image is not base64") from None
        return value


class Texts(_PrivateSide):
    """The private side of one record of text: sentences as the model sees them.

    Args:
        original_words, recovered_words: the words the marks of `SentenceMarks` stand for.
    """

    original_words: tuple[tuple[str, ...], ...]
    recovered_words: tuple[tuple[str, ...], ...]


class Interval(_Plain):
    """A mean over batches with its bootstrap interval (None below two batches)."""

    mean: float | None
    low: float | None = None
    high: float | None = None
    worst: float | None = None
    """The worst case for privacy: the highest score of any batch (of MSE and LPIPS the lowest)."""
    n: int


class Summary(_Plain):
    """One attack in one setting over all its batches.

    Args:
        scores, baseline: by score name, over all batches, failures counted as 0.
        words, baseline_words: by name of `WordScores`; None where no batch's words were named.
        failed: batches that ended in an error.
        seconds: median of the attack's wall time a batch.
    """

    summary: Literal[True] = True
    case: str
    setting: str
    attack: str
    n: int
    failed: int
    scores: dict[str, Interval]
    baseline: dict[str, Interval]
    sensitive: Interval | None = None
    words: dict[str, Interval] | None = None
    baseline_words: dict[str, Interval] | None = None
    seconds: float
    flags: tuple[str, ...] = ()


class RunInfo(_Plain):
    """What a run's folder says of itself (`run.json`): enough to do it again.

    Args:
        program: version of gradaudit.
        case: content hash; case_data: the resolved case.
        model: title ("minilm"), fingerprint, width, depth, parameters, random_weights.
        data: where the text came from, its sha256, rows.
        versions: python, torch, transformers, numpy, and which library makes float32 products.
        device: where it ran.
        settings: for each setting's name, one line of what the client did.
        promises: for settings with defenses, what these promise for one update; older runs have none.
        made: date and time, ISO.
    """

    program: str
    case: str
    case_data: dict[str, Any]
    model: dict[str, Any]
    data: dict[str, Any]
    versions: dict[str, str]
    device: str
    settings: dict[str, str]
    promises: dict[str, str] = {}
    made: str


def finite(value: float | None) -> float | None:
    """Return the value, or None where it is not a number (JSON has no NaN)."""
    return value if value is not None and math.isfinite(value) else None
