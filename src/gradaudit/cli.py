"""The command line, thin: reads arguments, calls the program, turns errors into one sentence and an exit code.

One file because it is the list of all commands, each of which is a few lines. What a command calls is imported in it:
torch takes seconds, and help, completion and lists do without.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from dataclasses import asdict
from functools import partial
from importlib.metadata import entry_points
from importlib.resources import files
from inspect import unwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TextIO, get_type_hints

import click
import typer
import typer.core
from rich.console import Console
from rich.markup import escape

from gradaudit import __version__
from gradaudit.errors import AuditError, BadInputError, BrokenDownError, ExitCode, NotSupportedError
from gradaudit.machine import choose_threads, ready_process
from gradaudit.progress import StoppedError, step

if TYPE_CHECKING:
    import torch

    from gradaudit.bundles.examine import Examination
    from gradaudit.record import Record, Summary
    from gradaudit.sweeps.result import Result

app = typer.Typer(
    help="How much private text, and how well images, can be read back from the updates a model training sends?",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    epilog="Exit codes: 0 done; 1 threshold crossed, or a claim does not hold; 2 bad input; 3 inconclusive; 4 broken.",
)


class _WithHelp(typer.core.TyperCommand):
    """A command that shows what its arguments are: from click 8.4 on, typer loses their help."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.callback is None:
            return
        hints = get_type_hints(unwrap(self.callback), include_extras=True)
        for param in self.params:
            if isinstance(param, typer.core.TyperArgument) and param.name in hints:
                (told,) = hints[param.name].__metadata__
                param.help = told.help


_command = partial(app.command, cls=_WithHelp)
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)
_NOTES = 3
"""Notes of attacks that `run` prints; records.jsonl has those of every batch."""
_INTERRUPTED = 130
"""What typer returns after Ctrl-C in a command."""


def _set(help_: str) -> Any:
    return typer.Option("--set", metavar="KEY=VALUE", help=help_)


