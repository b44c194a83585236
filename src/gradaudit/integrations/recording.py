"""What every recorder promises: a training never breaks by being recorded."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gradaudit.bundles.between import bundle
from gradaudit.bundles.bundle import MANIFEST
from gradaudit.bundles.checkpoints import Weights, folder_of, read_module, read_tokenizer
from gradaudit.errors import AuditError
from gradaudit.types import LocalTraining

LOG = logging.getLogger("gradaudit")


@contextmanager
def swallowing(what: str) -> Iterator[None]:
    """Log what goes wrong inside the block, and go on.

    Args:
        what: was being recorded, for the log.
    """
    try:
        yield
    except AuditError as error:
        LOG.warning("%s is not recorded: %s", what, error)
    except Exception:  # whatever it is, the training is worth more than the record of it
        LOG.exception("%s is not recorded", what)


class Recorder:
    """Writes what clients changed as bundles, into folders of one folder.

    Args:
        folder: where they go.
        model: a transformers model, or the folder of one; its present weights do not matter.
        tokenizer: the model's, or a folder or hub id; the model's folder when None.
        training: how a round's local steps are made; None: the attacker is not told.
        sentences: how many one client trains on in a round; None: the same.
        dropout: True, False or a rate; None: the same.
        defenses: descriptions of what acts on the update; empty: nothing does; None: the same.
        every: rounds from one that is recorded to the next; the first is.
        most: bundles at most in the folder; each takes the room of the model and its update.
    """

    def __init__(
        self,
        folder: str | Path,
        model: Any,
        tokenizer: Any = None,
        training: LocalTraining | None = None,
        sentences: int | None = None,
        dropout: bool | float | None = None,
        defenses: Sequence[Mapping[str, Any]] | None = None,
        every: int = 1,
        most: int = 10,
    ) -> None:
        self._folder, self._model, self._tokenizer = Path(folder), model, tokenizer
        self._told: dict[str, Any] = {
            "training": training,
            "sentences": sentences,
            "dropout": dropout,
            "defenses": defenses,
        }
        self._every, self._most, self._said = every, most, False

    def due(self, number: int) -> bool:
        """Return whether a round, counted from 1, is recorded."""
        if (number - 1) % self._every:
            return False
        made = sum(1 for _ in self._folder.glob(f"**/{MANIFEST}")) if self._folder.is_dir() else 0
        if made >= self._most and not self._said:
            self._said = True
            LOG.warning("%s holds %d bundles, and most = %d: no more are recorded", self._folder, made, self._most)
        return made < self._most

    def write(self, name: str, before: Weights, after: Weights) -> None:
        """Write what changed as the bundle of this name; see `gradaudit.bundle`."""
        if isinstance(self._model, str | Path):  # once, and not in every round
            self._tokenizer = read_tokenizer((self._tokenizer, self._model))
            self._model = read_module(folder_of(self._model))[0]
        out = self._folder / name
        bundle(before, after, out=out, base=self._model, tokenizer=self._tokenizer, **self._told)
        LOG.info("recorded %s", out)
