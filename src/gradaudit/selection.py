"""Which gradients the attacker sees: "all", "0-2:q,k,v", "*:f,p", "embeddings", "head", joined by spaces or ";"."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from gradaudit.errors import BadInputError
from gradaudit.models.base import Model
from gradaudit.models.views import ROLES, View

_GROUPS = ("embeddings", "word", "position", "head")
_FORM = "use 'all', a group (embeddings, word, position, head) or LAYERS:ROLES such as '0-2:q,k,v' or '*:f,p'"


@dataclass(frozen=True)
class Selection:
    """A choice of layers x roles (and parameter groups), written as one expression.

    Args:
        expression: terms joined by spaces or ";". "all" is every parameter; a group is "embeddings", "word",
            "position" or "head"; LAYERS:ROLES takes layers "*", "3", "0-2" or "0,2" and roles out of q k v o f p,
            or "*" for all six.

    Raises:
        BadInputError: an expression of another form, or one that names a layer the model lacks.
    """

    expression: str = "all"

    def __post_init__(self) -> None:
        if not self._terms():
            raise BadInputError(f"selection is empty; {_FORM}")
        for term in self._terms():
            if term not in ("all", *_GROUPS):
                self._parse(term, depth=None)

    def views(self, model: Model) -> dict[str, View]:
        """Return the chosen views of a model by name, in the order of the expression."""
        chosen: dict[str, View] = {}
        for term in self._terms():
            if term == "all":
                found = [View(name, name) for name in model.parameters()]
            elif term in _GROUPS:
                found = [View(name, name) for name in model.group(term)]
            else:
                layers, roles = self._parse(term, model.depth)
                found = [v for layer in layers for role in roles for v in model.views(layer, role)]
            chosen.update((view.name, view) for view in found)
        # a role inside a parameter that is chosen whole is in already
        return {n: v for n, v in chosen.items() if n == v.parameter or v.parameter not in chosen}

    def parameters(self, model: Model) -> tuple[str, ...]:
        """Return the names of the parameters that are chosen whole, to freeze them.

        Raises:
            BadInputError: an expression that covers a parameter only in part (GPT-2's q alone is a third of one).
        """
        every, seen = model.parameters(), dict[str, int]()
        for view in self.views(model).values():
            seen[view.parameter] = seen.get(view.parameter, 0) + view(every[view.parameter]).numel()
        for name, covered in seen.items():
            if covered < every[name].numel():
                raise BadInputError(f"freeze: '{name}' holds more than the roles named; freeze all of its roles")
        return tuple(seen)

    def take(self, model: Model, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, View]]:
        """Return the chosen part of an update by view name, and the views; frozen parameters are left out.

        Raises:
            BadInputError: nothing of what was chosen is in the update.
        """
        views = {n: v for n, v in self.views(model).items() if v.parameter in tensors}
        if not views:
            raise BadInputError(f"selection '{self.expression}' picks nothing that the update holds")
        return {n: v(tensors[v.parameter]) for n, v in views.items()}, views

    def share(self, model: Model, tensors: Iterable[Tensor]) -> float:
        """Return the share of the model's parameters that these tensors are (0 to 1)."""
        every = sum(p.numel() for p in model.parameters().values())
        return sum(t.numel() for t in tensors) / every

    def _terms(self) -> list[str]:
        return [term for term in re.split(r"[;\s]+", self.expression.strip()) if term]

    def _parse(self, term: str, depth: int | None) -> tuple[list[int], list[str]]:
        match = re.fullmatch(r"(\*|\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*):(\*|[a-z](?:,[a-z])*)", term)
        if match is None:
            raise BadInputError(f"selection '{term}' is not understood; {_FORM}")
        where, what = match.groups()
        roles = list(ROLES) if what == "*" else what.split(",")
        wrong = [role for role in roles if role not in ROLES]
        if wrong:
            raise BadInputError(f"selection '{term}' names role '{wrong[0]}'; roles are {', '.join(ROLES)}")
        if where == "*":
            return list(range(depth or 0)), roles
        layers: list[int] = []
        for part in where.split(","):
            first, _, last = part.partition("-")
            low, high = int(first), int(last or first)
            if low > high:
                raise BadInputError(f"selection '{term}' counts layers downward; write the smaller one first")
            if depth is not None and high >= depth:
                raise BadInputError(f"selection '{term}' names layer {high}; the model has layers 0 to {depth - 1}")
            if high > 10_000:
                raise BadInputError(f"selection '{term}' names layer {high}, which no model has")
            layers += range(low, high + 1)
        return layers, roles
