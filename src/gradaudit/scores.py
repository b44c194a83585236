"""Scores of each kind of data: what they are called, in which unit they stand, and which end of them leaks."""

from collections.abc import Iterable
from dataclasses import dataclass

from gradaudit.kinds import ByKind


@dataclass(frozen=True)
class Score:
    """One score.

    Args:
        name: key in records.
        title: in the report.
        short: in the terminal's tables.
        digits: behind the point, of a mean.
        interval_digits: behind the point, of an interval in the terminal; None as many.
        report_digits: behind the point, in the report; None as many.
        low_leaks: a low value means that much leaked.
    """

    name: str
    title: str
    short: str
    digits: int = 1
    interval_digits: int | None = None
    report_digits: int | None = None
    low_leaks: bool = False


@dataclass(frozen=True)
class Scores:
    """All scores of one kind of data, and how tables tell them.

    Args:
        kind: of data.
        example: what a batch is made of, in words ("sentence").
        all: the scores, in the order of tables.
        main: name of the one that attacks are ranked by, and that blind guessing is told in.
        drawn: name of the one that the report draws as a bar.
        drawn_scale: factor that brings it to 0 to 100.
        swept: names of those that a sweep's table shows.
        beside_costs: the same where costs stand beside them; None for those and the number of batches.
        said: the unit of all, for captions.
        optional: names of those that may be unmeasured, with the words that say so.
        facts_unfit: names of facts of `Knowledge` that this kind does not have.
    """

    kind: str
    example: str
    all: tuple[Score, ...]
    main: str
    drawn: str
    said: str
    swept: tuple[str, ...]
    drawn_scale: float = 1.0
    beside_costs: tuple[str, ...] | None = None
    optional: tuple[str, ...] = ()
    facts_unfit: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all."""
        return tuple(score.name for score in self.all)

    @property
    def ranked_by(self) -> Score:
        """The main score."""
        return self[self.main]

    def __getitem__(self, name: str) -> Score:
        return next(score for score in self.all if score.name == name)

    def strength(self, main: float | None) -> float:
        """Return a value of the main score as a number that grows with what leaked; 0 for none."""
        return (main or 0.0) * (-1 if self.ranked_by.low_leaks else 1)


SCORES: ByKind[Scores] = ByKind("score")
"""By kind of data."""


def scores_of(names: Iterable[str]) -> Scores:
    """Return the scores that some names are of; those of text where no kind has them."""
    own = set(names)
    return next((SCORES[kind] for kind in SCORES if own & set(SCORES[kind].names)), SCORES["text"])


SCORES.add(
    "text",
    Scores(
        kind="text",
        example="sentence",
        all=(
            Score("rouge1", "ROUGE-1", "R-1", 1, 0),
            Score("rouge2", "ROUGE-2", "R-2", 1, 0),
            Score("rougeL", "ROUGE-L", "R-L", 1, 0),
            Score("token_accuracy", "Token accuracy", "tok", 1, 0),
            Score("exact", "Exact", "exact", 1, 0),
        ),
        main="rougeL",
        drawn="rougeL",
        said="0 to 100",
        swept=("rouge1", "rougeL", "exact"),
    ),
)
SCORES.add(
    "images",
    Scores(
        kind="images",
        example="image",
        all=(
            Score("mse", "MSE", "MSE", 4, low_leaks=True),
            Score("psnr", "PSNR, dB", "PSNR", 1),
            Score("ssim", "SSIM", "SSIM", 2, report_digits=3),
            Score("lpips", "LPIPS", "LPIPS", 2, report_digits=3, low_leaks=True),
        ),
        main="mse",
        drawn="ssim",
        drawn_scale=100.0,
        said="MSE of pixels in 0 to 1, PSNR in dB",
        swept=("mse", "psnr", "ssim"),
        beside_costs=("mse",),
        optional=("lpips",),
        facts_unfit=("lengths", "longest"),
    ),
)
