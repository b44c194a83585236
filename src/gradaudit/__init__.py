"""gradaudit: how much private text can be read back from the updates a model training sends?"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["attack", "bundle", "capture", "run"]

if TYPE_CHECKING:
    from gradaudit.api.calls import attack, run
    from gradaudit.bundles.between import bundle
    from gradaudit.bundles.capture import capture

_PLACES = {"attack": "api.calls", "bundle": "bundles.between", "capture": "bundles.capture", "run": "api.calls"}
_ATTACKING = frozenset({"attack", "run"})
"""What computes for long: its threads sleep while they wait, where torch is not imported yet. The others record the
user's own training, and leave it as it is."""


def __getattr__(name: str) -> Any:
    # torch and transformers take seconds to import: only when one of these is really used
    if name in _ATTACKING:
        import_module("gradaudit.machine").choose_threads(None)
    if name in _PLACES:
        return getattr(import_module(f"gradaudit.{_PLACES[name]}"), name)
    raise AttributeError(f"module 'gradaudit' has no attribute '{name}'")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
