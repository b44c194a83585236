"""What people see in the terminal: progress bars on standard error, tables, and recovered text made harmless."""

import time
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from gradaudit.accounting.check import ClaimCheck
from gradaudit.accounting.check import number as shortened
from gradaudit.bundles.examine import Examination, ShownWord
from gradaudit.bundles.rounds import Rounds
from gradaudit.errors import AuditError
from gradaudit.progress import Sink, shown_by
from gradaudit.record import Interval, Mark, Record, Summary, Texts
from gradaudit.scores import Score, Scores, scores_of
from gradaudit.sweeps.result import Result

_STYLES: dict[Mark, str] = {"right": "red", "misplaced": "yellow", "wrong": "dim", "missing": "dim"}
"""As in the report: what leaked is red."""
_SHAPES: dict[Mark, tuple[str, str]] = {
    "right": ("", ""),
    "misplaced": ("~", "~"),
    "wrong": ("[", "]"),
    "missing": ("", ""),
}


def harmless(text: str) -> str:
    """Return text without control, format and bidirectional characters, so that it cannot drive a terminal."""
    return "".join(c if unicodedata.category(c)[0] != "C" or c == " " else "\ufffd" for c in text)


@contextmanager
def progress_bars(console: Console, quiet: bool = False) -> Iterator[None]:
    """Show the progress of everything inside the block: one bar for each kind of work, gone when it is done.

    Where nobody sees bars (a pipe, a log), a line every half minute takes their place.
    """
    if quiet:
        yield
        return
    if not console.is_terminal:
        with shown_by(_lines(console)):
            yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=28), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn())
    with Progress(*columns, *times, console=console, transient=True) as bars:
        tasks: dict[str, int] = {}

        def sink(what: str, done: int, total: int | None) -> None:
            kind = what.split(":")[0]
            if kind not in tasks:
                tasks[kind] = bars.add_task(what, total=total)
            bars.update(tasks[kind], description=what, completed=done, total=total)  # type: ignore[arg-type]
            if total is not None and done >= total:
                bars.remove_task(tasks.pop(kind))  # type: ignore[arg-type]

        with shown_by(sink):
            yield


_LINE_EVERY = 30.0
"""Seconds between two lines of progress."""


def _lines(console: Console) -> Sink:
    last = time.monotonic()

    def sink(what: str, done: int, total: int | None) -> None:
        nonlocal last
        if time.monotonic() - last >= _LINE_EVERY:
            last = time.monotonic()
            console.print(f"{what}: {done}" + ("" if total is None else f" of {total}"), markup=False)

    return sink


_OUT_OF = Score("sensitive", "Names, numbers", "names", 1, 0)
"""How the share of names and numbers is told."""


def _cell(value: Interval, score: Score, between: bool = True) -> str:
    if value.mean is None:
        return "-"
    mean, low, high = f"{value.mean:.{score.digits}f}", value.low, value.high
    if not between or low is None or high is None or low == high:
        return mean
    digits = score.digits if score.interval_digits is None else score.interval_digits
    return f"{mean} [dim]({low:.{digits}f}-{high:.{digits}f})[/dim]"


def _has_names(kind: Scores) -> bool:
    return kind.kind == "text"


def summary_tables(summaries: Sequence[Summary]) -> list[Table]:
    """Return one table a setting: scores with intervals, the blind baseline beside them, seconds, failures."""
    tables: dict[str, Table] = {}
    for row in summaries:
        kind = scores_of(row.scores)
        if row.setting not in tables:
            tables[row.setting] = _empty_table(row, kind)
        failed = f" ({row.failed} failed)" if row.failed else ""
        names = () if not _has_names(kind) else ("-" if row.sensitive is None else _cell(row.sensitive, _OUT_OF),)
        tables[row.setting].add_row(
            row.attack + failed,
            *(_cell(row.scores[score.name], score) for score in kind.all),
            _cell(row.baseline[kind.main], kind.ranked_by),
            *names,
            f"{row.seconds:.1f}",
        )
        if row.words is not None:
            tables[row.setting].caption = f"{tables[row.setting].caption}{_words_line(row)}\n"
    return list(tables.values())


def _words_line(row: Summary) -> str:
    """Return what an attack says of the words alone, and blind guessing beside it."""
    words, blind = row.words or {}, row.baseline_words or {}
    line = f"words that {row.attack} names: {_cell(words['recall'], _OUT_OF)} of all (blind "
    line += f"{_cell(blind['recall'], _OUT_OF, between=False)}), {_cell(words['precision'], _OUT_OF)} of them right"
    if words["sensitive"].mean is not None:
        line += f", names and numbers among them: {_cell(words['sensitive'], _OUT_OF)}"
    told = words["minibatch"]
    return line if told.mean is None else f"{line}, local steps told for {_cell(told, _OUT_OF)}"


