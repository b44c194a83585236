"""How like the update of a guess of words is to the one that was seen, and which words would make it more so."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.func import grad, vmap

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
_NUMBERS, _MANY, _FEW = 2**26, 64, 8
"""Numbers that are held at once, 256 MiB of them, and guesses, at most; of fewer than the last number one after the
other is faster. A guess of 12 tokens takes 3.6 ms of the head of MiniLM (one by one 13), 8 of its biases and norms
(28), and of all blocks 39 in sixes (30)."""
_A_BLOCK = 16
"""Rows of the model's width that a block keeps of a token for its gradient, about: the feed-forward's four twice, and
eight more."""


class Likeness:
    """The cosine, over all tensors together, between a guess's update and the one that was seen.

    The guess's update is scaled, or reduced to its signs, where the attacker was told that the client did so. The word
    table's own gradient is left out: it tells words by themselves, and is read elsewhere. Guesses are judged many at
    once: those of MiniLM's head take a quarter of the time that one after the other takes.

    Args:
        seen: the observation.
        attack: its name, for messages.
        replay: apply defenses to the guess.

    Raises:
        NotSupportedError: nothing but the word table's gradient was seen, a weight change that is no gradient, or
            parts of matrices that the client scaled whole.
    """

    def __init__(self, seen: Observation, attack: str, replay: bool = True) -> None:
        self._model = seen.model
        hidden = set(word_gradient_hidden(seen))
        self._views: dict[str, View] = {name: view for name, view in seen.views.items() if name not in hidden}
        if not self._views:
            raise NotSupportedError("matching has nothing to match: only word-embedding rows were shared")
        gradients = as_gradient(seen)
        self._observed = {name: gradients[name] for name in self._views}
        self._size = float(torch.stack([t.square().sum() for t in self._observed.values()]).sum().sqrt())
        parameters = seen.model.parameters()
        self._parameters = {v.parameter: parameters[v.parameter].detach() for v in self._views.values()}
        self._numbers = sum(p.numel() for p in self._parameters.values())
        blocks = _A_BLOCK * seen.model.width * seen.model.depth
        self._a_token = blocks + (seen.model.vocabulary_size if seen.model.spec.task == "causal-lm" else 0)
        told = seen.knowledge.defenses or ()
        self._told = [trait for d in told for trait in sorted(traits_of(d) & APPLIED_TO_GUESS) if replay]
        if "unit norm" in self._told:
            must_be_whole(seen, attack)
        self.table = seen.model.word_vectors().detach()
        """[V, d] word vectors."""
        self.spent = 0
        """Gradients computed so far."""

    def __call__(self, ids: Tensor, mask: Tensor, labels: Tensor | None) -> Tensor:
        """Return the likeness of each of K guesses, -1 to 1, [K].

        Args:
            ids: [K, B, T] token ids.
            mask: [K, B, T] bool, True where a slot holds a token.
            labels: [K, B] classes; None where next words are predicted.
        """
        self.spent += len(ids)

        def one(ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
            return self._cosine(self._defended(self._made(mask, labels, ids=ids), whole=True))

        given, together = ids if labels is None else labels, self._together(ids)
        if together < _FEW:
            return torch.stack([one(*each) for each in zip(ids, mask, given, strict=True)]).detach()
        found: Tensor = vmap(one, chunk_size=together)(ids, mask, given)
        return found.detach()

    def slopes(self, ids: Tensor, mask: Tensor, labels: Tensor | None) -> Tensor:
        """Return how much the likeness would grow with each word in each slot, to first order, [K, B, T, V].

        Source: HotFlip (Ebrahimi et al., ACL 2018), for the likeness of gradients in place of a loss. A next word is
        both an input and a target, and both count.

        Args:
            ids, mask, labels: as above.
        """
        self.spent += 3 * len(ids)  # through the gradient of a gradient

        def likeness(vectors: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
            return self._cosine(self._defended(self._made(mask, targets, embeddings=vectors), whole=False))

        vectors = self.table[ids]
        if labels is None:
            targets = torch.nn.functional.one_hot(ids, len(self.table)).to(vectors.dtype)
            along, more = vmap(grad(likeness, (0, 1)), chunk_size=self._together(ids))(vectors, targets, mask)
        else:
            along, more = vmap(grad(likeness), chunk_size=self._together(ids))(vectors, labels, mask), 0.0
        slopes: Tensor = (along @ self.table.T + more).detach()
        return slopes - slopes.gather(3, ids[..., None])

    def _together(self, ids: Tensor) -> int:
        """Return how many guesses [K, B, T] are judged in one pass."""
        return max(1, min(_MANY, _NUMBERS // (self._numbers + ids[0].numel() * self._a_token)))

    def _made(
        self, mask: Tensor, labels: Tensor, ids: Tensor | None = None, embeddings: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the update of one guess by view."""

        def loss(parameters: dict[str, Tensor]) -> Tensor:
            return self._model.loss(ids=ids, embeddings=embeddings, mask=mask, labels=labels, params=parameters)

        by_name = grad(loss)(self._parameters)
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