CaseFile = Annotated[Path, typer.Argument(metavar="CASE.toml", help="A case; 'gradaudit init' writes one.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda; auto takes a GPU when there is one.")]
Compile = Annotated[
    bool,
    typer.Option(
        "--compile", help="Compile the steps of a matching attack: a minute or two once, then faster steps (needs g++)."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON lines on standard output, and nothing else there.")]
ShowText = Annotated[
    bool, typer.Option("--show-text", help="Show the private text or images; they are redacted otherwise.")
]


@_command()
def demo(
    folder: Annotated[Path, typer.Option("--out", help="Folder for the report, records and the update.")] = Path(
        "gradaudit-demo"
    ),
    device: Device = "auto",
    vision: Annotated[
        bool, typer.Option("--vision", help="Digits and a small network in place of text (extra: vision).")
    ] = False,
) -> None:
    """Audit a real model's update on embedded sentences and show what leaks (under a minute on two cores)."""
    from gradaudit.audit.info import RECORDS
    from gradaudit.demo import IMAGE_COUNT, run_demo
    from gradaudit.metrics.summary import summarize
    from gradaudit.report.render import render
    from gradaudit.report.terminal import progress_bars, summary_tables

    place = _ready(device)
    if vision:
        err.print(
            "[bold]gradaudit demo --vision[/bold]: LeNet (random weights) takes one step on a handwritten digit, "
            f"{IMAGE_COUNT} times. The server that gets the update tries to see the digit.\n"
        )
    else:
        err.print(
            "[bold]gradaudit demo[/bold]: MiniLM-L6 (real weights) takes one fine-tuning step on 4 private sentences. "
            "The server that gets the update tries to read them back.\n"
        )
    with _going_on(lambda: f"what was finished is kept in {folder}"), progress_bars(err):
        records = run_demo(folder, place, vision)
    page = render(folder, show_text=True)  # the demo's sentences are invented, and its digits public
    if not vision:
        _print_best(records, folder)
    summaries = summarize(records)
    for table in summary_tables(summaries):
        out.print(table)
    _print_verdict(summaries, records)
    if vision:
        out.print(f"report   {page}  (the digits side by side)\nrecords  {folder / RECORDS}", soft_wrap=True)
    else:
        out.print(f"report   {page}\nrecords  {folder / RECORDS}\nupdate   {folder / 'update'}")


def _print_verdict(summaries: Sequence[Summary], records: Sequence[Record]) -> None:
    """Print what a run found and the two weightiest things to do next."""
    from gradaudit.report.advice import next_steps
    from gradaudit.verdict.run import verdicts

    judged = verdicts(summaries, records)
    out.print(f"\n[bold]Verdict:[/bold] {escape(judged.overall.sentence)}\n\n[bold]Next:[/bold]")
    for told in next_steps(judged, summaries, records)[:2]:
        out.print(f"- {escape(told)}")
    out.print()


def _print_best(records: Sequence[Record], folder: Path) -> None:
    """Print the three sentences that were read best."""
    from gradaudit.audit.info import TEXTS
    from gradaudit.files import read_lines
    from gradaudit.record import Texts
    from gradaudit.report.terminal import compared, legend

    # the practical setting comes last: among equals it is the one to show
    best = max(reversed(records), key=lambda r: r.scores["rougeL"] or 0.0)
    whose = (best.case, best.attack)
    texts = next((t for t in read_lines(folder / TEXTS, Texts) if (t.case, t.attack) == whose), None)
    out.print(f"\n[bold]What '{best.attack}' read out of the update[/bold] ({escape(best.setting)})\n")
    if texts is None:
        out.print("texts.jsonl is not in the folder any more")
        return
    order = sorted(range(len(best.sentences)), key=lambda i: -best.sentences[i].rougeL)
    for line in compared(best, texts, sorted(order[:3])):
        out.print(line)
    out.print(legend())


@_command()
def init(
    data: Annotated[Path, typer.Option(metavar="FILE", help="csv, tsv, jsonl, parquet or txt with the private text.")],
    text: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Column of the text: a name or a 0-based number.")
    ] = None,
    label: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Column of the class.", show_default="train on next words")
    ] = None,
    case_file: Annotated[Path, typer.Option("--out", metavar="CASE.toml", help="File to write.")] = Path("case.toml"),
) -> None:
    """Write a commented case that audits a client who trains on your file."""
    from gradaudit.catalog import starter
    from gradaudit.files import write_page

    written = starter(data, text, label, case_file.parent)
    if case_file.exists():
        raise BadInputError(f"{case_file} is already there; remove it or choose another --out")
    write_page(case_file, written, private=False)
    shown = escape(str(case_file))
    out.print(f"wrote {shown}\ngradaudit check {shown}\ngradaudit run {shown}", soft_wrap=True)


