"""The families of models that are read, by transformers' name; and why some are not.

Nothing of a model is written again here: a class says where its roles lie and runs transformers' own blocks. To add a
family, add a class with the attributes of `Family` in `encoders.py` or `decoders.py` and list it in `FAMILIES`.
"""

from gradaudit.errors import NotSupportedError
from gradaudit.models.decoders import GPT2, Gemma, Gemma2, Gemma3, Llama, Phi, Phi3, Qwen3
from gradaudit.models.encoders import Bert, DistilBert, Electra, MPNet, Roberta
from gradaudit.models.family import Family

FAMILIES: dict[str, type[Family]] = {
    "bert": Bert,
    "roberta": Roberta,
    "mpnet": MPNet,
    "electra": Electra,
    "distilbert": DistilBert,
    "gpt2": GPT2,
    "llama": Llama,
    # Llama's blocks, with biases of q, k and v or with a sliding window, which no text that is read is longer than
    "qwen2": Llama,
    "mistral": Llama,
    "qwen3": Qwen3,
    "phi": Phi,
    "phi3": Phi3,
    "gemma": Gemma,
    "gemma2": Gemma2,
    "gemma3_text": Gemma3,
}
"""By transformers' `model_type`."""
_APART = "the rows of its words have no places, and queries and keys read the relative places as well"
REFUSED = {
    "deberta": _APART,
    "deberta-v2": _APART,
    "gemma3": "it reads images, too; its text part alone, gemma3_text, is supported",
}
"""Why others that people ask for are not there: what of them nothing here computes."""


def family_of(name: str, model_type: str) -> type[Family]:
    """Return the family of a transformers model type.

    Args:
        name: of the model, for the message.
        model_type: as its configuration says.

    Raises:
        NotSupportedError: an architecture without a role table.
    """
    if model_type not in FAMILIES:
        why = f" ({REFUSED[model_type]})" if model_type in REFUSED else ""
        raise NotSupportedError(
            f"model '{name}' is of type '{model_type}'{why}; supported: {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]
