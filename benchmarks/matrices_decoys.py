"""Proofs from one matrix against decoys, with the truth at hand: how many wrong sentences would be called proven.

    OMP_NUM_THREADS=1 python benchmarks/matrices_decoys.py --write benchmarks/results/exact-decoding/matrices-decoys.md

Decoys of a single right sentence: a word exchanged for the one of the nearest embedding, or for any other; two
neighboring words swapped; the last word left out; another sentence. A decoy is proven where its own gradient under some
label leaves next to nothing of the matrix, as `named` has it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from grid import OFF, Cell, made, options

from gradaudit.audit.batch import sent
from gradaudit.audit.prepare import pick_device, prepare, private_batch
from gradaudit.case import parse_case
from gradaudit.leakage.decoding.explain import LITTLE, explain
from gradaudit.leakage.rowspace.deflation import matrices_of
from gradaudit.machine import ready_process
from gradaudit.models.base import TextModel

DRAW, SENTENCES = 16161, 16
MATRICES = ((0, "q"), (0, "p"), (1, "k"), (2, "v"), (3, "f"), (3, "p"), (4, "q"), (4, "p"))
WORDS = 5
"""Places at which a word is exchanged, for the nearest and for any other."""


def decoys(model: TextModel, right: tuple[int, ...], other: tuple[int, ...], rng: torch.Generator) -> list[list[int]]:
    """Return wrong sentences like a right one."""
    table = torch.nn.functional.normalize(model.word_vectors(), dim=1)
    places = (1 + torch.randperm(len(right) - 2, generator=rng)[:WORDS]).tolist()
    found = [list(other)]
    for place in places:
        near = (table @ table[right[place]]).topk(2).indices.tolist()
        drawn = int(torch.randint(2000, model.vocabulary_size, (1,), generator=rng))
        for word in (next(n for n in near if n != right[place]), drawn):
            found.append([*right[:place], word, *right[place + 1 :]])
        if place + 2 < len(right):
            found.append([*right[:place], right[place + 1], right[place], *right[place + 2 :]])
    found.append([*right[:-2], right[-1]])
    return [one for one in found if tuple(one) != right]


def main() -> None:
    """Try the decoys and write the counts."""
    parser = options(__doc__)
    parser.add_argument("--write", type=Path, default=None)
    given = parser.parse_args()
    ready_process()
    case = Cell("cola", 1, SENTENCES, OFF, seed=DRAW).case()
    ready = prepare(parse_case(case), Path.cwd(), pick_device("cpu"))
    rng = torch.Generator().manual_seed(DRAW)
    own: dict[tuple[int, str], list[float]] = {key: [] for key in MATRICES}
    wrong: dict[tuple[int, str], list[float]] = {key: [] for key in MATRICES}
    texts = [tuple(private_batch(ready, number).sequences()[0]) for number in range(SENTENCES)]
    for number, right in enumerate(texts):
        _, seen = sent(ready, private_batch(ready, number), number)
        some = decoys(ready.model, right, texts[number - 1], rng)
        for key in MATRICES:
            matrix = matrices_of(seen, [key])
            own[key].append(explain(ready.model, [right], matrix, 1.0).left)
            wrong[key] += [explain(ready.model, [tuple(one)], matrix, 1.0).left for one in some]
    lines = [
        f"| {layer}:{role} | {len(wrong[layer, role])} | {sum(left < LITTLE for left in wrong[layer, role])} | "
        f"{min(wrong[layer, role]):.1e} | {max(own[layer, role]):.1e} |"
        for layer, role in MATRICES
    ]
    every = [left for some in wrong.values() for left in some]
    lines.append(
        f"| all | {len(every)} | {sum(left < LITTLE for left in every)} | {min(every):.1e} | "
        f"{max(left for some in own.values() for left in some):.1e} |"
    )
    text = (
        f"{made()} MiniLM, CoLA, {SENTENCES} single sentences of draw {DRAW}, dropout off; proven is what leaves less "
        f"than {LITTLE:.0e}.\n\n| matrix | decoys | called proven | nearest leaves | right ones leave at most |\n"
        "|---|---|---|---|---|\n" + "\n".join(lines) + "\n"
    )
    print(text)
    if given.write is not None:
        given.write.write_text(text, encoding="utf8")


if __name__ == "__main__":
    main()
