"""What every recorder promises: a training never breaks by being recorded."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from gradaudit.errors import AuditError

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