@_command()
def run(
    case_file: CaseFile,
    folder: Annotated[
        Path | None, typer.Option("--out", help="Folder for records and report.", show_default="out/CASE-HASH")
    ] = None,
    set_: Annotated[list[str], _set("Override, e.g. attack.steps=100.")] = [],  # noqa: B006 - typer's way
    device: Device = "auto",
    compile_: Compile = False,
    as_json: Json = False,
    show_text: ShowText = False,
    fail_on: Annotated[list[str], typer.Option(metavar="SCORE>VALUE", help="Exit 1 when a mean score crosses.")] = [],  # noqa: B006
) -> None:
    """Run a case: attack every batch, judge it, write records and a report. Run again to go on after a stop."""
    from gradaudit.audit import run as audit
    from gradaudit.audit.info import usual_folder
    from gradaudit.audit.prepare import prepare
    from gradaudit.audit.thresholds import check_scores, parse
    from gradaudit.case import load_case
    from gradaudit.leakage.matching.compiled import compiling
    from gradaudit.metrics.summary import summarize
    from gradaudit.models.spec import kind_of
    from gradaudit.report.render import render
    from gradaudit.report.terminal import progress_bars, summary_tables
    from gradaudit.scores import SCORES

    limits = parse(fail_on)
    case = load_case(case_file, set_)
    check_scores(limits, SCORES[kind_of(case.task)], ["lpips"] if case.metrics.lpips is not None else [])
    folder = folder or usual_folder(case, case_file.stem)
    place = _ready(device)
    records: list[Record] = []
    with (
        _going_on(lambda: f"{len(records)} of {case.data.batches} batches are kept in {folder}"),
        progress_bars(err, quiet=as_json),
        compiling(compile_),
    ):
        ready = prepare(case, case_file.resolve().parent, place)
        for record in audit.run(ready, folder):
            records.append(record)
            step("batches", len(records), len(ready.batches))
            if as_json:
                _print_json(_record_line(record))
    summary = summarize(records)[0]
    page = render(folder, show_text=show_text)
    if as_json:
        _print_json(_summary_line(summary))
    else:
        for table in summary_tables([summary]):
            out.print(table)
        out.print(f"{escape(ready.model.spec.title)}, {escape(ready.rows.where)}")
        _print_verdict([summary], records)
        out.print(f"report   {page}")
        out.print(f"proven   {sum(r.proven for r in records)} of {sum(len(r.sentences) for r in records)} sentences")
        out.print(f"flags    {escape(', '.join(summary.flags) or 'none')}  (docs/flags.md)")
        _print_problems("failed", (r.error for r in records))
        for note in list(dict.fromkeys(note for r in records for note in r.notes))[:_NOTES]:
            out.print(f"[dim]{plain(note)}[/dim]")
    crossed = [str(t) for t in limits if t.crossed(summary)]
    if crossed:
        err.print(f"threshold crossed: {', '.join(crossed)}")
        raise typer.Exit(ExitCode.THRESHOLD_CROSSED)
    if summary.failed == summary.n:
        raise _inconclusive("every batch failed, see the errors above; a failed attack is no sign of safety")
    blind = [str(t) for t in limits if t.undefined(summary)]
    if blind:
        raise _inconclusive(f"{', '.join(blind)} cannot be judged: no batch here has that score; choose another")


@_command()
def attack(
    bundles: Annotated[
        list[Path], typer.Argument(metavar="BUNDLE...", help="Folders made by gradaudit.capture, of one client.")
    ],
    name: Annotated[
        str | None, typer.Option("--attack", help="See 'gradaudit list attacks'.", show_default="auto")
    ] = None,
    set_: Annotated[list[str], _set("Attack field, e.g. steps=100.")] = [],  # noqa: B006
    budget: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Of auto: time for an update.", show_default="120")
    ] = None,
    selection: Annotated[str, typer.Option(help="Which gradients the attacker sees.")] = "all",
    model: Annotated[str | None, typer.Option(help="Model to use in place of the one the bundle names.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the attack's random stream.")] = 0,
    blocks: Annotated[
        int | None, typer.Option(min=1, help="Load only so many first blocks of the model (dager: 2).")
    ] = None,
    save: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Where recovered images go, as PNG.")] = None,
    device: Device = "auto",
    compile_: Compile = False,
    as_json: Json = False,
) -> None:
    """Attack update bundles that you are entitled to examine; no truth is needed."""
    from gradaudit.bundles.checkpoints import refuse_checkpoints
    from gradaudit.bundles.examine import Examination, examine
    from gradaudit.bundles.rounds import Rounds, examine_rounds, save_rounds
    from gradaudit.data.png import room_for_pictures
    from gradaudit.leakage.matching.compiled import compiling
    from gradaudit.report.terminal import print_examination, print_rounds, progress_bars

    place = _ready(device)
    refuse_checkpoints(bundles)
    if budget is not None:
        set_ = [*set_, f"budget={budget:g}"]
    if save is not None:
        room_for_pictures(save)  # before the attack, which may take hours

    def one(folder: Path, known: tuple[tuple[int, ...], ...] = ()) -> Examination:
        return examine(folder, name, set_, selection, model, seed, place, blocks, known)

    found: Examination | Rounds
    stopped = False
    with progress_bars(err, quiet=as_json), compiling(compile_):
        try:
            found = one(bundles[0]) if len(bundles) == 1 else examine_rounds(bundles, one)
        except StoppedError as stop:
            found, stopped = stop.found, True
        except KeyboardInterrupt:
            raise _inconclusive("interrupted before an attack had ended, so that nothing is known") from None
    stopped = stopped or (isinstance(found, Rounds) and found.interrupted)
    if as_json:
        _print_json(found.as_json())
    elif isinstance(found, Examination):
        print_examination(found, bundles[0], out, err)
    else:
        print_rounds(found, bundles, out, err)
    pictures = save_rounds(found, save)
    if save is not None:
        err.print(f"{pictures} images written to {escape(str(save))}")
    elif pictures:
        err.print("--save FOLDER writes the images as PNG")
    if stopped:
        err.print("interrupted; above is what was read until then")
        raise typer.Exit(ExitCode.INCONCLUSIVE)
    if not isinstance(found, Examination) and found.failed:
        raise typer.Exit(ExitCode.BAD_INPUT)
    if not found.count and not found.named:
        raise _inconclusive("nothing was recovered, which is no sign of safety; try another attack")


