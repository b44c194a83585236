"""`--fail-on`: thresholds on a run's mean scores, for use in a pipeline."""

import operator
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from gradaudit.errors import BadInputError, unknown_name
from gradaudit.record import Summary
from gradaudit.scores import SCORES, Scores

_SENSITIVE = "sensitive"
"""Share of names and numbers found: of text, and no score of its own."""
_COMPARE = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}


@dataclass(frozen=True)
class Threshold:
    """A condition on a mean score, such as exact > 0.

    Args:
        score: name of a score, or "sensitive".
        sign: ">=", ">", "<=" or "<".
        value: in the score's unit.
    """

    score: str
    sign: str
    value: float

    def crossed(self, summary: Summary) -> bool:
        """Return whether the run's mean score meets the condition; an undefined score does not."""
        mean = self._mean(summary)
        return mean is not None and self.met(mean)

    def met(self, value: float) -> bool:
        """Return whether a number meets the condition."""
        return bool(_COMPARE[self.sign](value, self.value))

    def undefined(self, summary: Summary) -> bool:
        """Return whether the run has no such score at all: then not to be crossed says nothing."""
        return self._mean(summary) is None

    def _mean(self, summary: Summary) -> float | None:
        interval = summary.sensitive if self.score == _SENSITIVE else summary.scores.get(self.score)
        return None if interval is None else interval.mean

    def __str__(self) -> str:
        return f"{self.score}{self.sign}{self.value:g}"


def check_scores(thresholds: Sequence[Threshold], scores: Scores, measured: Collection[str] = ()) -> None:
    """Refuse thresholds that a run could never cross, because it has no such score.

    Args:
        thresholds: of `--fail-on`.
        scores: of the run's kind of data.
        measured: which of its optional scores are measured.

    Raises:
        BadInputError: names the first such score.
    """
    names = [name for name in scores.names if name not in scores.optional or name in measured]
    names += [_SENSITIVE] * (scores.kind == "text")
    for one in thresholds:
        if one.score not in names:
            raise BadInputError(
                f"--fail-on {one}: a run of {scores.kind} has no score '{one.score}' here, so nothing would ever cross "
                f"it; it has {', '.join(names)}"
            )


def parse(texts: Sequence[str], names: Collection[str] = ()) -> list[Threshold]:
    """Return the thresholds of `--fail-on` texts.

    Args:
        texts: such as "rougeL>20".
        names: of what can be compared; the scores of a run when empty.

    Raises:
        BadInputError: not of the form SCORE>VALUE, or an unknown score.
    """
    found = []
    for text in texts:
        match = re.fullmatch(r"\s*([A-Za-z0-9_]+)\s*(>=|<=|>|<)\s*([0-9.]+)\s*", text)
        if match is None:
            example = " or ".join(f"{name}>0" for name in list(names)[:2]) or "rougeL>20 or exact>0"
            raise BadInputError(f"--fail-on takes SCORE>VALUE, for example {example}; got '{text}'")
        name, sign, value = match.groups()
        known = tuple(names) or (*(name for kind in SCORES for name in SCORES[kind].names), _SENSITIVE)
        if name not in known:
            raise unknown_name("score", name, known)
        try:
            found.append(Threshold(name, sign, float(value)))
        except ValueError:
            raise BadInputError(f"--fail-on: '{value}' is not a number") from None
    return found
