"""How like the update of a guess of words is to the one that was seen, and which words would make it more so."""

from collections.abc import Mapping

import torch
from torch import Tensor

from gradaudit.defense_traits import Trait, traits_of
from gradaudit.errors import NotSupportedError
from gradaudit.leakage.matching.counters import must_be_whole
from gradaudit.leakage.observed import as_gradient, word_gradient_hidden
from gradaudit.models.views import View
from gradaudit.types import Observation

APPLIED_TO_GUESS: frozenset[Trait] = frozenset({"unit norm", "signs"})
"""Traits of defenses that are applied to the guess's update before it is compared. Pruning is not: the largest
coordinates of a wrong guess are other ones, and the cosine would see nothing of what is right in it."""
_TINY = 1e-30


class Likeness:
    """The cosine, over all tensors together, between a guess's update and the one that was seen.

    The guess's update is scaled, or reduced to its signs, where the attacker was told that the client did so. The word
    table's own gradient is left out: it tells words by themselves, and is read elsewhere.

    Args:
        seen: the observation.
        mask: [B, T] bool, True where a slot holds a token.
        attack: its name, for messages.
        replay: apply defenses to the guess.

    Raises:
        NotSupportedError: nothing but the word table's gradient was seen, a weight change that is no gradient, or
            parts of matrices that the client scaled whole.
    """

    def __init__(self, seen: Observation, mask: Tensor, attack: str, replay: bool = True) -> None:
        self._model, self._mask = seen.model, mask
        hidden = set(word_gradient_hidden(seen))
        self._views: dict[str, View] = {name: view for name, view in seen.views.items() if name not in hidden}
        if not self._views:
            raise NotSupportedError("matching has nothing to match: only word-embedding rows were shared")
        gradients = as_gradient(seen)
        self._observed = {name: gradients[name] for name in self._views}
        self._size = float(torch.stack([t.square().sum() for t in self._observed.values()]).sum().sqrt())
        self._names = sorted({view.parameter for view in self._views.values()})
        told = seen.knowledge.defenses or ()
        self._told = [trait for d in told for trait in sorted(traits_of(d) & APPLIED_TO_GUESS) if replay]
        if "unit norm" in self._told:
            must_be_whole(seen, attack)
        self._table = seen.model.word_vectors().detach()
        self.spent = 0
        """Gradients computed so far."""

    def __call__(self, ids: Tensor, labels: Tensor | None) -> float:
        """Return the likeness of a guess, -1 to 1.

        Args:
            ids: [B, T] token ids.
            labels: [B] classes; None where next words are predicted.
        """
        self.spent += 1
        with torch.enable_grad():
            loss = self._model.loss(ids=ids, mask=self._mask, labels=ids if labels is None else labels)
            made = self._made(loss, graph=False)
        return float(self._cosine(self._defended(made, whole=True)))

    def slopes(self, ids: Tensor, labels: Tensor | None) -> Tensor:
        """Return [B, T, V]: how much the likeness would grow with each word in each slot, to first order.

        Source: HotFlip (Ebrahimi et al., ACL 2018), for the likeness of gradients in place of a loss. A next word is
        both an input and a target, and both count.

        Args:
            ids, labels: as above.
        """
        self.spent += 3  # through the gradient of a gradient
        vectors = self._table[ids].requires_grad_()
        wanted = [vectors]
        targets = labels
        if targets is None:
            targets = torch.nn.functional.one_hot(ids, len(self._table)).to(vectors.dtype).requires_grad_()
            wanted.append(targets)
        with torch.enable_grad():
            loss = self._model.loss(embeddings=vectors, mask=self._mask, labels=targets)
            made = self._made(loss, graph=True)
            value = self._cosine(self._defended(made, whole=False))
            found = torch.autograd.grad(value, wanted)
        slopes: Tensor = found[0] @ self._table.T
        if labels is None:
            slopes = slopes + found[1]
        return slopes - slopes.gather(2, ids[..., None])

    def _made(self, loss: Tensor, graph: bool) -> dict[str, Tensor]:
        """Return the update of a loss by view."""
        parameters = self._model.parameters()
        gradients = torch.autograd.grad(loss, [parameters[name] for name in self._names], create_graph=graph)
        by_name = dict(zip(self._names, gradients, strict=True))
        return {name: view(by_name[view.parameter]) for name, view in self._views.items()}

    def _cosine(self, made: Mapping[str, Tensor]) -> Tensor:
        inner = torch.stack([(made[name] * value).sum() for name, value in self._observed.items()]).sum()
        size = torch.stack([value.square().sum() for value in made.values()]).sum().sqrt()
        return inner / (size * self._size).clamp_min(_TINY)

    def _defended(self, made: dict[str, Tensor], whole: bool) -> dict[str, Tensor]:
        """Return an update as the defenses leave it; signs, which have no slope, only where it is to be `whole`."""
        for trait in self._told:
            if trait == "signs":
                made = {n: t.sign() for n, t in made.items()} if whole else made
            else:
                made = {n: t / t.norm().clamp_min(_TINY) for n, t in made.items()}
        return made
