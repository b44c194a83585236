"""Which failed where the truth was not found: the optimizer or the objective."""

import math
from typing import Any, Literal

from gradaudit.client.client import Client
from gradaudit.models.base import Model
from gradaudit.record import Diagnosis
from gradaudit.streams import stream
from gradaudit.types import Observation, Private


def diagnose(
    client: Client, batch: Private, guessed: Private | None, seen: Observation[Any], solved: bool
) -> Diagnosis:
    """Compare the update of the truth and of the guess with the observed one: which of the two failed?

    Both updates are made with dropout off, as the attacks that ignore dropout assume. The measure is 1 - cosine over
    all seen tensors together, which no scale of a weight change moves.

    Args:
        client: makes one gradient of the model, undefended; padded as the audited one, since that moves positions.
        batch: the truth.
        guessed: what was found, as a batch; None for nothing.
        seen: what the attack saw.
        solved: everything was found.
    """
    truth = update_distance(client, batch, seen)
    if guessed is None:
        return Diagnosis(truth=truth, guess=None, verdict="no guess")
    guess = update_distance(client, guessed, seen)
    verdict: Literal["solved", "optimizer failed", "objective failed"]
    verdict = "solved" if solved else "optimizer failed" if truth < guess else "objective failed"
    return Diagnosis(truth=truth, guess=guess, verdict=verdict)


def update_distance(client: Client, batch: Private, seen: Observation[Model]) -> float:
    """Return 1 - cosine of the update that a client makes of a batch with the observed one, over all seen tensors."""
    update = client.update(batch, stream(0, "diagnose")).tensors
    inner = own = other = 0.0
    for name, view in seen.views.items():
        mine, theirs = view(update[view.parameter]).double(), seen.tensors[name].double()
        inner += float((mine * theirs).sum())
        own += float(mine.square().sum())
        other += float(theirs.square().sum())
    sign = -1.0 if seen.kind == "delta" else 1.0
    return 1.0 - sign * inner / max(math.sqrt(own * other), 1e-300)
