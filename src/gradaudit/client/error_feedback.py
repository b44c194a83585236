"""Rounds of a client with error feedback: what its compression leaves out is held back and added to the next update."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from gradaudit.client.client import Client
from gradaudit.client.mean_update import each_update
from gradaudit.defenses.base import ModelDefense, UpdateDefense
from gradaudit.defenses.feedback import ErrorFeedback
from gradaudit.errors import BadInputError
from gradaudit.streams import draw_seed, stream
from gradaudit.types import Private, Update


def feedback_round(
    client: Client, batch: Private, clients: int, held: Mapping[str, Tensor] | None, rng: torch.Generator
) -> tuple[Update, dict[str, Tensor]]:
    """Return the mean update of a round's clients, each with its own memory, and what they hold back after it.

    Args:
        client: one of them, with error feedback; its own `clients` is how many share one's batch.
        batch: the examples of all.
        clients: how many.
        held: what they hold back before it, [clients * client.clients, ...] by parameter name; None for nothing yet.
        rng: the round's random stream.

    Raises:
        BadInputError: as `Client.update`, or a client without error feedback.
    """
    several, seed = clients * client.clients, draw_seed(rng)
    place = next((n for n, d in enumerate(client.defenses) if isinstance(d, ErrorFeedback)), None)
    if place is None:
        raise BadInputError("a client without error feedback holds nothing back")
    behind = client.defenses[place + 1 :]
    before = (*client.defenses[:place], *(d for d in behind if isinstance(d, ModelDefense)))
    bare = replace(client, defenses=before, clients=1, held=None)
    own = each_update(bare, batch, several, stream(seed, "own"))
    whole = own if held is None else {name: value + held[name] for name, value in own.items()}
    sent = whole
    for number, defense in enumerate(behind):
        if isinstance(defense, UpdateDefense):
            sent = defense.on_each(sent, stream(seed, "defense", number))
    left = {name: value - sent[name] for name, value in whole.items()}
    mean = {name: value.mean(0) for name, value in sent.items()}
    return replace(client, clients=several, held=None).made(mean), left


def after_rounds(client: Client, batches: Iterable[Private], rng: torch.Generator) -> Client:
    """Return a client that has sent the updates of some earlier rounds, at the same weights.

    Args:
        client: without error feedback it is returned as it is.
        batches: one a round, of other examples than the attacked ones.
        rng: of those rounds.
    """
    if not any(isinstance(d, ErrorFeedback) for d in client.defenses):
        return client
    held: dict[str, Tensor] | None = None
    seed = draw_seed(rng)
    for number, batch in enumerate(batches):
        _, held = feedback_round(client, batch, 1, held, stream(seed, "round", number))
    return replace(client, held=held)


def earlier_rounds(client: Client) -> int:
    """Return how many rounds a client has behind it that matter for its next update."""
    return sum(d.rounds for d in client.defenses if isinstance(d, ErrorFeedback))
