"""What passes the wall: the selected part of an update, and what the attacker is given beside it."""

from dataclasses import replace
from typing import TypeVar

from gradaudit.models.base import Model
from gradaudit.selection import Selection
from gradaudit.types import Given, Knowledge, Observation, Private, PublicImages, Update

M = TypeVar("M", bound=Model)


def knowledge_of(batch: Private, update: Update, given: Given) -> Knowledge:
    """Return the values of the facts that are given away; examples that are all of one size have no lengths."""
    lengths = batch.sizes
    labels = None if batch.labels is None else tuple(int(y) for y in batch.labels)
    return Knowledge(
        batch_size=len(batch) if given.batch_size else None,
        lengths=lengths if given.lengths else None,
        longest=max(lengths) if given.longest and lengths is not None else None,
        labels=labels if given.labels else None,
        training=update.training if given.training else None,
        dropout=update.dropout if given.dropout else None,
        defenses=update.defenses if given.defenses else None,
    )


def observation(
    model: M, update: Update, selection: Selection, knowledge: Knowledge, public: PublicImages | None = None
) -> Observation[M]:
    """Return the selected part of an update as an attack may see it, beside what the attacker has from elsewhere."""
    if public is not None:
        knowledge = replace(knowledge, public=public.where)
    tensors, views = selection.take(model, update.tensors)
    return Observation(
        model=model,
        tensors=tensors,
        views=views,
        kind=update.kind,
        knowledge=knowledge,
        selection=selection.expression,
        public=public,
    )