@_command()
def gate(
    folder: Annotated[Path, typer.Argument(metavar="BUNDLE", help="The update that is to be sent.")],
    fail_on: Annotated[
        list[str],
        typer.Option(metavar="COUNT>VALUE", help="What closes the gate.", show_default="proven>0 certain_words>0"),
    ] = [],  # noqa: B006
    within: Annotated[float, typer.Option(metavar="SECONDS", help="Time for all of it.")] = 60.0,
    name: Annotated[
        str | None, typer.Option("--attack", help="See 'gradaudit list attacks'.", show_default="auto")
    ] = None,
    set_: Annotated[list[str], _set("Attack field, e.g. steps=100.")] = [],  # noqa: B006
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Check an update before it is sent: attack it within a time, and exit 1 where too much was read."""
    from gradaudit.bundles.gate import USUAL
    from gradaudit.bundles.gate import gate as run_gate

    found = run_gate(folder, fail_on or USUAL, within, name, set_, device)
    if as_json:
        _print_json(found.as_json())
    else:
        out.print(plain(found.sentence), soft_wrap=True)
    if found.counts is None:
        raise typer.Exit(ExitCode.INCONCLUSIVE)
    if found.crossed:
        raise typer.Exit(ExitCode.THRESHOLD_CROSSED)


@_command()
def bundle(
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="Folder of the bundle that is written.")],
    before: Annotated[
        Path, typer.Option(help="Checkpoint that the client started from: a folder, .safetensors, .pt or .npz.")
    ],
    after: Annotated[Path, typer.Option(help="Checkpoint that it sent.")],
    base: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Folder or hub id: of adapters, or of weights without a configuration."),
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Folder or hub id.", show_default="the checkpoints'")] = None,
    dropout: Annotated[
        str | None, typer.Option(metavar="on|off|RATE", help="Whether dropout acted.", show_default="unknown")
    ] = None,
    optimizer: Annotated[str | None, typer.Option(help="sgd, adam or adamw.", show_default="unknown")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="The optimizer's.", show_default="unknown")] = None,
    set_: Annotated[list[str], _set("More of the training, e.g. weight_decay=0.01.")] = [],  # noqa: B006
    sentences: Annotated[
        int | None, typer.Option(min=1, help="How many it trained on.", show_default="unknown")
    ] = None,
    defense: Annotated[
        list[str], typer.Option(metavar="NAME|none|TABLE", help="What acted on the update.", show_default="unknown")
    ] = [],  # noqa: B006
) -> None:
    """Make a bundle of two checkpoints, what one client started from and what it sent."""
    from gradaudit.bundles.between import bundle as bundle_between
    from gradaudit.bundles.facts import facts, remarks

    ready_process()
    told = facts(dropout, optimizer, learning_rate, set_, defense)
    place = bundle_between(before, after, out=folder, base=base, tokenizer=tokenizer, sentences=sentences, **told)
    for line in remarks(place):
        err.print(plain(line))
    out.print(f"gradaudit attack {escape(str(place))}", soft_wrap=True)


@_command()
def fit(
    case_file: CaseFile,
    folder: Annotated[Path, typer.Option("--out", help="Folder that becomes what was learned.")],
    set_: Annotated[list[str], _set("Override, e.g. attack.epochs=5.")] = [],  # noqa: B006
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    r"""Fit the attack of a case to its client, on \[public] text alone. Run again to go on after a stop."""
    from gradaudit.audit.fitting import fit_case
    from gradaudit.audit.prepare import prepare
    from gradaudit.case import load_case
    from gradaudit.report.terminal import progress_bars

    case = load_case(case_file, set_)
    place = _ready(device)
    with _going_on(lambda: f"what was learned so far is kept in {folder}"), progress_bars(err, quiet=as_json):
        ready = prepare(case, case_file.resolve().parent, place)
        found = fit_case(ready, folder)
    if as_json:
        _print_json({"inverter": str(folder), **found})
        return
    for key, value in found.items():
        out.print(f"{key.replace('_', ' ')}: {escape(str(value))}")
    use = f'[attack] name = "{ready.attack.name}", inverter = "{folder}"'
    out.print(escape(f"inverter  {folder}   (in a case: {use}; of a bundle: --set inverter={folder})"))


@_command()
def report(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder written by 'gradaudit run', or by shards of a sweep.")
    ],
    show_text: ShowText = False,
) -> None:
    """Write a run's report.html anew, with or without the private text; of a sweep's shards the table of all."""
    from gradaudit.report.render import render
    from gradaudit.sweeps.result import TABLE, write_table
    from gradaudit.sweeps.shards import is_sharded, merge

    if is_sharded(folder):
        found = merge(folder)
        write_table(folder / TABLE, found.results)
        _end_sweep(found.results, folder, found.costs, folder.resolve().name, show_text)
        if found.missing:
            raise _inconclusive(f"{found.missing} points are not there yet; run their shards, then this again")
        return
    out.print(str(render(folder, show_text=show_text)), soft_wrap=True)


@_command("list")
def list_(
    kind: Annotated[str, typer.Argument(metavar="attacks|models|metrics|defenses|data", help="What to list.")],
    as_json: Json = False,
) -> None:
    """List what there is to choose from."""
    items = _shipped("listing", kind)
    if items is None:
        from gradaudit.catalog import listing

        items = listing(kind)
    if as_json:
        _print_json(items)
        return
    width = max((len(item["name"]) for item in items), default=0)
    for item in items:
        out.print(f"[bold]{escape(item['name']):<{width}}[/bold]  {escape(item['about'])}")


@_command()
def show(
    kind: Annotated[str, typer.Argument(metavar="attack|defense|model|metric|data|case", help="Kind.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="As 'gradaudit list' prints it; of a case: example.")],
    as_json: Json = False,
) -> None:
    """Show one attack, defense, model or metric: fields, defaults, sources; 'show case example' prints a case."""
    if kind == "case" and name != "example":
        raise BadInputError("there is one case to show: 'gradaudit show case example'")
    found = _shipped("details", kind, name)
    if found is None:
        from gradaudit.catalog import details

        found = details(kind, name)
    if kind == "case":
        _stdout().write(found["about"])
        return
    if as_json:
        _print_json(found)
        return
    fields = found.pop("fields", [])
    out.print(f"[bold]{found.pop('kind')} {escape(found.pop('name'))}[/bold]\n{escape(found.pop('about'))}\n")
    for key, value in found.items():
        shown = ", ".join(map(str, value)) or "nothing" if isinstance(value, list) else value
        out.print(f"{key.replace('_', ' ')}: {escape(str(shown))}")
    for field in fields:
        unit = f" {field['unit']}" if field["unit"] else ""
        source = f" [dim]({escape(field['source'])})[/dim]" if field["source"] else ""
        out.print(
            f"  [bold]{field['name']}[/bold] = {escape(repr(field['default']))}{unit}  {escape(field['about'])}{source}"
        )


@_command()
def check(
    case_file: CaseFile,
    set_: Annotated[list[str], _set("Override, e.g. attack.steps=100.")] = [],  # noqa: B006
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Validate a case and estimate its time and memory; --json prints it with every default."""
    from gradaudit.audit.estimate import estimate
    from gradaudit.audit.prepare import prepare
    from gradaudit.case import load_case

    case = load_case(case_file, set_)
    ready = prepare(case, case_file.resolve().parent, _ready(device))
    cost = estimate(ready)
    if as_json:
        _print_json({"case": case.resolved(), "hash": case.content_hash(), "estimate": asdict(cost)})
        return
    out.print(f"hash {case.content_hash()}; model {ready.model.spec.title}; data {ready.rows.where}")
    bound = "at most " if math.isfinite(ready.attack.seconds_at_most) else ""
    first = f"{ready.case.data.batch_size} images"
    if cost.tokens is not None:
        first = f"{cost.tokens} tokens, load b/d {cost.load:.2f}"
    out.print(
        f"first batch: {first}; the attacker sees {100 * cost.share:.2f}% of "
        f"the parameters\nestimate: {bound}{cost.seconds:.0f} s for {len(ready.batches)} "
        f"batch{'es' * (len(ready.batches) > 1)}, {cost.memory_mib:.0f} MiB"
    )
    if cost.learning:
        out.print(f"before them: {cost.learning:.0f} s to simulate public updates; learning from them takes more")


@_command()
def sweep(
    sweep_file: Annotated[Path, typer.Argument(metavar="SWEEP.toml", help=r"A case with an \[axes] table.")],
    folder: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for a run a point, and the table of all.", show_default="out/SWEEP"),
    ] = None,
    set_: Annotated[list[str], _set("Override, e.g. data.batches=2.")] = [],  # noqa: B006
    device: Device = "auto",
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Processes that share the points.")] = 1,
    shard: Annotated[
        str | None, typer.Option(metavar="K/N", help="Run a part alone; 'gradaudit report' makes the table of all.")
    ] = None,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Run the points on a Ray cluster (extra: ray); or 'local'.")
    ] = None,
    compile_: Compile = False,
    as_json: Json = False,
    show_text: ShowText = False,
) -> None:
    r"""Run a case along the axes of its \[axes] table. Run again to go on after a stop."""
    from gradaudit.leakage.matching.compiled import compiling
    from gradaudit.report.terminal import progress_bars
    from gradaudit.sweeps.cluster import run_on_cluster
    from gradaudit.sweeps.shards import Shard, run_shard, shard_groups
    from gradaudit.sweeps.sweep import load_sweep, run_sweep

    asked = load_sweep(sweep_file, set_)
    part = None if shard is None else Shard.parse(shard)
    if ray is not None and (part is not None or jobs > 1):
        raise BadInputError("--ray shares the points among the cluster's workers: leave --shard and --jobs away")
    runner = None if ray is None else partial(run_on_cluster, address=ray)
    folder = folder or Path("out") / sweep_file.stem
    place = _ready(device)
    results: list[Result] = []
    base = sweep_file.resolve().parent
    count = len(asked.points) if part is None else sum(map(len, shard_groups(asked, part)))
    with (
        _going_on(lambda: f"{len(results)} of {count} points are kept in {folder}"),
        progress_bars(err, quiet=as_json),
        compiling(compile_),
    ):
        running = (
            run_sweep(asked, base, folder, place, jobs, runner)
            if part is None
            else run_shard(asked, part, base, folder, place, jobs)
        )
        for result in running:
            results.append(result)
            if as_json:
                _print_json(
                    {
                        "values": dict(result.point.values),
                        "error": result.failed,
                        "summary": None if result.summary is None else _summary_line(result.summary),
                        "utility": None if result.utility is None else asdict(result.utility),
                    }
                )
    if part is not None:
        _print_problems("not run", (r.failed for r in results))
        err.print(
            f"shard {part.number} of {part.of}: {count} of {len(asked.points)} points are in {escape(str(folder))}; "
            f"when all shards are there: gradaudit report {escape(str(folder))}"
        )
        return
    order = {point.case.content_hash(): number for number, point in enumerate(asked.points)}
    results.sort(key=lambda r: order[r.point.case.content_hash()])
    _end_sweep(results, folder, asked.utility is not None, sweep_file.stem, show_text, as_json)


