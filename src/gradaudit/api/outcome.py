"""What `gradaudit.run` and `gradaudit.attack` return."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradaudit.errors import BadInputError
from gradaudit.report.render import render


@dataclass(frozen=True, repr=False)
class Outcome:
    """What an attack read, sentence by sentence; printed, it shows its verdict and no private text.

    Args:
        attack: its name.
        verdict: one sentence.
        notes: what the attack says beside its sentences; why batches failed.
        folder: of the run's records; None of an update without its truth.
        table: one dict a sentence, see `rows`.
    """

    attack: str
    verdict: str
    notes: tuple[str, ...]
    folder: Path | None
    table: tuple[dict[str, Any], ...]

    @property
    def sentences(self) -> tuple[str, ...]:
        """The recovered sentences: private text."""
        return tuple(row["recovered"] for row in self.table if row["recovered"] is not None)

    def rows(self) -> list[dict[str, Any]]:
        """Return one dict a sentence: `recovered`, `certificate`; of a run `batch`, `original`, `rougeL`, `exact`."""
        return [dict(row) for row in self.table]

    def to_frame(self) -> Any:
        """Return the rows as a pandas DataFrame.

        Raises:
            BadInputError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise BadInputError("to_frame needs pandas, of the extra data: pip install 'gradaudit[data]'") from error
        return pandas.DataFrame(self.rows())

    def report(self, path: str | Path, show_text: bool = False) -> Path:
        """Write the run's report to a file and return its path.

        Args:
            path: of the page.
            show_text: print the private text.

        Raises:
            BadInputError: nothing was compared with the truth, or the disk refuses.
        """
        if self.folder is None:
            raise BadInputError("an update without its truth has no report; gradaudit.run makes one")
        return render(self.folder, show_text, Path(path))

    def __repr__(self) -> str:
        return f"{self.attack}: {self.verdict}"
