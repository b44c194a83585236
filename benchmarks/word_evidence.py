"""Are the words taken from noisy gradients as rarely wrong as they are said to be? One row a defense and batch size.

    OMP_NUM_THREADS=1 python benchmarks/word_evidence.py
    OMP_NUM_THREADS=1 python benchmarks/word_evidence.py --data cola --seed 101

Writes benchmarks/results/exact-decoding/words-DATA.md: by default a draw that nothing else uses; the second is the one
that the method was developed on, for comparison with others' numbers on it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from exact_decoding import compressed
from grid import OFF, Cell, made, options
from torch import Tensor

from gradaudit.audit.batch import sent
from gradaudit.audit.prepare import pick_device, prepare, private_batch
from gradaudit.case import parse_case
from gradaudit.leakage.rowspace.ranking import rank_words
from gradaudit.leakage.rowspace.subspace import stack
from gradaudit.machine import ready_process
from gradaudit.models.base import TextModel

LEVELS = (0.01, 0.05, 0.1)
SIZES = {1: 8, 4: 3, 16: 1}
DIRECTIONS = 12
"""Of a sentence, where their number does not show."""
POSITIONS, APART = 24, 4
"""Positions over which a word's share in the span is looked at, and every so many-th of them: as `rank_words` does."""


def main() -> None:
    """Take words at each level, compare with the batch, write the table."""
    parser = options(__doc__)
    parser.add_argument("--data", default="sst2", choices=("cola", "sst2"))
    parser.add_argument("--seed", default=303, type=int)
    chosen = parser.parse_args()
    ready_process()
    model, lines = None, []
    for size, batches in SIZES.items():
        for defense in dict.fromkeys(str(c.defense[0]) for c in compressed()):
            cell = next(c for c in compressed() if str(c.defense[0]) == defense)
            case = Cell(chosen.data, size, batches, OFF, seed=chosen.seed, defense=cell.defense).case()
            ready = prepare(parse_case(case), Path.cwd(), pick_device("auto"), model)
            model = ready.model
            right, taken, there, among = dict.fromkeys(LEVELS, 0), dict.fromkeys(LEVELS, 0), 0, [0, 0]
            for index in range(batches):
                batch = private_batch(ready, index)
                seen = sent(ready, batch, index)[1]
                truth = {token for ids in batch.sequences() for token in model.content(ids)}
                there += len(truth)
                stacked, _ = stack(seen, 0)
                assert stacked is not None
                listed = likeliest_words(model, stacked, 2 * len(truth), size)
                among[0] += len(truth & set(listed[: len(truth)]))
                among[1] += len(truth & set(listed))
                for level in LEVELS:
                    words = {w.token for w in rank_words(model, stacked, min(32 * size, model.width - 1), level)}
                    right[level] += len(words & truth)
                    taken[level] += len(words)
            name = " ".join(str(v) for v in cell.defense[0].values())
            cells = [f"{right[q] / there:.2f}, {1 - right[q] / max(1, taken[q]):.3f}" for q in LEVELS]
            cells.append(f"{among[0] / there:.2f}, {among[1] / there:.2f}")
            lines.append(f"| {name} | {size} | {batches} | {there} | " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
    head = (
        "| defense | B | batches | words | "
        + " | ".join(f"at {q:g}: found, wrong" for q in LEVELS)
        + " | recall at k, 2k |"
    )
    text = (
        f"{made()} MiniLM, {chosen.data}, "
        f"draw {chosen.seed}, dropout off. "
        "Share of the batch's distinct words that were found, and share of the words taken that are not the batch's, "
        "at three false-discovery rates; `decode` takes 0.01. Then the batch's words among as many, and twice as many, "
        "likeliest ones.\n\n" + head + "\n" + "|---" * 8 + "|\n"
    )
    path = Path("benchmarks/results/exact-decoding") / f"words-{chosen.data}.md"
    path.write_text(text + "\n".join(lines) + "\n", encoding="utf8")


@torch.no_grad()
def likeliest_words(model: TextModel, stacked: Tensor, count: int, size: int, level: float = 0.1) -> list[int]:
    """Return so many words, likeliest first: what the pursuit takes, then the others by their share in the span.

    Where few coordinates were sent the pursuit stops early, having misjudged a word and taken its direction out of the
    others; the plain order has then more of the batch's words among twice as many.

    Args:
        model: the model.
        stacked: as `rank_words` has it.
        count: how many.
        size: sentences of the batch; so many times 12 directions are taken for the batch's.
        level: false-discovery rate up to which the pursuit is followed.
    """
    taken = [word.token for word in rank_words(model, stacked, count, level)]
    _, _, vh = torch.linalg.svd(stacked, full_matrices=False)
    span = vh[: min(DIRECTIONS * size, len(vh) // 2)]
    share = torch.zeros(model.vocabulary_size, device=stacked.device)
    for position in range(0, min(POSITIONS, model.max_length) if model.absolute_positions else 1, APART):
        rows = model.first_inputs(position)
        rows = rows - rows.mean(0)
        inside = (rows @ span.T.to(rows)).square().sum(1) / rows.square().sum(1).clamp_min(1e-30)
        share = torch.maximum(share, inside)
    share[sorted({*model.special.ids, *taken})] = -1.0
    return [*taken, *share.topk(max(0, count - len(taken))).indices.tolist()]


if __name__ == "__main__":
    main()
