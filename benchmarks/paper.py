"""Run published settings and print a table: the paper's value, ours, its interval, the blind baseline, the reason.

    OMP_NUM_THREADS=1 python benchmarks/paper.py cases/dager-*.toml --write benchmarks/results/dager.md

Each case is a file in cases/ with a [published] table. Records go to --out (one folder a case; a run that was stopped
goes on there) and hold no text. Failures count 0. The table states the command, machine and versions that made it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from grid import made, options
from rich.console import Console

from gradaudit.audit.info import run_info
from gradaudit.audit.prepare import pick_device, prepare
from gradaudit.audit.run import run
from gradaudit.case import Case, load_case
from gradaudit.leakage.matching.compiled import compiling
from gradaudit.machine import ready_process
from gradaudit.metrics.summary import interval, summarize
from gradaudit.progress import step
from gradaudit.record import Interval, Record, RunInfo, Summary
from gradaudit.report.terminal import progress_bars

SHOWN = ("rouge1", "rouge2", "rougeL", "token_accuracy", "exact")


def cell(value: Interval | None) -> str:
    """Return mean and interval of a score."""
    if value is None or value.mean is None:
        return "-"
    if value.low is None or value.low == value.high:
        return f"{value.mean:.1f}"
    return f"{value.mean:.1f} ({value.low:.1f}-{value.high:.1f})"


def run_case(path: Path, out: Path, device: torch.device, most: int = 0) -> tuple[Case, RunInfo, list[Record]]:
    """Run one case, or what is missing of it, up to so many batches; 0 for all."""
    case = load_case(path)
    ready = prepare(case, path.resolve().parent, device)
    records = []
    for record in run(ready, out / path.stem):
        records.append(record)
        step(f"{path.stem}: batches", len(records), len(ready.batches))
        if len(records) == most:
            break
    return case, run_info(ready), records


def rows_of(case: Case, summary: Summary, records: list[Record]) -> list[str]:
    """Return the table rows of one case: the paper's, ours, blind, and ours in the papers' scorings."""
    rows = []
    said = case.published
    if said is not None:
        known = [said.rouge1, said.rouge2, said.rougeL, None, None]
        seconds = "" if said.seconds is None else f"{said.seconds:g}"
        rows.append(f"| published | {' | '.join('-' if v is None else f'{v:g}' for v in known)} | {seconds} |")
    ours = " | ".join(cell(summary.scores[name]) for name in SHOWN)
    rows.append(f"| **ours** | {ours} | {summary.seconds:.2f} |")
    rows.append(f"| blind | {' | '.join(cell(summary.baseline[name]) for name in SHOWN)} | |")
    for name in sorted({n for r in records for n in r.published}):
        cells = [cell(interval([r.published[name].get(key) for r in records])) for key in SHOWN[:3]]
        rows.append(f"| ours, scored {name} | {' | '.join(cells)} | - | - | |")
    return rows


def certified(records: list[Record]) -> str:
    """Return how many sentences are proven, and whether any proven one is wrong."""
    sentences = [s for r in records for s in r.sentences]
    proven = [s for s in sentences if s.certificate == "proven"]
    exact = sum(s.exact for s in sentences)
    wrong = sum(not s.exact for s in proven)
    slowest = max(r.seconds for r in records)
    return (
        f"Sentences {len(sentences)}: exact {exact}, proven {len(proven)} ({100 * len(proven) / len(sentences):.1f}%), "
        f"**proven and wrong {wrong}**. Slowest batch {slowest:.1f} s."
    )


def section(path: Path, case: Case, info: RunInfo, records: list[Record]) -> str:
    """Return the Markdown section of one case."""
    summary = summarize(records)[0]
    loads, tokens = [r.load for r in records], [r.tokens for r in records]
    lines = [
        f"## {path.stem}",
        "",
        f"{info.model['title']} (d = {info.model['width']}), {Path(info.data['where']).name}, {summary.n} "
        f"batches of {case.data.batch_size}, {next(iter(info.settings.values()))}. "
        f"Tokens a batch {min(tokens)} to {max(tokens)}. Load b/d {min(loads):.2f} to {max(loads):.2f}. "
        f"Failed batches: {summary.failed} (counted 0). Given to the attacker: "
        + ", ".join(k for k in records[0].knowledge if k not in ("selection", "update"))
        + f". Tensors: {case.selection.tensors}.",
        "",
        "| | ROUGE-1 | ROUGE-2 | ROUGE-L | token accuracy | exact sentences | median s a batch |",
        "|---|---|---|---|---|---|---|",
        *rows_of(case, summary, records),
        "",
    ]
    if case.published is not None:
        lines += [f"Published: {case.published.source}.", f"Difference: {case.published.note}.", ""]
    diagnoses = [r.diagnosis.verdict for r in records if r.diagnosis is not None]
    if diagnoses:
        counts = {v: diagnoses.count(v) for v in dict.fromkeys(diagnoses)}
        lines += ["Diagnosis: " + ", ".join(f"{v} {n}" for v, n in counts.items()) + ".", ""]
    if any(r.certificates for r in records):
        lines += [certified(records), ""]
    lines += [f"Case {info.case}, weights {info.model['fingerprint'][:12]}, data {info.data['sha256'][:12]}.", ""]
    return "\n".join(lines)


def main() -> None:
    """Run the cases and print, or write, their tables."""
    parser = options(__doc__)
    parser.add_argument("cases", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder for the records")
    parser.add_argument("--write", type=Path, default=None, help="Markdown file for the table")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batches", type=int, default=0, help="stop each case after so many; 0 for all")
    parser.add_argument("--compile", action="store_true", help="compile the steps of a matching attack")
    given = parser.parse_args()
    ready_process()  # as the program does
    device = pick_device(given.device)
    parts = []
    with progress_bars(Console(stderr=True)), compiling(given.compile):
        for path in given.cases:
            case, info, records = run_case(path, given.out, device, given.batches)
            parts.append(section(path, case, info, records))
    head = f"{made(device)}\n\n"
    text = head + "\n".join(parts)
    if given.write is not None:
        given.write.parent.mkdir(parents=True, exist_ok=True)
        given.write.write_text(text, encoding="utf8")
    print(text)


if __name__ == "__main__":
    main()
