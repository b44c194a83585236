"""From updates to the network's inputs: hashed, and scaled bin by bin to what simulated updates have there."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gradaudit.learned.public import Public, ReplaysText
from gradaudit.learned.text.hashing import Hash
from gradaudit.progress import step
from gradaudit.streams import draw_seed, stream

CACHE = 4 << 30
"""Bytes of hashed updates that are kept between epochs at most; with more, updates are simulated anew each epoch."""


@dataclass(frozen=True)
class Hashed:
    """Hashed updates before the noise that is still to come.

    Args:
        values: [n, bins].
        deviations: [n, views] standard deviations of what every entry of a view is still to get; None for none.
    """

    values: Tensor
    deviations: Tensor | None


def hashed(simulation: ReplaysText, hash_: Hash, texts: Public, size: int, rng: torch.Generator) -> Hashed:
    """Return the hashed updates of texts, `size` of them an update, in their order.

    Args:
        simulation: replays the client.
        hash_: of the views that are seen.
        texts: n * size public texts.
        size: sentences an update.
        rng: of the client's defenses and dropout.
    """
    device = texts.ids.device
    groups = len(texts) // size
    out = torch.zeros(groups, hash_.bins, device=device)
    sigmas = torch.zeros(groups, len(hash_.sizes), device=device)
    at = {name: column for column, name in enumerate(hash_.sizes)}
    labels = None if texts.labels is None else texts.labels.view(groups, size)
    shape = (groups, size, texts.ids.shape[1])
    for rows, parts in simulation(texts.ids.view(shape), texts.mask.view(shape), labels, rng):
        for part in parts:
            hash_.add(out[rows], part.name, part.values.float())
            if part.noise is not None:
                sigmas[rows, at[part.name]] = part.noise
    return Hashed(out, sigmas if bool(sigmas.any()) else None)


def noised(found: Hashed, hash_: Hash, rng: torch.Generator) -> Tensor:
    """Return hashed updates [n, bins] with the noise that was still to come.

    A bin of c entries with independent noise of deviation s each gets one draw of deviation s sqrt(c): a sum of normal
    variables is normal, and no two bins share an entry.
    """
    if found.deviations is None:
        return found.values
    counts = hash_.counts(hash_.sizes, found.values.device)
    spread = (found.deviations.square() @ counts).sqrt()
    return found.values + spread * torch.randn(found.values.shape, generator=rng).to(found.values.device)


class SimulatedUpdates:
    """Public updates as inputs, from memory where they stay the same, simulated anew where they do not.

    Args:
        simulation: replays the client.
        hash_: of the views that are seen.
        texts: public texts, whole updates of them.
        size: sentences an update.
        rng: of everything that is drawn.
        what: name for the progress bar.
    """

    def __init__(
        self, simulation: ReplaysText, hash_: Hash, texts: Public, size: int, rng: torch.Generator, what: str
    ) -> None:
        self.simulation, self.hash, self.texts, self.size = simulation, hash_, texts, size
        self._seed = draw_seed(rng)
        self._kept: Hashed | None = None
        if not simulation.random and len(self) * hash_.bins * 2 <= CACHE:
            self._kept = self._computed(what)

    def __len__(self) -> int:
        return len(self.texts) // self.size

    def _computed(self, what: str) -> Hashed:
        # half precision: hashed sums are inputs of a network, and twice as many fit
        values = torch.zeros(len(self), self.hash.bins, dtype=torch.float16)
        deviations: list[Tensor] = []
        self.unit = 1.0
        for start in range(0, len(self), 256):
            some = torch.arange(start, min(start + 256, len(self)))
            found = hashed(self.simulation, self.hash, self._texts(some), self.size, stream(self._seed, "kept", start))
            if start == 0:
                self.unit = float(found.values.std().clamp_min(1e-30))
            values[start : start + 256] = (found.values / self.unit).clamp(-6e4, 6e4).cpu().half()
            if found.deviations is not None:
                deviations.append(found.deviations.cpu())
            step(what, int(some[-1]) + 1, len(self))
        return Hashed(values, torch.cat(deviations) if deviations else None)

    def _texts(self, updates: Tensor) -> Public:
        return self.texts.take((updates[:, None] * self.size + torch.arange(self.size)).flatten())

    def __call__(self, updates: Tensor, turn: int) -> tuple[Tensor, Public]:
        """Return hashed updates [n, bins], noise included, and their texts [n * size, T].

        Args:
            updates: [n] numbers of updates.
            turn: another one gives fresh noise.
        """
        texts = self._texts(updates)
        rng = stream(self._seed, "turn", turn)
        if self._kept is None:
            return noised(hashed(self.simulation, self.hash, texts, self.size, rng), self.hash, rng), texts
        device = texts.ids.device
        sigmas = None if self._kept.deviations is None else self._kept.deviations[updates].to(device)
        found = Hashed(self._kept.values[updates].to(device).float() * self.unit, sigmas)
        return noised(found, self.hash, rng), texts


def sizes_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Return the entries of tensors by name."""
    return {name: int(torch.Size(shape).numel()) for name, shape in shapes.items()}
