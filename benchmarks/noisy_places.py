"""Where one sentence's words stood, from a noisy or compressed gradient: words at their place, their number given.

OMP_NUM_THREADS=1 python benchmarks/noisy_places.py 20
"""

from __future__ import annotations

from pathlib import Path

from grid import OFF, PRACTICAL, Cell, options

from gradaudit.audit.batch import sent
from gradaudit.audit.prepare import pick_device, prepare, private_batch
from gradaudit.case import parse_case
from gradaudit.leakage.decoding.order import arrange, likely_places
from gradaudit.leakage.rowspace.subspace import stack
from gradaudit.machine import ready_process

DEFENSES = (
    {"name": "normalized-gaussian", "sigma": 1e-3},
    {"name": "normalized-gaussian", "sigma": 1e-2},
    {"name": "sign"},
    {"name": "topk", "keep": 0.1},
    {"name": "random-pruning", "rate": 0.75},
    {"name": "random-pruning", "rate": 0.9},
    {"name": "random-pruning", "rate": 0.99},
)


def main() -> None:
    """Print the share of words at their place, dropout off and on."""
    parser = options(__doc__)
    parser.add_argument("batches", type=int)
    given = parser.parse_args()
    ready_process()
    print("| defense | dropout off | dropout on |\n|---|---|---|")
    for defense in DEFENSES:
        shares = []
        for client in (OFF, PRACTICAL):
            cell = Cell("cola", 1, given.batches, client, defense=(defense,), seed=5051)
            ready = prepare(parse_case(cell.case()), Path.cwd(), pick_device("cpu"))
            right = every = 0
            for number in range(given.batches):
                batch = private_batch(ready, number)
                stacked, _ = stack(sent(ready, batch, number)[1], 0)
                assert stacked is not None
                inner = list(batch.sequences()[0])[1:-1]
                words = sorted(set(inner))
                found = arrange(likely_places(ready.model, stacked, words, range(1, len(inner) + 1)), words)
                right += sum(a == b for a, b in zip(found, inner, strict=True))
                every += len(inner)
            shares.append(f"{100 * right / every:.0f}%")
        print(f"| {' '.join(str(v) for v in defense.values())} | {' | '.join(shares)} |", flush=True)


if __name__ == "__main__":
    main()
