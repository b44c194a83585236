"""gradaudit: how much private text can be read back from the updates a model training sends?"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["bundle", "capture"]

if TYPE_CHECKING:
    from gradaudit.bundles.between import bundle
    from gradaudit.bundles.capture import capture


def __getattr__(name: str) -> Any:
    # torch and transformers take seconds to import: only when one of these is really used
    if name == "capture":
        from gradaudit.bundles.capture import capture

        return capture
    if name == "bundle":
        from gradaudit.bundles.between import bundle

        return bundle
    raise AttributeError(f"module 'gradaudit' has no attribute '{name}'")
