"""What people see in the terminal: progress bars on standard error, tables, and recovered text made harmless."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from gradaudit.accounting.check import Finding
from gradaudit.accounting.check import number as shortened
from gradaudit.bundles.examine import Examination
from gradaudit.bundles.rounds import Rounds
from gradaudit.errors import AuditError
from gradaudit.progress import shown_by
from gradaudit.record import Interval, Mark, Record, Summary, Texts
from gradaudit.sweeps.sweep import Result

SCORE_TITLES = {
    "rouge1": "R-1",
    "rouge2": "R-2",
    "rougeL": "R-L",
    "token_accuracy": "tok",
    "exact": "exact",
}
IMAGE_TITLES = {"mse": "MSE", "psnr": "PSNR", "ssim": "SSIM", "lpips": "LPIPS"}
_STYLES: dict[Mark, str] = {"right": "green", "misplaced": "yellow", "wrong": "red", "missing": "dim"}
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
    """Show the progress of everything inside the block: one bar for each kind of work, gone when it is done."""
    if quiet:
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=28), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bars:
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


def _cell(value: Interval) -> str:
    if value.mean is None:
        return "-"
    if value.low is None or value.high is None or value.low == value.high:
        return f"{value.mean:.1f}"
    return f"{value.mean:.1f} [dim]({value.low:.0f}-{value.high:.0f})[/dim]"


def _image_cell(value: Interval, digits: int) -> str:
    if value.mean is None:
        return "-"
    low, high = value.low, value.high
    between = "" if low is None or high is None or low == high else f" [dim]({low:.{digits}f}-{high:.{digits}f})[/dim]"
    return f"{value.mean:.{digits}f}{between}"


_DIGITS = {"mse": 4, "psnr": 1, "ssim": 2, "lpips": 2}


def summary_tables(summaries: Sequence[Summary]) -> list[Table]:
    """Return one table a setting: scores with intervals, the blind baseline beside them, seconds, failures."""
    tables: dict[str, Table] = {}
    for row in summaries:
        if row.setting not in tables:
            tables[row.setting] = _empty_table(row)
        failed = f" ({row.failed} failed)" if row.failed else ""
        if "mse" in row.scores:
            tables[row.setting].add_row(
                row.attack + failed,
                *(_image_cell(row.scores[name], _DIGITS[name]) for name in IMAGE_TITLES),
                _image_cell(row.baseline["mse"], _DIGITS["mse"]),
                f"{row.seconds:.1f}",
            )
            continue
        tables[row.setting].add_row(
            row.attack + failed,
            *(_cell(row.scores[name]) for name in SCORE_TITLES),
            _cell(row.baseline["rougeL"]),
            "-" if row.sensitive is None else _cell(row.sensitive),
            f"{row.seconds:.1f}",
        )
    return list(tables.values())


def sweep_table(results: Sequence[Result]) -> Table:
    """Return a row a point: its axes, scores, blind, seconds; "not run" where it could not be (see also sweep.csv)."""
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        caption="0 to 100, in brackets the 95% interval over batches; blind: ROUGE-L without any gradient; >: lower "
        "bound, the attack does not reckon with a defense or dropout there",
        caption_justify="left",
    )
    for key in results[0].point.values:
        table.add_column(escape(key.split(".")[-1]), min_width=10)
    costs = any(r.utility is not None for r in results)
    images = any(r.summary is not None and "mse" in r.summary.scores for r in results)
    if images:
        table.caption = (
            "MSE of pixels in 0 to 1 (lower: more leaked), PSNR in dB, in brackets the 95% interval over batches; "
            "blind: MSE without any gradient; <: upper bound, the attack does not reckon with a defense there"
        )
    shown = ("MSE", "PSNR", "SSIM") if images else ("R-1", "R-L", "exact")
    names = (*shown, "blind", "batches", "s") + (("acc", "mcc", "epsilon") if costs else ())
    if images and costs:  # what else there is would not fit beside the costs, and is in sweep.csv
        names = ("MSE", "blind", "s", "acc", "mcc", "epsilon")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        found, values = result.summary, map(escape, result.point.values.values())
        if found is None or result.failed:
            table.add_row(*values, "not supported" if result.unsupported else "[yellow]not run[/yellow]")
            continue
        cost = result.utility
        spent = "-" if cost is None or cost.epsilon is None else shortened(cost.epsilon)
        paid = () if cost is None else (f"{cost.accuracy:.1f}", f"{cost.mcc:.1f}", spent)
        if "mse" in found.scores:
            table.add_row(*values, *_image_sweep_cells(found, short=costs), *paid)
            continue
        bound = "> " if {"defense-not-modeled", "dropout-not-modeled"} & set(found.flags) else ""
        one, exact = (f"{found.scores[name].mean or 0:.1f}" for name in ("rouge1", "exact"))
        failed = f" ({found.failed} failed)" if found.failed else ""
        blind = f"{found.baseline['rougeL'].mean or 0:.1f}"
        longest = bound + _cell(found.scores["rougeL"])
        table.add_row(
            *values, bound + one, longest, bound + exact, blind, f"{found.n}{failed}", f"{found.seconds:.1f}", *paid
        )
    return table


def _image_sweep_cells(found: Summary, short: bool) -> list[str]:
    bound = "< " if "defense-not-modeled" in found.flags else ""
    if short:
        means = [one["mse"].model_copy(update={"low": None}) for one in (found.scores, found.baseline)]
        error, blind = (_image_cell(mean, _DIGITS["mse"]) for mean in means)
        return [bound + error, blind, f"{found.seconds:.1f}"]
    plain = [found.scores[name].model_copy(update={"low": None}) for name in ("psnr", "ssim")]
    scores = [_image_cell(found.scores["mse"], _DIGITS["mse"]), _image_cell(plain[0], 1), _image_cell(plain[1], 2)]
    failed = f" ({found.failed} failed)" if found.failed else ""
    blind = _image_cell(found.baseline["mse"].model_copy(update={"low": None}), _DIGITS["mse"])
    return [bound + scores[0], *scores[1:], blind, f"{found.n}{failed}", f"{found.seconds:.1f}"]


def _empty_table(row: Summary) -> Table:
    batches = f"{row.n} batch{'es' * (row.n > 1)}"
    interval = "; in brackets the 95% interval over batches" if row.n > 1 else ""
    images = "mse" in row.scores
    said = "0 to 100; blind: ROUGE-L without any gradient; names: names and numbers found"
    if images:
        lpips = row.scores.get("lpips")
        unmeasured = ", LPIPS not measured" if lpips is None or lpips.mean is None else ""
        said = f"MSE of pixels in 0 to 1, PSNR in dB{unmeasured}; blind: MSE without any gradient"
    table = Table(
        title=f"[bold]{escape(row.setting)}[/bold], {batches}",
        title_justify="left",
        title_style="",
        caption=f"{said}{interval}\n",
        caption_justify="left",
    )
    table.add_column("attack")
    for name in (*IMAGE_TITLES.values(), "blind", "s") if images else (*SCORE_TITLES.values(), "blind", "names", "s"):
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
    out.print(f"[bold]{found.attack}[/bold] on {escape(str(bundle))}: {_amount(found)} in {found.seconds:.1f} s\n")
    for number, text in enumerate(found.texts, 1):
        proof = found.certificates[number - 1] if found.certificates else ""
        out.print(f"{number:>3}  {escape(harmless(text))}  [dim]{proof}[/dim]")
    if found.images is not None and found.labels:
        out.print(f"labels: {', '.join(map(str, found.labels))}")
    for note in found.notes:
        out.print(f"[dim]{escape(note)}[/dim]")
    out.print(_UNSCORED)


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
        for note in one.notes:
            out.print(f"  [dim]{escape(note)}[/dim]")
    if found.sentences or not images:
        out.print(f"\n[bold]{len(found.sentences)} sentences of this client in {len(found.rounds)} rounds[/bold]\n")
    for number, sentence in enumerate(found.sentences, 1):
        rounds = ", ".join(map(str, sentence.rounds))
        out.print(f"{number:>3}  {escape(harmless(sentence.text))}  [dim]round {rounds}[/dim]")
    out.print(_UNSCORED)


_VERDICTS = {"void": "red", "not supported": "red", "supported": "green", "nothing declared": "yellow"}


def print_findings(findings: Sequence[Finding], out: Console) -> None:
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


def _supported(found: Finding) -> Table:
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


_VERDICTS = {"void": "red", "not supported": "red", "supported": "green", "nothing declared": "yellow"}
_UNITS = {"client": "all that a client holds", "example": "one example"}
