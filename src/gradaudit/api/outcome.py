"""What `gradaudit.run` and `gradaudit.attack` return."""

from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from gradaudit.api.plotting import plot_rows
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

    def plot(self, axes: Any = None) -> Any:
        """Draw how well each sentence was read, without its text, and return matplotlib's axes.

        Args:
            axes: where to draw; a new figure when None.

        Raises:
            BadInputError: matplotlib is not installed.
        """
        return plot_rows(self.table, self.attack, axes)

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

    def _repr_html_(self) -> str:
        """Return the verdict as a card, which notebooks show; no private text."""
        return (
            '<div style="border:1px solid currentColor;border-radius:8px;padding:.7em 1em;max-width:48em">'
            f"<strong>{escape(self.attack)}</strong><br>{escape(self.verdict)}</div>"
        )

    def __repr__(self) -> str:
        return f"{self.attack}: {self.verdict}"
