"""Token obfuscation: the client trains on other words than its text has."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from gradaudit.defense_traits import Trait
from gradaudit.defenses.base import BatchDefense
from gradaudit.errors import BadInputError
from gradaudit.models.base import TextModel
from gradaudit.models.neighbors import stand_ins
from gradaudit.registry import hyper, register
from gradaudit.types import Batch


@register
@dataclass(frozen=True)
class TokenObfuscation(BatchDefense):
    """Train on stand-ins: near each word for the model, another word for a reader.

    A stand-in is one of the tokens whose vectors are nearest by cosine, but not so near as synonyms are (`alike`), nor
    of a related spelling. Of some of them the one is taken that changes the model's output least, word by word from
    the left. Labels, lengths and special tokens stay. What an attack reads exactly is then the text of stand-ins. The
    topic remains ("dog" may become "rodents"), which scores of words do not see, and who knows the model knows the
    nearest tokens of every stand-in: attacks that are told of the defense guess back.

    Raises:
        BadInputError: a parameter outside its range.
    """

    name: ClassVar[str] = "token-obfuscation"
    traits: ClassVar[frozenset[Trait]] = frozenset({"stand-ins"})
    candidates: int = hyper(8, "stand-ins tried for each word", source="ours, after GHOST (arXiv 2602.15897)")
    alike: float = hyper(
        0.25,
        "largest cosine of a word and its stand-in",
        source="ours: on MiniLM synonyms remain at 0.35 (king: ruler), the topic at 0.25 (king: edward, chess)",
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
        words_in = sorted(set(ids[free].tolist()))
        standing = {word: stand_ins(model, word, self.candidates, self.alike) for word in words_in}
        out = ids.clone()
        for slot in torch.where(free.any(0))[0].tolist():
            for row in torch.where(free[:, slot])[0].tolist():
                words = standing[int(ids[row, slot])]
                if not words:
                    continue
                every = out[row].repeat(len(words), 1)
                every[:, slot] = torch.tensor(words, device=device)
                shown = mask[row].expand(len(words), -1)
                away = model.logits(ids=every, mask=shown) - plain[row]
                if away.dim() == 3:  # next words: what follows padding is nobody's
                    away = away * shown[..., None]
                out[row, slot] = words[int(away.flatten(1).square().sum(1).argmin())]
        return replace(batch, ids=out.to(batch.ids.device))
