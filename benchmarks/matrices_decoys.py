"""Proofs from one matrix against decoys, with the truth at hand: how many wrong sentences would be called proven.

    OMP_NUM_THREADS=1 python benchmarks/matrices_decoys.py --write benchmarks/results/exact-decoding/matrices-decoys.md

Decoys of a single right sentence: a word exchanged for the one of the nearest embedding, or for any other; two
neighboring words swapped; the last word left out; another sentence. A decoy is proven where its own gradient under some
label leaves next to nothing of the matrix, as `named` has it. Then decoys of four sentences in one of block 0's
matrices, words of the others in their places among them: such a one is proven by the rank's fall, as `take_out` has it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from grid import OFF, Cell, made, options

from gradaudit.audit.batch import sent
from gradaudit.audit.prepare import pick_device, prepare, private_batch
from gradaudit.case import parse_case
from gradaudit.leakage.decoding.explain import LITTLE, explain
from gradaudit.leakage.decoding.taking_out import take_out
from gradaudit.leakage.rowspace.deflation import matrices_of, remainder
from gradaudit.machine import ready_process
from gradaudit.models.base import TextModel

DRAW, SENTENCES = 16161, 16
MATRICES = ((0, "q"), (0, "p"), (1, "k"), (2, "v"), (3, "f"), (3, "p"), (4, "q"), (4, "p"))
BATCH_DRAW, SIZE, BATCHES = 29292, 4, 2
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


def crossed(right: tuple[int, ...], others: list[tuple[int, ...]]) -> list[list[int]]:
    """Return a sentence with each word of others in its place, and with all of another's words from a place on."""
    found = []
    for other in others:
        for place in range(1, min(len(right), len(other)) - 1):
            if right[place] != other[place]:
                found += [[*right[:place], other[place], *right[place + 1 :]], [*right[:place], *other[place:]]]
    return found


def in_batches() -> str:
    """Return a table of decoys of batches that the rank of one of block 0's matrices is asked about."""
    ready = prepare(
        parse_case(Cell("cola", SIZE, BATCHES, OFF, seed=BATCH_DRAW).case()), Path.cwd(), pick_device("cpu")
    )
    rng = torch.Generator().manual_seed(BATCH_DRAW)
    counts = {role: [0] * 4 for role in "qkv"}
    for number in range(BATCHES):
        batch = private_batch(ready, number)
        texts = [tuple(sentence) for sentence in batch.sequences()]
        _, seen = sent(ready, batch, number)
        for role in "qkv":
            sent_matrix = matrices_of(seen, [(0, role)])
            rest = remainder(sent_matrix, torch.finfo(torch.float32).eps)
            for at, right in enumerate(texts):
                others = [one for one in texts if one != right]
                tried = [*decoys(ready.model, right, texts[at - 1], rng), *crossed(right, others)]
                wrong = {tuple(one) for one in tried} - set(texts)
                taken = [take_out(ready.model, rest, one, [1 / SIZE], [0]) for one in sorted(wrong)]
                own = take_out(ready.model, rest, right, [1 / SIZE], [0])
                new = (
                    len(wrong),
                    sum(one is not None for one in taken),
                    sum(one is not None and one.proven for one in taken),
                )
                counts[role] = [
                    a + b for a, b in zip(counts[role], (*new, own is not None and own.proven), strict=True)
                ]
    lines = [f"| 0:{role} | " + " | ".join(map(str, some)) + " |" for role, some in counts.items()]
    return (
        f"MiniLM, CoLA, {BATCHES} batches of {SIZE} of draw {BATCH_DRAW}, dropout off; proven is what makes the rank "
        "fall by the rows that no other sentence has.\n\n| matrix | decoys | taken out | called proven | right ones "
        f"proven, of {BATCHES * SIZE} |\n|---|---|---|---|---|\n" + "\n".join(lines) + "\n"
    )


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
        "|---|---|---|---|---|\n" + "\n".join(lines) + f"\n\n{in_batches()}"
    )
    print(text)
    if given.write is not None:
        given.write.write_text(text, encoding="utf8")


if __name__ == "__main__":
    main()
