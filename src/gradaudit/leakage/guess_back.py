"""From stand-ins back to words, for an attacker who was told that the client trained on stand-ins."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gradaudit.leakage.priors import usual_places
from gradaudit.models.base import TextModel
from gradaudit.models.neighbors import stand_ins, stood_for
from gradaudit.progress import track
from gradaudit.types import Reconstruction


def guess_back(model: TextModel, found: Reconstruction, told: Mapping[str, Any]) -> Reconstruction:
    """Return what was read with every stand-in replaced by the likeliest of the words that it may stand for.

    Ours. Who has the model has its word vectors, and so the list of words that a token may stand for: about ten on
    MiniLM, the right one always among them. Of these the most usual one is taken.

    Args:
        model: the public model.
        found: what an attack read, stand-ins.
        told: the defense's fields.
    """
    candidates, alike, share = int(told["candidates"]), float(told["alike"]), float(told["share"])
    special = model.special.ids
    read = sorted({token for sequence in found.sequences for token in sequence if token not in special})
    if not read:
        return found
    places = usual_places(model)
    back = {}
    for token in track(read, "guessing back"):
        # a word stays what it is where it was not drawn, and where it has no stand-in
        stays = 1 - share if stand_ins(model, token, candidates, alike) else 1.0
        likely = {token: stays / (places[token] + 1)}
        for word, others in stood_for(model, token, candidates, alike).items():
            likely[word] = share / others / (places[word] + 1)
        back[token] = max(likely, key=lambda word: likely[word])
    sequences = tuple(tuple(back.get(token, token) for token in sequence) for sequence in found.sequences)
    changed = sum(back.get(token, token) != token for sequence in found.sequences for token in sequence)
    note = f"{changed} words read are stand-ins: each was replaced by the most usual word that it may stand for"
    certificates = None if found.certificates is None else ("guess",) * len(sequences)
    return replace(
        found,
        sequences=sequences,
        certificates=certificates,
        notes=(*found.notes, note),
        details={**found.details, "guessed_back": changed},
    )