def sweep_table(results: Sequence[Result]) -> Table:
    """Return a row a point: its axes, scores, blind, seconds; "not run" where it could not be (see also sweep.csv)."""
    kind = scores_of(name for r in results if r.summary is not None for name in r.summary.scores)
    main, costs = kind.ranked_by, any(r.utility is not None for r in results)
    side, end = ("<", "upper") if main.low_leaks else (">", "lower")
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        caption=f"{kind.said}, in brackets the 95% interval over batches; blind: {main.title} without any gradient; "
        f"{side}: {end} bound, the attack does not reckon with a defense or dropout there",
        caption_justify="left",
    )
    for key in results[0].point.values:
        table.add_column(escape(key.split(".")[-1]), min_width=10)
    short = costs and kind.beside_costs is not None  # what else there is would not fit, and is in sweep.csv
    shown = [kind[name] for name in (kind.beside_costs if short and kind.beside_costs else kind.swept)]
    counts = () if short else ("batches",)
    for name in (*(s.short for s in shown), "blind", *counts, "s", *(("acc", "mcc", "epsilon") if costs else ())):
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        found, values = result.summary, map(escape, result.point.values.values())
        if found is None or result.failed:
            table.add_row(*values, "not supported" if result.unsupported else "[yellow]not run[/yellow]")
            continue
        cost = result.utility
        spent = "-" if cost is None or cost.epsilon is None else shortened(cost.epsilon)
        paid = () if cost is None else (f"{cost.accuracy:.1f}", f"{cost.mcc:.1f}", spent)
        bound = f"{side} " if {"defense-not-modeled", "dropout-not-modeled"} & set(found.flags) else ""
        cells = [_cell(found.scores[s.name], s, between=s is main and not short) for s in shown]
        bounded = [
            bound + cell if main.low_leaks is s.low_leaks else cell for cell, s in zip(cells, shown, strict=True)
        ]
        failed = f" ({found.failed} failed)" if found.failed else ""
        blind = _cell(found.baseline[kind.main], main, between=False)
        batches = () if short else (f"{found.n}{failed}",)
        table.add_row(*values, *bounded, blind, *batches, f"{found.seconds:.1f}", *paid)
    return table


def _empty_table(row: Summary, kind: Scores) -> Table:
    batches = f"{row.n} batch{'es' * (row.n > 1)}"
    interval = "; in brackets the 95% interval over batches" if row.n > 1 else ""
    unmeasured = [n for n in kind.optional if (own := row.scores.get(n)) is None or own.mean is None]
    said = kind.said + "".join(f", {kind[name].title} not measured" for name in unmeasured)
    names = "; names: names and numbers found in sentences" if _has_names(kind) else ""
    table = Table(
        title=f"[bold]{escape(row.setting)}[/bold], {batches}",
        title_justify="left",
        title_style="",
        caption=f"{said}; blind: {kind.ranked_by.title} without any gradient{names}{interval}\n",
        caption_justify="left",
    )
    table.add_column("attack")
    for name in (*(s.short for s in kind.all), "blind", *(["names"] if _has_names(kind) else []), "s"):
        table.add_column(name, justify="right")
    return table


def legend() -> Text:
    """Return what the colors and shapes of `compared` mean."""
    marks: tuple[tuple[Mark, str], ...] = (
        ("right", "right place"),
        ("misplaced", "right word, wrong place"),
        ("wrong", "wrong"),
    )
    line = Text()
    for mark, meaning in marks:
        before, after = _SHAPES[mark]
        line.append(f"{before}{meaning}{after}   ", style=_STYLES[mark])
    return line + Text("\n")


def compared(record: Record, texts: Texts, sentences: Sequence[int]) -> list[Text]:
    """Return original and recovered lines of some sentences, words marked by color and by shape."""
    lines = []
    for at in sentences:
        lines.append(Text("original   ", style="bold") + Text(harmless(texts.originals[at])))
        row = Text("recovered  ", style="bold")
        words, found = texts.recovered_words[at], record.sentences[at].recovered if record.sentences else ()
        if not words:
            row.append("(nothing)", style="dim")
        for word, mark in zip(words, found, strict=True):
            before, after = _SHAPES[mark]
            row.append(f"{before}{harmless(word)}{after} ", style=_STYLES[mark])
        lines += [row, Text("")]
    return lines


_UNSCORED = "\nNobody compared this with the original: see 'gradaudit run' for a scored audit."


