"""Certificates against decoys, with the truth at hand: how many wrong sentences would be called proven.

    OMP_NUM_THREADS=1 python benchmarks/exact_decoding_decoys.py --write benchmarks/results/exact-decoding/decoys.md

Dropout on: one row of a right sentence exchanged for another sentence's at the same position, with all rows known and
with four of a third sentence withheld. Dropout off: a right sentence with one token exchanged for another word of the
batch, and sentences of other batches (swap control).
"""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from grid import OFF, PRACTICAL, Cell, made, options

from gradaudit.audit.batch import sent
from gradaudit.audit.prepare import Prepared, pick_device, prepare, private_batch
from gradaudit.case import parse_case
from gradaudit.leakage.decoding.rows import MaskedInputs, Search, find_rows, look_harder
from gradaudit.leakage.decoding.sentences import CLOSED, DecodedRows
from gradaudit.leakage.decoding.taking_out import take_out
from gradaudit.leakage.rowspace.deflation import matrices, remainder
from gradaudit.leakage.rowspace.subspace import span
from gradaudit.machine import ready_process
from gradaudit.streams import stream


def masked(ready: Prepared, number: int, most: int, lost: int = 0) -> list[float]:
    """Return what decoys of one batch leave unexplained, dropout on.

    Args:
        ready: the prepared case.
        number: which batch.
        most: decoys at most.
        lost: rows of one sentence that are withheld, as if they had not been decoded; decoys are made of the others.
    """
    batch = private_batch(ready, number)
    _, seen = sent(ready, batch, number)
    first = span(seen, 0)
    assert first is not None
    inputs = MaskedInputs(ready.model, first)
    how, rng = Search(len(batch.ids), 200, 512), stream(0, "decoys", number)
    rows = find_rows(inputs, how, rng)
    for effort in (1, 2, 4):
        if len(rows) < first.rank:
            rows = look_harder(inputs, how, rows, effort, rng)
    if len(rows) < first.rank:
        return []
    decoded = DecodedRows(seen, inputs, rows)
    parts = decoded.signals()
    assert parts is not None
    sentences = [tuple(s) for s in batch.sequences()]
    # which row is whose: the only partition that leaves nothing unexplained is the right one
    groups = decoded.link(parts).groups
    if lost:
        gone = set(max(groups, key=len)[:lost])
        kept = [i for i in range(len(rows)) if i not in gone]
        groups = [[kept.index(i) for i in g] for g in groups if not gone & set(g)]
        rows = [rows[i] for i in kept]
        parts = DecodedRows(seen, inputs, rows).signals()
        assert parts is not None
    left = []
    for one, other in itertools.permutations(groups, 2):
        for at, row in enumerate(one):
            same = [i for i in other if rows[i].position == rows[row].position and rows[i].token != rows[row].token]
            if same:
                decoy = torch.tensor([*one[:at], same[0], *one[at + 1 :]])
                assert tuple(rows[i].token for i in decoy.tolist()) not in sentences
                left.append(float(parts.left(decoy)[0].max()))
    return left[:: max(1, len(left) // most)][:most]


def plain(ready: Prepared, number: int, most: int) -> list[bool]:
    """Return which decoys of one batch would be proven, dropout off."""
    batch, other = private_batch(ready, number), private_batch(ready, (number + 1) % len(ready.batches))
    _, seen = sent(ready, batch, number)
    rest = remainder(matrices(seen, 3), torch.finfo(torch.float32).eps)
    right = [tuple(s) for s in batch.sequences()]
    words = sorted({t for s in right for t in s[1:-1]})
    decoys = [tuple(s) for s in other.sequences()]
    for at, sentence in enumerate(itertools.islice(itertools.cycle(right), most)):
        place = 1 + at % (len(sentence) - 2)
        word = words[(7 * at) % len(words)]
        decoys.append((*sentence[:place], word, *sentence[place + 1 :]))
    said = []
    for decoy in [d for d in decoys if d not in right][:most]:
        taken = take_out(ready.model, rest, decoy, [len(right)], [1, 2])
        said.append(taken is not None and taken.proven)
    return said


def main() -> None:
    """Run the decoys and write the counts."""
    parser = options(__doc__)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--each", type=int, default=14, help="decoys a batch and setting")
    parser.add_argument("--write", type=Path, default=None)
    given = parser.parse_args()
    ready_process()
    device = pick_device("cpu")
    on = prepare(parse_case(Cell("cola", 4, given.batches, PRACTICAL).case()), Path.cwd(), device)
    off = prepare(parse_case(Cell("cola", 4, given.batches, OFF).case()), Path.cwd(), device, on.model)
    numbers = range(given.batches)
    left = [value for number in numbers for value in masked(on, number, given.each)]
    some = [value for number in numbers for value in masked(on, number, given.each, lost=4)]
    said = [value for number in numbers for value in plain(off, number, given.each)]
    text = (
        f"{made()} MiniLM, CoLA, batches of 4.\n\n"
        "| setting | decoys | called proven | nearest to being proven |\n|---|---|---|---|\n"
        f"| dropout on: one row exchanged | {len(left)} | {sum(v < CLOSED for v in left)} "
        f"| {min(left):.1e} unexplained, limit {CLOSED:.0e} |\n"
        f"| the same, four rows of a third sentence not decoded | {len(some)} | {sum(v < CLOSED for v in some)} "
        f"| {min(some):.1e} unexplained, limit {CLOSED:.0e} |\n"
        f"| dropout off: one token exchanged, sentences of another batch | {len(said)} | {sum(said)} | |\n"
    )
    print(text)
    if given.write is not None:
        given.write.write_text(text, encoding="utf8")


if __name__ == "__main__":
    main()
