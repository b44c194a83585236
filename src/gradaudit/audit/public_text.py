"""The attacker's own text: nothing of it is in an audited batch."""

from collections.abc import Sequence
from pathlib import Path

import torch

from gradaudit.data.draw import shuffled
from gradaudit.data.spec import PublicSpec
from gradaudit.data.text import TextRows, load_rows, make_batch
from gradaudit.data.windows import apart, windows
from gradaudit.errors import BadInputError
from gradaudit.learned.public import Public
from gradaudit.models.transformers import TransformersModel
from gradaudit.streams import stream


def public_text(
    spec: PublicSpec,
    base: Path,
    model: TransformersModel,
    window: int | None,
    private: TextRows,
    audited: Sequence[Sequence[int]],
) -> Public:
    """Return the attacker's own text, without anything that an audited batch holds.

    Args:
        spec: the [public] table.
        base: folder that a relative path starts from.
        model: encodes it, and says whether it needs labels.
        window: of [data].
        private: the audited rows, and others.
        audited: numbers of the rows of each audited batch.

    Raises:
        BadInputError: it cannot be read, or nothing is left of it.
    """
    rows = load_rows(spec, base)
    if window is not None:
        rows = windows(rows, model, window, whole=False)
    allowed = set(apart(rows, private, (number for batch in audited for number in batch)))
    kept = [number for number in shuffled(spec, len(rows.texts)) if number in allowed][: spec.rows]
    if not kept:
        raise BadInputError(f"[public] {rows.where} has no row that is in no audited batch; give other text")
    labels = None
    if model.spec.task == "classification" and spec.source == "words":
        # nobody's labels: as good a guess as any
        rng = stream(spec.shuffle_seed or 0, "labels")
        drawn = torch.randint(model.spec.labels, (len(rows.texts),), generator=rng).tolist()
        labels = [drawn[n] for n in kept]
    elif model.spec.task == "classification":
        if rows.labels is None:
            raise BadInputError('task "classification" needs labels of the public text too: set label in [public]')
        # by their names: each source numbers its own classes
        numbers = {name: number for number, name in enumerate(private.classes)}
        strange = sorted(set(rows.classes) - set(numbers))
        if strange:
            raise BadInputError(f"[public] has a class '{strange[0][:40]}' that [data] does not have")
        labels = [numbers[rows.classes[rows.labels[n]]] for n in kept]
    ids = None if rows.ids is None else [rows.ids[n] for n in kept]
    batch = make_batch(model, [rows.texts[n] for n in kept], labels, ids)
    device, classes = model.device, batch.labels
    here = None if classes is None else classes.to(device)
    return Public(batch.ids.to(device), batch.mask.to(device), here, rows.where)
