"""Several updates of one client: each is attacked, and what one gave helps to read the others.

A client sends an update a round, often of the same data. A sentence that was read from one is known when the next is
attacked: where a batch has too many tokens (`leakage/crowd.py`) it is tested exactly, taken out, and the rest is fewer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradaudit.bundles.examine import Examination
from gradaudit.data.png import save_pictures
from gradaudit.errors import AuditError
from gradaudit.progress import StoppedError


@dataclass(frozen=True)
class RecoveredSentence:
    """One sentence of the client.

    Args:
        ids: its token ids.
        text: the same, readable.
        rounds: numbers of the updates it was read from, from 1.
    """

    ids: tuple[int, ...]
    text: str
    rounds: tuple[int, ...]


@dataclass(frozen=True)
class Rounds:
    """What several updates gave.

    Args:
        rounds: the examination of each update, or why there is none.
        sentences: all that was read, those of most rounds first.
        interrupted: stopped with Ctrl-C; what was read until then is here.
    """

    rounds: tuple[Examination | AuditError, ...]
    sentences: tuple[RecoveredSentence, ...]
    interrupted: bool = False

    @property
    def count(self) -> int:
        """How many sentences were read, each counted once, or images, of all rounds."""
        images = [len(one.images or ()) for one in self.rounds if isinstance(one, Examination)]
        return len(self.sentences) + sum(images)

    @property
    def named(self) -> int:
        """How many words were named, beside sentences, each update's counted."""
        return sum(one.named for one in self.rounds if isinstance(one, Examination))

    @property
    def failed(self) -> bool:
        """Whether an update could not be attacked."""
        return any(isinstance(one, AuditError) for one in self.rounds)

    def as_json(self) -> dict[str, Any]:
        """Return it as plain data: a list of rounds as one update's, and the joined sentences."""
        failed = {"scores": None, "flags": ["no-truth"]}
        return {
            "rounds": [failed | {"error": str(r)} if isinstance(r, AuditError) else r.as_json() for r in self.rounds],
            "joined": [{"text": s.text, "ids": list(s.ids), "rounds": list(s.rounds)} for s in self.sentences],
        }


One = Callable[[Path, tuple[tuple[int, ...], ...]], Examination]
"""Attacks a bundle, given sentences that are known."""


def examine_rounds(folders: Sequence[Path], one: One) -> Rounds:
    """Attack several updates of one client, and those that were not read whole again, with what the others gave.

    Args:
        folders: the bundles, one a round.
        one: attacks a bundle, given sentences that are known.

    Returns:
        All rounds; an update that cannot be attacked does not stop the others.

    Raises:
        AuditError: the first one's, where no update could be attacked.
        KeyboardInterrupt: stopped before any update was read.
    """
    rounds: list[Examination | AuditError] = []
    try:
        for folder in folders:
            rounds.append(_tried(one, folder, ()))
        for first in rounds:
            if isinstance(first, AuditError) and not any(isinstance(r, Examination) for r in rounds):
                raise first
        _again(folders, rounds, one)
    except KeyboardInterrupt as stop:
        if isinstance(stop, StoppedError) and len(rounds) < len(folders):
            rounds.append(stop.found)
        if not any(isinstance(r, Examination) for r in rounds):
            raise
        stopped = AuditError("not attacked: stopped with Ctrl-C")
        rounds += [stopped] * (len(folders) - len(rounds))
        return Rounds(tuple(rounds), joined(rounds), interrupted=True)
    return Rounds(tuple(rounds), joined(rounds))


def _again(folders: Sequence[Path], rounds: list[Examination | AuditError], one: One) -> None:
    """Attack anew, in place, what was not read whole, with what the other rounds gave."""
    for at, (folder, found) in enumerate(zip(folders, rounds, strict=True)):
        if isinstance(found, AuditError) or found.knowledge.batch_size is None:
            continue
        known = tuple(s.ids for s in joined(rounds) if at + 1 not in s.rounds)
        if known and found.details.get("taken_out", found.knowledge.batch_size) < found.knowledge.batch_size:
            again = _tried(one, folder, known)
            if isinstance(again, Examination) and again.details.get("taken_out", 0) > found.details["taken_out"]:
                rounds[at] = again


def joined(rounds: Sequence[Examination | AuditError]) -> tuple[RecoveredSentence, ...]:
    """Return the sentences of all rounds, each once, those of most rounds first."""
    found: dict[tuple[tuple[int, ...], str], list[int]] = {}  # rounds of other tokenizers read other text from ids
    for number, one in enumerate(rounds, 1):
        if isinstance(one, Examination):
            for sentence in dict.fromkeys(zip(one.ids, one.texts, strict=True)):
                found.setdefault(sentence, []).append(number)
    every = [RecoveredSentence(ids, text, tuple(numbers)) for (ids, text), numbers in found.items()]
    return tuple(sorted(every, key=lambda s: (-len(s.rounds), s.rounds)))


def _tried(one: One, folder: Path, known: tuple[tuple[int, ...], ...]) -> Examination | AuditError:
    try:
        return one(folder, known)
    except AuditError as error:
        return error


def save_rounds(found: Examination | Rounds, folder: Path | None) -> int:
    """Write the images that were read as PNG, those of several rounds into "round-1" and so on, and count them.

    Args:
        found: what was read.
        folder: None to count alone.

    Raises:
        BadInputError: the folder cannot be written.
    """
    rounds = (found,) if isinstance(found, Examination) else found.rounds
    written = 0
    for number, one in enumerate(rounds, 1):
        if isinstance(one, Examination) and one.images:
            if folder is not None:
                save_pictures(one.images, folder if len(rounds) == 1 else folder / f"round-{number}")
            written += len(one.images)
    return written
