"""What an attack on text sets out to learn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradaudit.learned.manifest import Target
from gradaudit.learned.public import Public, Simulation
from gradaudit.models.base import TextModel


@dataclass(frozen=True)
class Plan:
    """What is learned, and how.

    Args:
        layers: read by layers (ours) in place of LTI's network.
        references: updates that the linear guess of `layers` is fitted to.
        bins: of the hash.
        signed: hash with signs.
        bottleneck, width: of the network.
        epochs: passes over the public text, or over as many drawn texts.
        batch: updates a step.
        learning_rate: Adam's; 0 tries `RATES` for `trial` steps each and takes the best on held-out public text.
        trial: steps of each.
        decay: the learning rate falls to zero.
        squared: squared loss.
        pseudo: train on words drawn from the public text, fresh every batch.
        piece: words that are drawn together; see `drawn_like`.
        pairs: weigh what is read by public word pairs; see `WordPairs`.
        own_words: begin the shared layer with what the model knows of its words: see `begin_with_words`.
        validation: share of the public text that is held out.
        patience: see `Recipe`.
    """

    layers: bool
    references: int
    bins: int
    signed: bool
    bottleneck: int
    width: int
    epochs: int
    batch: int
    learning_rate: float
    trial: int
    decay: bool
    squared: bool
    pseudo: bool
    piece: float
    pairs: bool
    own_words: bool
    validation: float
    patience: int


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
