"""The classes of models by which attacks know them: `Model` of any kind, and `TextModel`, of which there is one."""

from gradaudit.models.model import FirstInputs, Model, Past, SpecialTokens
from gradaudit.models.transformers import TransformersModel as TextModel

__all__ = ["FirstInputs", "Model", "Past", "SpecialTokens", "TextModel"]
