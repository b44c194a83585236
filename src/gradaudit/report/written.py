"""A page on disk: whole or not at all, and its owner's alone where it holds private text."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from gradaudit.errors import BadInputError


def write_page(path: Path, html: str, private: bool) -> Path:
    draft = None
    try:
        handle, draft = tempfile.mkstemp(dir=path.parent, prefix=".report-", suffix=".html")
        with os.fdopen(handle, "wb") as file:
            file.write(html.encode())
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files for the owner alone, which is right only where the page holds private text.
        Path(draft).chmod(0o600 if private else 0o644)
        Path(draft).replace(path)
    except OSError as error:
        if draft is not None:
            Path(draft).unlink(missing_ok=True)
        raise BadInputError(f"cannot write {path} ({error.strerror}); make room or choose another folder") from None
    return path
