"""Images as PNG: their content for records and reports, and files of them."""

import base64
import io
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from gradaudit.errors import BadInputError


def png(image: Tensor) -> str:
    """Return an image [C, H, W] in 0 to 1 as base64 PNG.

    Raises:
        BadInputError: the extra `vision` is missing.
    """
    try:
        from PIL import Image
    except ImportError:
        raise BadInputError("keeping images needs Pillow: pip install 'gradaudit[vision]'") from None
    pixels = (image.clamp(0, 1) * 255).round().to(torch.uint8)
    array = pixels[0].numpy() if len(pixels) == 1 else pixels.permute(1, 2, 0).contiguous().numpy()
    out = io.BytesIO()
    Image.fromarray(array).save(out, format="PNG")
    return base64.b64encode(out.getvalue()).decode("ascii")


def room_for_pictures(folder: Path) -> Path:
    """Make the folder that pictures are to be saved in, its owner's alone, and return it.

    Raises:
        BadInputError: it cannot be made, or written into.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder / ".room").touch()
        (folder / ".room").unlink()
    except OSError as error:
        raise BadInputError(f"cannot write into {folder} ({error.strerror}); choose another --save folder") from None
    return folder


def save_pictures(pictures: Sequence[str], folder: Path) -> Path:
    """Write base64 PNGs as "image-1.png" and so on, their owner's alone, and return the folder.

    Raises:
        BadInputError: the folder cannot be written (no space, no permission).
    """
    room_for_pictures(folder)
    for number, picture in enumerate(pictures, 1):
        path = folder / f"image-{number}.png"
        try:
            path.touch(mode=0o600)
            path.chmod(0o600)
            path.write_bytes(base64.b64decode(picture))
        except OSError as error:
            raise BadInputError(f"cannot write {path} ({error.strerror}); make room or choose another folder") from None
    return folder
