"""The report's fixed words: what each knowledge item, mark, certificate and diagnosis means to a reader."""

from collections.abc import Mapping

from gradaudit.record import Interval

HEADLINES: Mapping[str, str] = {
    "leaks": "Leaks",
    "partly": "Partly leaks",
    "not shown": "Not shown to leak",
    "inconclusive": "Inconclusive",
}

KNOWLEDGE: Mapping[str, str] = {
    "batch_size": "how many sentences the client trained on",
    "lengths": "how long each sentence is, in tokens",
    "longest": "how long the longest sentence is, in tokens",
    "labels": "the class label of each sentence",
    "training": "the client’s optimizer, learning rate and steps",
    "dropout": "the dropout rate in force",
    "defenses": "which defenses the client used, with their settings",
    "public": "data from elsewhere, of which nothing is in the audited batches",
}

ALWAYS_GIVEN: Mapping[str, str] = {
    "selection": "which tensors of the update are seen",
    "public": "text of the same kind that the attacker has and learned from",
    "update": "whether a gradient or a change of weights is seen",
}

MARKS: Mapping[str, tuple[str, str]] = {
    "right": ("right place", "recovered, at its place in the sentence: the attacker reads it"),
    "misplaced": ("wrong place", "recovered, but somewhere else in the sentence"),
    "wrong": ("wrong word", "in the recovered text only; the original has no such word"),
    "missing": ("missing", "in the original only; the attack did not find it"),
}

CERTIFICATES: Mapping[str, str] = {
    "proven": "the update itself proves the sentence, with no need of the original",
    "likely": "the update agrees with the sentence, short of proof",
    "guess": "the attack cannot tell whether it is right",
}

DIAGNOSES: Mapping[str, tuple[str, str]] = {
    "solved": ("Solved", "the guess is the truth"),
    "optimizer failed": (
        "Optimizer failed",
        "the truth fits the update better than the guess does: a better search would have read more",
    ),
    "objective failed": (
        "Objective failed",
        "a wrong guess fits at least as well as the truth: this attack cannot tell them apart",
    ),
    "no guess": ("No guess", "the attack returned nothing to compare"),
}

NO_INTERVAL = Interval(mean=None, n=0)
"""Of a score that nobody measured."""


def number_of(value: float | None, digits: int = 1) -> str:
    """Return a score as the report prints it."""
    # A full score needs no decimals, and without them the widest row still fits a laptop.
    return "–" if value is None else "100" if value == 100 else f"{value:.{digits}f}"