def print_examination(found: Examination, bundle: Path, out: Console, err: Console) -> None:
    """Print what an attack read out of one bundle."""
    for warning in found.warnings:
        err.print(f"[yellow]note:[/yellow] {escape(warning)}")
    out.print(f"[bold]{found.title}[/bold] on {escape(str(bundle))}: {_amount(found)} in {found.seconds:.1f} s\n")
    for number, text in enumerate(found.texts, 1):
        proof = found.certificates[number - 1] if found.certificates else ""
        out.print(f"{number:>3}  {escape(harmless(text))}  [dim]{proof}[/dim]")
    if found.words:
        out.print(_words_shown(found.words))
    if found.images is not None and found.labels:
        out.print(f"labels: {', '.join(map(str, found.labels))}")
    for note in found.notes:
        out.print(f"[dim]{escape(note)}[/dim]")
    out.print(_UNSCORED)


def _words_shown(words: Sequence[ShownWord]) -> str:
    """Return the words that an attack names, and how many of them are certain."""
    certain = sum(word.certain for word in words)
    told = f", {certain} of them for certain" if certain else ""
    return f"{len(words)} words{told}: " + escape(", ".join(harmless(word.text.strip()) for word in words))


def _amount(found: Examination) -> str:
    """Return how much was read, in words."""
    what = "sentence" if found.images is None else "image"
    return f"{found.count} {what}{'' if found.count == 1 else 's'}"


def print_rounds(found: Rounds, bundles: Sequence[Path], out: Console, err: Console) -> None:
    """Print what an attack read out of several updates of one client, each sentence once."""
    images = False
    for number, (one, bundle) in enumerate(zip(found.rounds, bundles, strict=True), 1):
        where = f"round {number}, {escape(str(bundle))}"
        if isinstance(one, AuditError):
            err.print(f"[red]{where}:[/red] {escape(str(one))}")
            continue
        images = images or one.images is not None
        for warning in one.warnings:
            err.print(f"[yellow]note on {where}:[/yellow] {escape(warning)}")
        out.print(f"{where}: {_amount(one)} in {one.seconds:.1f} s")
        if one.words:
            out.print(f"  {_words_shown(one.words)}")
        for note in one.notes:
            out.print(f"  [dim]{escape(note)}[/dim]")
    if found.sentences or not images:
        out.print(f"\n[bold]{len(found.sentences)} sentences of this client in {len(found.rounds)} rounds[/bold]\n")
    for number, sentence in enumerate(found.sentences, 1):
        rounds = ", ".join(map(str, sentence.rounds))
        out.print(f"{number:>3}  {escape(harmless(sentence.text))}  [dim]round {rounds}[/dim]")
    out.print(_UNSCORED)


_VERDICTS = {"void": "red", "not supported": "red", "supported": "green", "nothing declared": "yellow"}
_UNITS = {"client": "all that a client holds", "example": "one example"}


def print_findings(findings: Sequence[ClaimCheck], out: Console) -> None:
    """Print what each claim's mechanism supports: a line for each unit of privacy, the verdict, what to know."""
    for found in findings:
        claim = found.claim
        out.print(f"[bold]{escape(claim.name)}[/bold]")
        if claim.source:
            out.print(Padding(f"[dim]{escape(claim.source)}[/dim]", (0, 0, 0, 2)))
        if found.supported:
            out.print(Padding(_supported(found), (0, 0, 0, 2)))
        out.print(Padding(f"[{_VERDICTS[found.verdict]}]{escape(found.sentence)}[/]", (0, 0, 0, 2)))
        for remark in found.remarks:
            out.print(Padding(f"[dim]{escape(remark)}[/dim]", (0, 0, 0, 2)))
        out.print()
    out.print("[dim]This is what a mechanism promises in theory; 'gradaudit run' measures what attacks recover.[/dim]")


def _supported(found: ClaimCheck) -> Table:
    claim = found.claim
    differ = "replaced by another's" if claim.neighbors == "replace" else "added or removed"
    by = [f"{name} {shortened(e)}" for line in found.supported for name, e in line.accountants.items() if e is not None]
    table = Table(
        box=None,
        pad_edge=False,
        padding=(0, 3, 0, 0),
        caption=f"delta {claim.delta:g}; {differ}" + (f"\none example by {'; '.join(by)}" if by else ""),
        caption_justify="left",
    )
    table.add_column("hides")
    for title in ("sensitivity", "epsilon, one round", *([f"{claim.rounds} rounds"] if claim.rounds > 1 else [])):
        table.add_column(title, justify="right")
    for line in found.supported:
        change = "-" if line.sensitivity is None else f"{line.sensitivity:.4g}"
        values = [shortened(line.one_round), *([shortened(line.all_rounds)] if claim.rounds > 1 else [])]
        table.add_row(_UNITS[line.unit], change, *values)
    return table