def _end_sweep(
    results: Sequence[Result], folder: Path, costs: bool, title: str, show_text: bool, as_json: bool = False
) -> None:
    """Print a sweep's table, and write and name its frontier."""
    from gradaudit.report.frontier_page import write_frontiers
    from gradaudit.report.terminal import sweep_table
    from gradaudit.sweeps.frontier import frontiers
    from gradaudit.sweeps.result import TABLE

    if not as_json:
        out.print(sweep_table(results))
        _print_problems("not run", (r.failed for r in results))
        out.print(f"table  {folder / TABLE}", soft_wrap=True)
    if costs:
        found = frontiers(results)
        page = write_frontiers(folder, found, f"Leakage and utility: {title}", show_text)
        if not as_json:
            for one in found:
                out.print(f"\n[bold]Batches of {one.batch_size}:[/bold] {escape(one.reason)}")
            out.print(f"frontier  {page}", soft_wrap=True)
    if all(r.failed for r in results):
        raise _inconclusive("no point could be run, see above; a failed attack is no sign of safety")


@_command()
def claims(
    claims_file: Annotated[Path, typer.Argument(metavar="CLAIMS.toml", help="Or a bundle that names its mechanism.")],
    set_: Annotated[list[str], _set("Of a bundle: what its optimizer does not know, e.g. examples=8551.")] = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Say which epsilon a declared privacy mechanism really supports, and for whose data (no attack is run)."""
    from gradaudit.accounting.check import check as check_claim
    from gradaudit.accounting.claim import load_claims
    from gradaudit.bundles.bundle import read_manifest
    from gradaudit.bundles.mechanism import claim_of
    from gradaudit.report.terminal import print_findings

    if claims_file.is_dir():
        asked = [claim_of(claims_file, read_manifest(claims_file).mechanism, set_)]
    elif set_:
        raise BadInputError("--set completes the claim of a bundle; a file of claims says all of it itself")
    else:
        asked = load_claims(claims_file)
    findings = [check_claim(claim) for claim in asked]
    if as_json:
        for found in findings:
            _print_json(found.as_json())
    else:
        print_findings(findings, out)
    declared = [found for found in findings if found.claim.declared_epsilon is not None]
    if any(found.verdict != "supported" for found in declared):
        raise typer.Exit(ExitCode.THRESHOLD_CROSSED)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads that compute.", show_default="one a physical core")
    ] = None,
) -> None:
    choose_threads(threads)
    if version:
        out.print(f"gradaudit {__version__}")
        raise typer.Exit()


def _shipped(*path: str) -> Any:
    """Return what the file that is shipped holds of the catalog; None where the catalog itself has to be asked.

    The file saves importing torch. It knows no plugins, and where torch is there nothing is saved.
    """
    if "torch" in sys.modules or entry_points(group="gradaudit.plugins"):
        return None
    held: Any = json.loads(files("gradaudit").joinpath("data/catalog.json").read_text(encoding="utf8"))
    for part in path:
        held = held.get(part) if isinstance(held, dict) else None
    return held


def _ready(device: str) -> torch.device:
    """Set the process up and return the device that a command was asked to take."""
    from gradaudit.audit.prepare import pick_device

    ready_process()
    return pick_device(device)


@contextmanager
def _going_on(kept: Callable[[], str]) -> Iterator[None]:
    """End a command that Ctrl-C stops inside the block with what is kept, and that the same command goes on."""
    try:
        yield
    except KeyboardInterrupt:
        err.print(f"interrupted; {kept()}, run the same command again to go on")
        raise typer.Exit(ExitCode.INCONCLUSIVE) from None


def _inconclusive(why: str) -> typer.Exit:
    err.print(f"inconclusive: {why}")
    return typer.Exit(ExitCode.INCONCLUSIVE)


def _print_problems(what: str, errors: Iterable[str | None]) -> None:
    for problem in sorted({error for error in errors if error}):
        err.print(f"[yellow]{what}:[/yellow] {plain(problem)}")


def _record_line(record: Record) -> dict[str, Any]:
    # spectra, word marks and scores of single images are long, and in records.jsonl
    return record.model_dump(mode="json", exclude={"spectrum", "sentences", "images", "images_baseline"})


def _summary_line(summary: Summary) -> dict[str, Any]:
    data = summary.model_dump(mode="json")
    for side in ("scores", "baseline"):
        intervals = data[side]
        data[side] = {name: value["mean"] for name, value in intervals.items()}
        data["intervals" if side == "scores" else "baseline_intervals"] = {
            name: [value["low"], value["high"]] for name, value in intervals.items()
        }
    if data["sensitive"] is not None:
        value = data["sensitive"]
        data["intervals"]["sensitive"] = [value["low"], value["high"]]
        data["sensitive"] = value["mean"]
    for side in ("words", "baseline_words"):
        data[side] = data[side] and {name: value["mean"] for name, value in data[side].items()}
    return data


def _print_json(data: Any) -> None:
    to = _stdout()
    to.write(json.dumps(data, ensure_ascii=False) + "\n")
    to.flush()


_OWN: ContextVar[TextIO | None] = ContextVar("gradaudit_stdout", default=None)


def _stdout() -> TextIO:
    """Return standard output, also while what others print goes elsewhere."""
    return _OWN.get() or sys.stdout


@contextmanager
def _json_alone() -> Iterator[None]:
    """Keep what plugins and libraries print out of the standard output of a command with --json.

    Commands are not known before plugins are imported, which may print as well.
    """
    if "--json" not in sys.argv:
        yield
        return
    before = _OWN.set(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _OWN.reset(before)


def plain(text: str) -> str:
    """Return text as a console shows it: neither markup nor control characters, whoever wrote the file it is from."""
    from gradaudit.report.terminal import harmless

    return escape(harmless(text))


def main() -> NoReturn:
    """Run the program; every expected error is one sentence on standard error."""
    code: int | None = ExitCode.BAD_INPUT
    try:
        with _json_alone():
            code = app(standalone_mode=False)
        if code == _INTERRUPTED:
            err.print("interrupted")
            code = ExitCode.INCONCLUSIVE
    except SystemExit as stop:  # whoever read the output went away: with 1, which says that a threshold was crossed
        code = ExitCode.INCONCLUSIVE if stop.code else 0
    except click.ClickException as problem:
        if "Did you mean" in problem.message:  # typer says what was meant, and click from 8.4 on would again
            setattr(problem, "possibilities", None)  # noqa: B010 - older ones have none
        problem.show()
    except BrokenDownError as problem:
        err.print(f"[red]inconclusive:[/red] {plain(str(problem))}")
        code = ExitCode.INCONCLUSIVE
    except AuditError as problem:
        what = "not supported" if isinstance(problem, NotSupportedError) else "error"
        err.print(f"[red]{what}:[/red] {plain(str(problem))}")
    except OSError as problem:
        err.print(f"[red]error:[/red] {plain(problem.strerror or str(problem))}: {plain(str(problem.filename or ''))}")
    except MemoryError:
        err.print("[red]error:[/red] not enough memory; see 'gradaudit check' for what a case needs")
    except (KeyboardInterrupt, click.exceptions.Abort):
        err.print("interrupted")
        code = ExitCode.INCONCLUSIVE
    except Exception:  # a bug: say where, and never with the status of a crossed threshold
        err.print_exception()
        err.print("[red]this is a bug in gradaudit or in a plugin; nothing that was finished is lost[/red]")
        code = ExitCode.BROKEN
    except BaseException as problem:
        if type(problem).__name__ != "PanicException":  # of a Rust library, and no `Exception`
            raise
        err.print(f"[red]error:[/red] a library broke down on what it was given: {plain(str(problem))}")
    sys.exit(int(code or 0))
