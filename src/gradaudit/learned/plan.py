"""What an attack on text sets out to learn."""

from __future__ import annotations

from dataclasses import dataclass


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
