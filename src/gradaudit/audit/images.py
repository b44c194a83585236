"""What a case of images loads."""

from pathlib import Path

import torch

from gradaudit.audit.loading import LOADERS, MODELS, Loaded, at_hand, spec_of
from gradaudit.case import Case
from gradaudit.data.draw import draw_numbers
from gradaudit.data.files import found_file
from gradaudit.data.images import ImageRows, Images, load_images, public_images
from gradaudit.errors import BadInputError
from gradaudit.judge.images import ImageJudge
from gradaudit.metrics.perceptual import load_perceptual
from gradaudit.models.base import Model
from gradaudit.models.images import ImageModel, load_image_model


def _load(case: Case, source: ImageRows, base: Path, device: torch.device, loaded: Model | None) -> Loaded:
    """Load what a case of images names.

    The attacker's images are those of [public], or the digits that are in no audited batch where the case audits the
    embedded digits; audited images are never among them.
    """
    if case.metrics.published:
        raise BadInputError("[metrics] published names scorings of text; leave it away for images")
    batches = draw_numbers(case.data, len(source), source.where)
    public = None
    if case.public is not None:
        public = public_images(load_images(case.public, base), source, batches, case.public)
    elif case.data.source == "digits" and len(source) > sum(map(len, batches)):
        public = public_images(source, source, batches)
    spec = spec_of(case, len(source.classes), source.shape)
    here = at_hand(loaded, spec)
    model = here if isinstance(here, ImageModel) else load_image_model(spec, device)
    weights = case.metrics.lpips
    judge = ImageJudge(None if weights is None else load_perceptual(found_file(weights, base)))
    return Loaded(model, Images(model, source), batches, judge, public, in_sight=public)


LOADERS.add("images", _load)
MODELS.add("images", load_image_model)
