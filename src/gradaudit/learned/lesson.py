"""All that an inverter of text is fitted with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradaudit.learned.inverter import Target
from gradaudit.learned.plan import Plan
from gradaudit.learned.simulated import Public, Simulation
from gradaudit.models.base import TextModel


@dataclass(frozen=True)
class Lesson:
    """What is learned from, for which update, and how.

    Args:
        simulation: replays the client on public text.
        public: all of it.
        shown, held_out: its parts that are learned from and chosen by.
        target: what the inverter is made for.
        model: the public model.
        plan: what is learned.
        about: the attack's hyperparameters, for the manifest.
        folder: where a checkpoint is kept until it is done; None for none.
        hash_seed: of the hash.
        seed: of weights, order and simulation.
    """

    simulation: Simulation
    public: Public
    shown: Public
    held_out: Public
    target: Target
    model: TextModel
    plan: Plan
    about: Mapping[str, Any]
    folder: Path | None
    hash_seed: int
    seed: int
