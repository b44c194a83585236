"""Token obfuscation: the client trains on other words than its text has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import ClassVar

import torch
from torch import Tensor

from gradaudit.defenses.base import BatchDefense
from gradaudit.errors import BadInputError
from gradaudit.models.base import TextModel
from gradaudit.registry import hyper, register
from gradaudit.types import Batch

_LOOKED_AT = 256
"""Nearest tokens among which a word's stand-ins are sought."""
_RELATED = 0.6
"""Spellings that share so much are forms of one word ("walks", "walked")."""


@register
@dataclass(frozen=True)
class TokenObfuscation(BatchDefense):
    """Train on stand-ins: near each word for the model, another word for a reader.

    A stand-in is one of the tokens whose vectors are nearest by cosine, but not so near that it means the same
    (`alike`), nor of a related spelling. Of some of them the one is taken that changes the model's output least, word
    by word from the left. Labels, lengths and special tokens stay. What an attack reads exactly is then the text of
    stand-ins. Who knows the model knows the nearest tokens of every stand-in, so a reader may guess back.

    Raises:
        BadInputError: a parameter outside its range.
    """

    name: ClassVar[str] = "token-obfuscation"
    candidates: int = hyper(8, "stand-ins tried for each word", source="ours, after GHOST (arXiv 2602.15897)")
    alike: float = hyper(
        0.6, "largest cosine of a word and its stand-in: beyond it they mean the same", source="ours, as above"
    )
    share: float = hyper(1.0, "share of the words that are replaced, drawn at random", source="ours")

    def __post_init__(self) -> None:
        if self.candidates < 1:
            raise BadInputError(f"defense '{self.name}': candidates must be at least 1, got {self.candidates}")
        if not 0 < self.alike <= 1:
            raise BadInputError(f"defense '{self.name}': alike must be above 0 and at most 1, got {self.alike}")
        if not 0 < self.share <= 1:
            raise BadInputError(f"defense '{self.name}': share must be above 0 and at most 1, got {self.share}")

    @torch.no_grad()
    def on_batch(self, model: TextModel, batch: Batch, rng: torch.Generator) -> Batch:
        device = model.word_vectors().device
        ids, mask = batch.ids.to(device), batch.mask.to(device)
        plain = model.logits(ids=ids, mask=mask)
        special = torch.tensor(sorted(model.special.ids), device=device)
        free = mask & ~torch.isin(ids, special)
        free &= (torch.rand(batch.ids.shape, generator=rng) < self.share).to(device)
        standing = {word: self._stand_ins(model, word) for word in sorted(set(ids[free].tolist()))}
        out = ids.clone()
        for slot in torch.where(free.any(0))[0].tolist():
            rows = [r for r in torch.where(free[:, slot])[0].tolist() if standing[int(ids[r, slot])]]
            tried = [(row, word) for row in rows for word in standing[int(ids[row, slot])]]
            if not tried:
                continue
            at = torch.tensor([row for row, _ in tried], device=device)
            every = out[at]
            every[:, slot] = torch.tensor([word for _, word in tried], device=device)
            away = (model.logits(ids=every, mask=mask[at]) - plain[at]).flatten(1).square().sum(1)
            for row in rows:
                mine = torch.where(at == row)[0]
                out[row, slot] = every[mine[away[mine].argmin()], slot]
        return replace(batch, ids=out.to(batch.ids.device))

    def _stand_ins(self, model: TextModel, word: int) -> list[int]:
        """Return a word's stand-ins, nearest first; none where all that is near means or spells the same."""
        table = model.word_vectors()
        like = torch.nn.functional.cosine_similarity(table, table[word][None])
        near: Tensor = torch.where(like <= self.alike, like, -torch.inf)
        found: list[int] = []
        pieces = model.pieces([word])
        for other in near.topk(min(_LOOKED_AT, len(table))).indices.tolist():
            if other in model.special.ids or not model.content([other]):
                continue
            if not _related(pieces, model.pieces([other])):
                found.append(other)
                if len(found) == self.candidates:
                    break
        return found


def _related(one: Sequence[str], other: Sequence[str]) -> bool:
    """Say whether two tokens are spelled as forms of one word, or one is a part of the other."""
    a, b = ("".join(c for c in "".join(part).lower() if c.isalnum()) for part in (one, other))
    if not a or not b:
        return a == b
    return a in b or b in a or SequenceMatcher(None, a, b).ratio() > _RELATED
