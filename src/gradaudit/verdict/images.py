"""When an audit of images says "leaks": rules and sentences, as `verdict` has them for text."""

from collections.abc import Mapping, Sequence

from gradaudit.record import Record, Summary
from gradaudit.verdict.level import RULES, Level, Rules

SEEN_DB = 20.0
"""PSNR from which a reader recognizes a picture: an error of a tenth of the range."""
GAIN_DB = 6.0
"""And by which it must beat the blind guess of the same image: a fourth of its error."""
SHARE, SHARE_ONE_BATCH = 0.75, 0.5
"""Of the blind guess's mean squared error; less of it is a partial leak."""

_RULES: Mapping[Level, str] = {
    "leaks": (
        f"“Leaks” is said when any attack, in any setting, recovered at least one image with a PSNR of {SEEN_DB:.0f} "
        f"dB or more, and at least {GAIN_DB:.0f} dB above the blind guess of the same image."
    ),
    "partly": (
        "“Partly” is said when no image was recovered so well, but for some attack the upper end of the interval of "
        f"the mean squared error lies below {SHARE:.0%} of the blind guess’s mean (with a single batch: the error "
        f"itself below {SHARE_ONE_BATCH:.0%})."
    ),
    "not shown": (
        f"“Not shown” is said when batches were judged, no image came back at {SEEN_DB:.0f} dB and {GAIN_DB:.0f} dB "
        f"above its blind guess, and no attack’s mean squared error lies below {SHARE:.0%} of the blind guess’s "
        f"(single batch: {SHARE_ONE_BATCH:.0%})."
        " It never means “safe”: an attack that fails proves nothing about the next one."
    ),
    "inconclusive": (
        "“Inconclusive” is said when no batch was judged in some setting, because every batch failed or no attack "
        "ran, and no other setting leaks; it says nothing about safety."
    ),
}


def recovered(record: Record) -> int:
    """Return how many images of a record were recovered so well that they can be recognized, beyond blind guessing."""
    if record.error is not None:
        return 0
    pairs = zip(record.images, record.images_baseline, strict=False)
    return sum(m.found and m.psnr >= max(SEEN_DB, blind.psnr + GAIN_DB) for m, blind in pairs)


def _judge(
    name: str, summaries: Sequence[Summary], attacks: Sequence[Record], records: Sequence[Record]
) -> tuple[Level, str]:
    counts: dict[str, tuple[int, int]] = {}
    for record in attacks:
        found, total = counts.get(record.attack, (0, 0))
        counts[record.attack] = (found + recovered(record), total + record.batch_size)
    attack, (found, total) = max(counts.items(), key=lambda item: item[1][0], default=("", (0, 0)))
    if found:
        images = "image" if total == 1 else "images"
        return "leaks", (
            f"Private images can be read back: in the setting “{name}” the attack “{attack}” recovered {found} of "
            f"{total} {images} well enough to be recognized (PSNR of {SEEN_DB:.0f} dB or more), beyond what blind "
            "guessing recovers."
        )
    for summary in summaries:
        error, blind = summary.scores["mse"], summary.baseline["mse"].mean
        if error.mean is None or blind is None or summary.failed == summary.n:
            continue
        several = error.high is not None
        high = error.high if error.high is not None else error.mean
        if high <= (SHARE if several else SHARE_ONE_BATCH) * blind:
            return "partly", (
                f"Parts of the private images can be read back: in the setting “{name}” the attack “{summary.attack}” "
                f"has a mean squared error of {error.mean:.3f}, blind guessing {blind:.3f}."
            )
    if not any(r.error is None for r in attacks):
        return "inconclusive", f"Nothing could be judged in the setting “{name}”, so the run says nothing about safety."
    return "not shown", (
        f"In the setting “{name}” no attack read back clearly more than blind guessing does; that is not evidence that "
        "the update is safe, because a stronger attack may still succeed."
    )


RULES.add("images", Rules(_RULES, _judge))
