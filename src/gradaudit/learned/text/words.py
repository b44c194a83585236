"""What the public model and text say of words before anything is learned from updates."""

import torch
from torch import Tensor, nn

from gradaudit.learned.public import Public
from gradaudit.models.base import TextModel


def word_vectors(model: TextModel, most: int) -> Tensor:
    """Return what the model knows of its words, [words, width]: input and output vectors, by principal directions.

    Args:
        model: the public model.
        most: columns that are kept where there are more.
    """
    tables = [model.word_vectors()]
    words = set(model.group("word"))
    shape = tables[0].shape
    tables += [p.detach() for n, p in model.parameters().items() if n in model.group("head") and n not in words]
    known = torch.cat([t / t.square().mean().sqrt() for t in tables if t.shape == shape], 1).float()
    if known.shape[1] <= most:
        return known
    centered = known - known.mean(0)
    _, directions = torch.linalg.eigh((centered.T @ centered).double())
    found: Tensor = centered @ directions[:, -most:].to(centered)
    unit = found.square().mean().sqrt()
    return found.div_(unit)


def classes_of(texts: Public, vocabulary: int, size: int) -> Tensor:
    """Return the classes [n, B, T]: words, and behind a sentence's end the class after the last word."""
    return torch.where(texts.mask, texts.ids, vocabulary).view(-1, size, texts.ids.shape[1])


@torch.no_grad()
def begin_with_words(shared: nn.Linear, known: Tensor, shown: Public) -> None:
    """Let a layer over the vocabulary begin with word vectors, and with the counts of public text.

    What an update tells of a word goes through these vectors alone, so that a word that occurs once can be read as well
    as one that occurs a thousand times.

    Args:
        shared: from a hidden vector to classes; columns behind the word vectors' begin at 0.
        known: [words, width] word vectors.
        shown: the text that is trained on.
    """
    shared.weight.zero_()
    shared.weight[: len(known), : known.shape[1]] = known / known.shape[1] ** 0.5
    targets = torch.where(shown.mask, shown.ids, len(known)).flatten()
    # half a count for what did not occur
    counts = torch.bincount(targets, minlength=len(shared.bias))[: len(shared.bias)].float() + 0.5
    shared.bias.copy_((counts / counts.sum()).log())
