"""The client that a case describes."""

from __future__ import annotations

from gradaudit.case import Case
from gradaudit.client import Client
from gradaudit.models.base import Model


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
