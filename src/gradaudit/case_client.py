"""The client that a case describes."""

from __future__ import annotations

from typing import TypeVar

from gradaudit.attacks.base import Attack
from gradaudit.case import Case
from gradaudit.client import Client
from gradaudit.defenses.base import ExampleDefense, UpdateDefense
from gradaudit.errors import NotSupportedError
from gradaudit.models.base import Model

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
    for defense in client.defenses if case.knowledge.defenses else ():
        acts = isinstance(defense, UpdateDefense | ExampleDefense)
        if acts and not attack.reckons_with(defense.name, client.model, size):
            raise NotSupportedError(
                f"attack '{attack.name}' has no counter to '{defense.name}' here, of which it was told; choose another "
                "attack, or defenses = false in [knowledge] for an attacker who does not know of it"
            )
