"""The errors a user can cause, each one clear sentence, and the exit codes of the program."""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import IntEnum


class ExitCode(IntEnum):
    """What the program's exit status says (documented in docs/cli.md)."""

    DONE = 0
    THRESHOLD_CROSSED = 1
    BAD_INPUT = 2
    INCONCLUSIVE = 3
    BROKEN = 4


class AuditError(Exception):
    """Something a user can mend; its text is one sentence that says what to do next."""


class BadInputError(AuditError):
    """A file, name, value or update that cannot be used as it is."""


class MissingKnowledgeError(AuditError):
    """An attack was run without something it must be given; the text names it."""


class NotSupportedError(AuditError):
    """An attack, defense or model does not support the setting; the text says which."""


class BrokenDownError(AuditError):
    """An attack ended in an error of its own, so that nothing is known; the text says where."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> BadInputError:
    """Return the error for an unknown name, with the closest known name as a suggestion.

    Args:
        kind: what was looked up, for the sentence ("attack", "model", "key").
        name: what the user wrote.
        known: the names there are.
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean '{close[0]}'?" if close else "known: " + (", ".join(names) or "none")
    return BadInputError(f"unknown {kind} '{name}'; {hint}")


@contextmanager
def broken_by(what: str) -> Iterator[None]:
    """Say in one sentence what a library raises inside the block, because of files that others made.

    A damaged or hostile file makes transformers and tokenizers raise anything, and Rust panic, which is no `Exception`.

    Args:
        what: the files, for the sentence.

    Raises:
        BadInputError: in place of all but our own errors, interrupts and want of memory.
    """
    try:
        yield
    except (AuditError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        said = (str(error).strip().splitlines() or [""])[0]
        raise BadInputError(f"{what} cannot be used ({type(error).__name__}: {said:.200})") from None
