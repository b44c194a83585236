"""Which word stood where, dropout off: right pairs among as many on top, by transport and by a group lasso.

OMP_NUM_THREADS=1 python benchmarks/placing_words.py rt 8 0 1 2
OMP_NUM_THREADS=1 python benchmarks/placing_words.py cola 8 0 1 2 3 4
OMP_NUM_THREADS=1 python benchmarks/placing_words.py rt 8 0 --model mpnet
"""

from __future__ import annotations

from pathlib import Path

import torch
from grid import DATA, OFF, Cell, options

from gradaudit.audit.batch import sent
from gradaudit.audit.prepare import pick_device, prepare, private_batch
from gradaudit.case import parse_case
from gradaudit.leakage.decoding.pairs import Pairs, candidate_pairs, placed_signals, sparse_signals
from gradaudit.leakage.rowspace.deflation import matrices, remainder
from gradaudit.machine import ready_process


def on_top(pairs: Pairs, strength: torch.Tensor, right: set[tuple[int, int]]) -> int:
    """Return how many right pairs are, position by position, among as many on top as are right there."""
    hits = 0
    for position in pairs.positions.unique().tolist():
        at = torch.where(pairs.positions == position)[0]
        many = sum(p == position for p, _ in right)
        top = at[strength[at].argsort(descending=True)][:many]
        hits += sum((position, t) in right for t in pairs.tokens[top].tolist())
    return hits


def main() -> None:
    """Count for some batches."""
    parser = options(__doc__)
    parser.add_argument("data", choices=sorted(DATA))
    parser.add_argument("size", type=int)
    parser.add_argument("batches", type=int, nargs="+", help="which, by number")
    parser.add_argument("--model", default="minilm")
    given = parser.parse_args()
    ready_process()
    data, size, batches = given.data, given.size, given.batches
    cell = Cell(data, size, max(batches) + 1, OFF, given.model)
    ready = prepare(parse_case(cell.case()), Path.cwd(), pick_device("cpu"))
    for number in batches:
        batch = private_batch(ready, number)
        _, seen = sent(ready, batch, number)
        right = {(p, t) for s in batch.sequences() for p, t in enumerate(s)}
        rest = remainder(matrices(seen, 3), torch.finfo(torch.float32).eps)
        first = rest.span(0)
        pairs = candidate_pairs(ready.model, first, 512)
        lasso = sparse_signals(rest.stacked(0), pairs.rows, first.basis)
        placed = placed_signals(ready.model, rest.stacked(0), pairs)
        transport = "-" if placed is None else on_top(pairs, placed.norm(dim=1), right)
        before = on_top(pairs, lasso.norm(dim=1), right)
        print(
            f"{data} B = {size}, batch {number}: b = {batch.tokens}, rank {first.rank}, {len(pairs)} candidates, "
            f"{len(right)} right; on top by group lasso {before}, by transport {transport}",
            flush=True,
        )


if __name__ == "__main__":
    main()
