"""What an attack is: a frozen dataclass whose fields are its hyperparameters and whose `run` sees an Observation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, final

import torch

from gradaudit.errors import MissingKnowledgeError, NotSupportedError
from gradaudit.types import Knowledge, Observation, Reconstruction


class Attack(ABC):
    """Base of every attack. Subclasses are frozen dataclasses, registered with `@register`, and write only `run`."""

    kind: ClassVar[str] = "attack"
    name: ClassVar[str]
    source: ClassVar[str]
    """Paper, section, and where this implementation differs."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Names of `Knowledge` fields that must be given."""
    tasks: ClassVar[tuple[str, ...]] = ("classification", "causal-lm")
    models_defenses: ClassVar[bool] = False
    """True when the attack takes `knowledge.defenses` into account; otherwise a defended update gets a flag."""
    models_dropout: ClassVar[bool] = False
    """True when the attack reckons with dropout; otherwise an update made with dropout on gets a flag."""
    exact_on_deltas: ClassVar[bool] = False
    """True when a weight change of several steps is read as what it is; otherwise it gets a flag."""

    @final
    def __call__(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        """Check what the attack needs, run it, and leave the model as it was, even after an error.

        Args:
            seen: all that the attacker may see.
            rng: the attack's own random stream (on the CPU).

        Raises:
            MissingKnowledgeError: something in `needs` was not given.
            NotSupportedError: the task, model or update is outside what the attack can do.
            RuntimeError: the attack wrote into the model; the audit would no longer be about it.
        """
        missing = [need for need in self.needs if getattr(seen.knowledge, need) is None]
        if missing:
            raise MissingKnowledgeError(
                f"attack '{self.name}' must be given {', '.join(missing)}; set it in [knowledge] or choose an attack "
                "that does without"
            )
        if seen.model.spec.task not in self.tasks:
            raise NotSupportedError(f"attack '{self.name}' does not support task '{seen.model.spec.task}'")
        before = _state(seen)
        try:
            found = self.run(seen, rng)
        finally:
            for parameter in seen.model.parameters().values():
                parameter.grad = None
        if _state(seen) != before:
            raise RuntimeError(f"attack '{self.name}' changed the model; an attack must leave it as it was")
        return found

    @abstractmethod
    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        """Recover what can be recovered.

        Args:
            seen: all that the attacker may see.
            rng: the attack's own random stream (on the CPU); draw nothing from elsewhere.
        """

    def gradient_evaluations(self, batch_size: int, tokens: int) -> int:
        """Return about how many gradient evaluations one batch costs, for `gradaudit check`'s estimate.

        Args:
            batch_size: sentences.
            tokens: real tokens of the batch.
        """
        return 1


def _state(seen: Observation) -> Mapping[str, Any]:
    # ._version counts in-place writes: a cheap and exact sign that a tensor was touched
    return {
        "written": {name: p._version for name, p in seen.model.parameters().items()},
        "seen": {name: t._version for name, t in seen.tensors.items()},
        "trainable": {name: p.requires_grad for name, p in seen.model.parameters().items()},
        "training": seen.model.is_training(),
    }


def needs_of(attack: type[Attack]) -> tuple[str, ...]:
    """Return the knowledge an attack class needs, checked against the fields of `Knowledge`."""
    unknown = [n for n in attack.needs if n not in Knowledge.__dataclass_fields__]
    if unknown:
        raise TypeError(f"attack '{attack.name}' needs '{unknown[0]}', which Knowledge does not have")
    return attack.needs
