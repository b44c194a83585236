"""Are the words taken from noisy gradients as rarely wrong as they are said to be? One row a defense and batch size.

    OMP_NUM_THREADS=1 python benchmarks/word_evidence.py

Writes benchmarks/results/exact-decoding/words.md. A draw that nothing else uses.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from exact_decoding import OFF, Cell, commit, compressed

from gradaudit.audit import pick_device, prepare, private_batch, sent
from gradaudit.case import parse_case
from gradaudit.leakage.ranking import rank_words
from gradaudit.leakage.subspace import stack

LEVELS = (0.01, 0.05, 0.1)
SIZES = {1: 8, 4: 3, 16: 1}


def main() -> None:
    """Take words at each level, compare with the batch, write the table."""
    code, model, lines = commit(), None, []
    for size, batches in SIZES.items():
        for defense in dict.fromkeys(str(c.defense[0]) for c in compressed()):
            cell = next(c for c in compressed() if str(c.defense[0]) == defense)
            case = Cell("sst2", size, batches, OFF, seed=303, defense=cell.defense).case()
            ready = prepare(parse_case(case), Path.cwd(), pick_device("auto"), model)
            model = ready.model
            right, taken, there = dict.fromkeys(LEVELS, 0), dict.fromkeys(LEVELS, 0), 0
            for index in range(batches):
                batch = private_batch(ready, index)
                seen = sent(ready, batch, index)[1]
                truth = {token for ids in batch.sequences() for token in model.content(ids)}
                there += len(truth)
                stacked, _ = stack(seen, 0)
                assert stacked is not None
                for level in LEVELS:
                    words = {w.token for w in rank_words(model, stacked, min(32 * size, model.width - 1), level)}
                    right[level] += len(words & truth)
                    taken[level] += len(words)
            name = " ".join(str(v) for v in cell.defense[0].values())
            cells = [f"{right[q] / there:.2f}, {1 - right[q] / max(1, taken[q]):.3f}" for q in LEVELS]
            lines.append(f"| {name} | {size} | {batches} | {there} | " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
    head = "| defense | B | batches | words | " + " | ".join(f"at {q:g}: found, wrong" for q in LEVELS) + " |"
    text = (
        f"Made by `OMP_NUM_THREADS=1 python {shlex.join(sys.argv)}` (commit {code}). MiniLM, SST-2, dropout off. "
        "Share of the batch's distinct words that were found, and share of the words taken that are not the batch's, "
        "at three false-discovery rates; `decode` takes 0.01.\n\n" + head + "\n" + "|---" * 7 + "|\n"
    )
    path = Path("benchmarks/results/exact-decoding/words.md")
    path.write_text(text + "\n".join(lines) + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
