"""A gate inside a training framework: unlike a recorder, it may keep an update from being sent."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradaudit.bundles.checkpoints import Weights
from gradaudit.bundles.gate import USUAL, gate
from gradaudit.errors import AuditError
from gradaudit.integrations.recording import LOG, Recorder


class Gatekeeper:
    """Says of an update whether it may be sent. Where that could not be decided, it may not.

    Args:
        model: as `Recorder` takes it, and what is told of the training as well.
        fail_on: conditions that close the gate, as in `gradaudit gate`.
        within: seconds for the attack.
        attack: name of the attack; `auto` when None.
    """

    def __init__(
        self,
        model: Any,
        fail_on: Sequence[str] = USUAL,
        within: float = 60.0,
        attack: str | None = None,
        **told: Any,
    ) -> None:
        self._model, self._told = model, told
        self._fail_on, self._within, self._attack = tuple(fail_on), within, attack

    def refusal(self, before: Weights, after: Weights) -> str | None:
        """Return why an update must not be sent, in words that show nothing of it; None where it may."""
        try:
            with tempfile.TemporaryDirectory(prefix="gradaudit-") as room:
                Recorder(room, self._model, **self._told).write("update", before, after)
                found = gate(Path(room) / "update", self._fail_on, self._within, self._attack)
        except AuditError as error:
            return f"not decided: {error}"
        except Exception:  # a bug in the gate is no reason to send
            LOG.exception("the gate failed")
            return "not decided: the gate failed, see the log"
        LOG.info("gate %s", found.sentence)
        return None if found.counts is not None and not found.crossed else found.sentence
