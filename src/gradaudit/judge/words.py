"""Words that an attack names, as a set, against the batch's own."""

from collections.abc import Sequence

from gradaudit.data.sensitive import spans
from gradaudit.judge.judgment import Order
from gradaudit.models.transformers import TransformersModel
from gradaudit.record import WordScores
from gradaudit.types import Batch, NamedWord


def score_words(model: TransformersModel, batch: Batch, words: Sequence[NamedWord], order: Order | None) -> WordScores:
    """Return how many of the batch's distinct words were named, and how many of those named are in it.

    Special tokens count nowhere. Without any word named, precision is 0.

    Args:
        model: says which tokens are special.
        batch: the truth.
        words: what was named.
        order: of the batch's rows; None where it is not known.
    """
    held: dict[int, set[int]] = {}
    rows = [model.content(list(ids)) for ids in batch.sequences()]
    for ids in rows:
        held.update((token, held.get(token, set())) for token in ids)
    for step, taken in enumerate(order or ()):
        for row in taken:
            for token in rows[row]:
                held[token].add(step)
    named = {word.token: word.steps for word in words if word.token in set(model.content([word.token]))}
    right = [token for token in held if token in named]
    sure = {word.token for word in words if word.certain and word.token in named}
    proven = len(sure & held.keys())
    sensitive = [set(model.content(model.encode(span)[0])) for text in batch.texts for span in spans(text)]
    # of one step there is nothing to tell
    told = order is not None and len(order) > 1 and any(steps is not None for steps in named.values())

    def placed(count: int | None) -> float | None:
        own = [t for t in held if count is None or len(held[t]) == count]
        if not told or not own:
            return None
        return _percent(sum(named.get(t) == tuple(sorted(held[t])) for t in own), len(own))

    return WordScores(
        precision=_percent(len(right), len(named)),
        recall=_percent(len(right), len(held)),
        minibatch=placed(None),
        alone=placed(1),
        twice=placed(2),
        sensitive=_percent(sum(one <= named.keys() for one in sensitive), len(sensitive)) if sensitive else None,
        certain=_percent(proven, len(held)),
        certain_right=_percent(proven, len(sure)) if sure else None,
    )


def _percent(part: int, whole: int) -> float:
    return 100 * part / whole if whole else 0.0
