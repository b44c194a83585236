"""Fields that several matching attacks have, each with its meaning and the source of its default."""

from typing import Any

from gradaudit.registry import hyper


def replayed_steps() -> Any:
    """Return the field that says how long a weight change is replayed."""
    about = "local steps of a weight change replayed at most; more of plain SGD are read as one gradient, 0 always"
    return hyper(8, about, source="ours", deltas=True)


def counter() -> Any:
    """Return the field that says whether matching of text reckons with defenses."""
    about = "measure wrong signs, what was sent, or unit norms, against defenses it was told of"
    return hyper(True, about, source="LTI, section 4; Grab, 5.4 and 5.5")


def start() -> Any:
    """Return the field of how wide DLG and TAG start."""
    about = "deviation of the Gaussian start; 0: that of the word table"
    return hyper(1.0, about, source="LAMP's harness; 0 is ours", later=True)


def relative() -> Any:
    """Return the field of what a hinge on images' wrong signs is divided by."""
    about = "divide the hinge on wrong signs by the update's size"
    return hyper(True, about, source="ours, the paper: no", later=True)


def assumed_length() -> Any:
    """Return the field of the length that DLG and TAG guess at."""
    about = "sentence length when nothing tells it"
    return hyper(16, about, unit="tokens", source="ours: the papers know lengths")
