"""Sentence pairs: rows of a second segment, which has a token type of its own, are looked for by no attack here."""

from collections.abc import Mapping

from torch import Tensor

from gradaudit.models.base import TextModel

UNREAD = (
    "some of the batch are sentence pairs (token types): their second sentences are not looked for, so that what is "
    "missing is no sign of safety"
)


def second_segments(model: TextModel, sent: Mapping[str, Tensor]) -> bool:
    """Return whether an update shows that tokens of a second segment were in the batch.

    Args:
        model: the model.
        sent: what is seen, by name; False where noise or weight decay touches all rows, or the tables are not in it.
    """
    names = (*model.group("segment"), *model.group("word"))
    if len(names) < 2 or not all(name in sent for name in names):
        return False
    types, words = (sent[name] for name in names)
    untouched = not bool(words.any(1).all())
    return untouched and bool(types[1:].any())
