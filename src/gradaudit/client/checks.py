"""What a client cannot be: defenses in an order that does not act, or on what its model does not have."""

from collections.abc import Sequence

from gradaudit.defenses.base import BatchDefense, Defense, ExampleDefense, ModelDefense, RoleDefense, UpdateDefense
from gradaudit.defenses.feedback import ErrorFeedback
from gradaudit.errors import BadInputError, NotSupportedError
from gradaudit.models.base import Model, TextModel


def check_client(model: Model, defenses: Sequence[Defense], padding: str, clients: int) -> None:
    """Refuse what `Client` says it raises for; the arguments are its fields."""
    text = model if isinstance(model, TextModel) else None
    if padding == "left" and (text is None or not text.causal):
        raise BadInputError('padding = "left" is for decoders: an encoder\'s head reads the first position')
    wordy = [d.name for d in defenses if isinstance(d, BatchDefense | RoleDefense)]
    if text is None and wordy:
        raise NotSupportedError(
            f"defense '{wordy[0]}' acts on words or on attention, which a model of images does not have; take one "
            "that acts on updates or on examples' gradients"
        )
    if clients < 1:
        raise BadInputError(f"clients must be at least 1, got {clients}")
    guarded = any(isinstance(d, ExampleDefense) for d in defenses)
    if guarded and padding == "left" and text is not None and text.absolute_positions:
        raise BadInputError(
            'padding = "left" moves all positions with the longest sentence, so clipping each sentence\'s gradient '
            "bounds nobody's part; pad on the right"
        )
    after_batch = [d for d in defenses if not isinstance(d, BatchDefense | ModelDefense)]
    late = [d.name for d in after_batch[1:] if isinstance(d, ExampleDefense)]
    if late:
        raise BadInputError(f"defense '{late[0]}' acts before there is an update: name it once, and first")
    acting = [d for d in defenses if not isinstance(d, ModelDefense)]
    if after_batch != acting[len(acting) - len(after_batch) :]:
        raise BadInputError("a defense that changes the text acts before all others: name it first")
    feedback = [place for place, d in enumerate(defenses) if isinstance(d, ErrorFeedback)]
    behind = defenses[feedback[-1] + 1 :] if feedback else ()
    kinds = {type(d) for d in behind if not isinstance(d, ModelDefense)}
    if feedback and (len(feedback) > 1 or not kinds or not all(issubclass(k, UpdateDefense) for k in kinds)):
        raise BadInputError(
            "defense 'error-feedback' is named once, right before the compression, such as topk, whose remainders "
            "it adds"
        )
