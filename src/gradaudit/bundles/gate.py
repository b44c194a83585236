"""A gate before an update is sent: an attack within a time, and conditions on what it may read."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradaudit.audit.thresholds import Threshold, parse
from gradaudit.bundles.bundle import read_manifest
from gradaudit.bundles.examine import USUAL_ATTACK, set_up
from gradaudit.errors import AuditError, BadInputError, ExitCode

COUNTS: dict[str, Callable[[Mapping[str, Any]], int]] = {
    "proven": lambda found: (found["certificates"] or []).count("proven"),
    "certain_words": lambda found: sum(word["certain"] for word in found["words"] or []),
    "sentences": lambda found: len(found["texts"]),
    "words": lambda found: len(found["words"] or []),
    "images": lambda found: len(found["images"] or []),
}
"""What can be counted of an attack's reading without the truth, the surest first."""
USUAL = ("proven>0", "certain_words>0")
"""What closes a gate where nothing is said: a sentence or word that nothing else explains."""


_BUDGETED = 0.7
"""Share of the time that `auto` may take; loading takes the rest."""


@dataclass(frozen=True)
class Gate:
    """What a gate found.

    Args:
        attack: name of the attack.
        counts: of what it read, by the names of `COUNTS`; None where it did not end in time.
        crossed: conditions that are met.
        seconds: that were taken, loading included.
    """

    attack: str
    counts: Mapping[str, int] | None
    crossed: tuple[str, ...]
    seconds: float

    @property
    def sentence(self) -> str:
        """The result in words, without anything that was read."""
        if self.counts is None:
            return f"not decided: '{self.attack}' did not end within {self.seconds:.0f} s; allow more, or do not send"
        read = ", ".join(f"{name.replace('_', ' ')} {n}" for name, n in self.counts.items() if n) or "nothing"
        if self.crossed:
            return f"closed: '{self.attack}' read {read} in {self.seconds:.0f} s ({', '.join(self.crossed)})"
        return f"open: '{self.attack}' read {read} in {self.seconds:.0f} s, which is no sign of safety"

    def as_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "attack": self.attack,
            "counts": None if self.counts is None else dict(self.counts),
            "crossed": list(self.crossed),
            "seconds": round(self.seconds, 1),
            "sentence": self.sentence,
        }


def gate(
    folder: Path,
    fail_on: Sequence[str] = USUAL,
    within: float = 60.0,
    attack: str | None = None,
    settings: Sequence[str] = (),
    device: str = "cpu",
) -> Gate:
    """Attack a bundle within a time, in a program of its own that is ended with it.

    Args:
        folder: the bundle.
        fail_on: conditions on `COUNTS`, such as "proven>0".
        within: seconds for all of it.
        attack: name of the attack; None for `auto`, of which what was read in time counts.
        settings: "field=value" overrides of its fields.
        device: "auto", "cpu" or "cuda".

    Raises:
        AuditError: what the attack on a bundle raises, or a condition that is none.
    """
    began = time.monotonic()
    limits = parse(fail_on, tuple(COUNTS))
    if not limits or within <= 0:
        raise BadInputError(f"a gate needs a condition and a time above 0, got {len(limits)} and {within:g} s")
    read_manifest(folder)  # what is no bundle or no attack is said at once
    if attack is None:
        attack, settings = USUAL_ATTACK, (f"budget={_BUDGETED * within:g}", *settings)
    set_up(attack, settings)
    command = [
        sys.executable,
        "-m",
        "gradaudit",
        "attack",
        str(folder),
        "--attack",
        attack,
        "--device",
        device,
        "--json",
    ]
    command += [part for setting in settings for part in ("--set", setting)]
    try:
        # one line an error, however wide the terminal is
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=within, env=os.environ | {"COLUMNS": "10000"}, check=False
        )
    except subprocess.TimeoutExpired:
        return Gate(attack, None, (), time.monotonic() - began)
    if not done.stdout.strip():
        said = (done.stderr.strip().splitlines() or ["it was killed, perhaps for want of memory"])[-1]
        kind = BadInputError if done.returncode == ExitCode.BAD_INPUT else AuditError
        raise kind(said.removeprefix("error: "))
    return judged(json.loads(done.stdout), attack, limits, time.monotonic() - began)


def judged(found: Mapping[str, Any], attack: str, limits: Sequence[Threshold], seconds: float) -> Gate:
    """Return what conditions say of an attack's reading.

    Args:
        found: the reading, as JSON of `gradaudit attack`.
        attack: its name.
        limits: the conditions.
        seconds: that were taken.
    """
    counts = {name: count(found) for name, count in COUNTS.items()}
    return Gate(attack, counts, tuple(str(one) for one in limits if one.met(counts[one.score])), seconds)
