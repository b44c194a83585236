"""The client that a case describes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch

from gradaudit.attacks.base import Attack
from gradaudit.case import Case
from gradaudit.client import Client
from gradaudit.defenses.base import Defense, ExampleDefense, UpdateDefense
from gradaudit.error_feedback import earlier_rounds
from gradaudit.errors import BadInputError, NotSupportedError
from gradaudit.models.base import Model
from gradaudit.streams import stream

M = TypeVar("M", bound=Model)


def client_of(case: Case, model: Model) -> Client:
    """Return the client of a case's [client] and [[defense]] tables, training a model."""
    how = case.client
    return Client(
        model,
        how.training(),
        how.dropout,
        how.freeze,
        case.build_defenses(),
        how.dropout_rate,
        how.padding,
        how.clients,
    )


def check_counters(case: Case, attack: Attack[M], client: Client) -> None:
    """Refuse to run an attack, as if nothing were in force, against defenses that it was told of.

    Raises:
        NotSupportedError: it has no counter to one that acts on gradients.
    """
    size = case.data.batch_size if case.knowledge.batch_size else None
    told = client.defenses if case.knowledge.defenses else ()
    without = uncountered(attack, told, client.model, size)
    if without is not None:
        raise NotSupportedError(
            f"attack '{attack.name}' has no counter to '{without}' here, of which it was told; choose another "
            "attack, or defenses = false in [knowledge] for an attacker who does not know of it"
        )


def uncountered(attack: Attack[M], told: Sequence[Defense], model: Model, size: int | None) -> str | None:
    """Return the first defense on gradients of which an attack was told and to which it has no counter; None for none.

    Args:
        attack: the attack.
        told: the defenses.
        model: that is attacked.
        size: examples of the batch, where it is told.
    """
    for defense in told:
        acts = isinstance(defense, UpdateDefense | ExampleDefense)
        if acts and not attack.reckons_with(defense.name, model, size):
            return defense.name
    return None


def earlier_numbers(
    case: Case, client: Client, rows: int, audited: Sequence[Sequence[int]]
) -> Iterator[tuple[int, ...]]:
    """Yield the rows of each round that a client with error feedback has behind it: of none of the audited batches.

    Args:
        case: whose seed and batch size they have.
        client: of the case.
        rows: in the data.
        audited: numbers of the rows of each audited batch.

    Raises:
        BadInputError: too few rows.
    """
    size, rounds = case.data.batch_size, earlier_rounds(client)
    if not rounds:
        return
    kept = {number for batch in audited for number in batch}
    others = [number for number in range(rows) if number not in kept]
    if len(others) < size:
        raise BadInputError(
            f"error feedback needs {size} rows or more that are in no audited batch; give more data, or rounds = 0"
        )
    order = torch.randperm(len(others), generator=stream(case.seed, "earlier rows")).tolist()
    for number in range(rounds):
        yield tuple(others[order[(number * size + n) % len(others)]] for n in range(size))
