"""Defenses by what is trained and how: frozen parameters, and dropout."""

from dataclasses import dataclass
from typing import ClassVar

from gradaudit.defense_traits import Trait
from gradaudit.defenses.base import ModelDefense
from gradaudit.errors import BadInputError
from gradaudit.models.base import Model
from gradaudit.registry import hyper, register
from gradaudit.selection import Selection


@register
@dataclass(frozen=True)
class Freeze(ModelDefense):
    """Leave some parameters as they are: what is not trained is not sent.

    `[client] freeze` does the same; as a defense it can be an axis of a sweep, beside others.

    Raises:
        BadInputError: an expression that is not understood, or covers a parameter only in part.
    """

    name: ClassVar[str] = "freeze"
    traits: ClassVar[frozenset[Trait]] = frozenset()
    never_longer: ClassVar[bool] = True
    what: str = hyper("embeddings", 'a selection: "embeddings", "0-2:q,k,v", "*:f,p"', source="Grab, section 5.1")

    def __post_init__(self) -> None:
        Selection(self.what)

    def frozen(self, model: Model) -> tuple[str, ...]:
        return Selection(self.what).parameters(model)


@register
@dataclass(frozen=True)
class DropoutRate(ModelDefense):
    """Train with dropout on, at one rate wherever the model drops out.

    `[client] dropout_rate` does the same; as a defense it can be an axis of a sweep, beside others.

    Raises:
        BadInputError: a rate that is not between 0 and 1.
    """

    name: ClassVar[str] = "dropout"
    traits: ClassVar[frozenset[Trait]] = frozenset()
    never_longer: ClassVar[bool] = True
    rate: float = hyper(0.1, "share that is dropped", source="Grab, Figure 4: 0.1 to 0.4")

    def __post_init__(self) -> None:
        if not 0 < self.rate < 1:
            raise BadInputError(f"defense 'dropout': rate must lie between 0 and 1, got {self.rate}")

    def dropout(self) -> float:
        return self.rate
