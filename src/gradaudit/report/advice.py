"""What a reader does next, from the verdict, the flags and the measured settings; and what an audit covers."""

from collections.abc import Mapping, Sequence

from gradaudit.record import Record, Summary, readers
from gradaudit.report.sections import strength
from gradaudit.report.wording import number_of
from gradaudit.scores import scores_of
from gradaudit.verdict.level import BLIND
from gradaudit.verdict.run import Verdicts

_BY_LEVEL: Mapping[str, tuple[str, ...]] = {
    "leaks": (
        "Do not send updates of this kind to anyone who may not read the data.",
        "Compare defenses on your own data: “gradaudit sweep” measures what each hides and what it costs. "
        "docs/defenses.md says what each promises.",
    ),
    "partly": (
        "Treat these updates as personal data: parts of the text are in them.",
        "Compare defenses on your own data: “gradaudit sweep” measures what each hides and what it costs. "
        "docs/defenses.md says what each promises.",
    ),
    "not shown": (
        "Do not report this as safe. Try several attacks with more time "
        "(--set 'attack={name=\"auto\", budget=1200}'), smaller batches and more of them.",
        "A defense with a stated epsilon bounds attacks to come as well: “gradaudit claims” checks it.",
    ),
    "inconclusive": (
        "Mend what is listed under “Batches that failed” and run the same command again: finished batches are kept.",
    ),
}
_BY_FLAG: Mapping[str, str] = {
    "few-batches": "Run at least 10 batches (--set data.batches=10) before you quote a mean.",
    "random-weights": "Repeat with the weights that you train: random ones can leak more or less.",
    "dropout-not-modeled": "Run the setting with an attack that reads dropout: “auto” chooses one.",
    "defense-not-modeled": "Let the attacker know of the defense ([knowledge] defenses = true), as a real one would.",
    "truncated": "Texts were cut to the model’s length: judge what you send, not the whole text.",
    "word-rows-shared": "Freeze the word embedding, or leave its rows out: they name the words of the batch.",
}
REPEAT = (
    "Repeat the audit when the model, the data, the client’s training or its defenses change, and when a new version "
    "of gradaudit brings stronger attacks."
)

KINDS: tuple[tuple[str, str, str], ...] = (
    ("Reading examples back from an update", "done", "this report"),
    ("Saying whether a known example was used (membership)", "not done", "tools for it: LeakPro, jax-privacy"),
    (
        "Inferring properties or attributes of the data",
        "not done",
        "apart from the names, numbers and labels shown here",
    ),
    ("A server that chooses weights to make updates leak", "not done", "the attacker here follows the protocol"),
    (
        "What is sent beside the update (number of examples, training loss)",
        "not done",
        "used only where it is “given” above",
    ),
    ("Attacks on the finished model", "not applicable", "an update was audited, not the model that comes of it"),
)
"""Kinds of attack, whether this audit did them, and where else to look."""


def next_steps(judged: Verdicts, summaries: Sequence[Summary], records: Sequence[Record]) -> list[str]:
    """Return what to do next, the weightiest first.

    Args:
        judged: the run's verdicts.
        summaries: one a (setting, attack).
        records: of the run.
    """
    steps = list(_BY_LEVEL[judged.overall.level])
    if (least := _least(judged, summaries, records)) is not None:
        steps.insert(1, least)
    best = _strongest(summaries)

    def counts(one: Summary | Record) -> bool:
        """Return whether a flag asks for something: not that of an attack beside which another read the setting."""
        return best.get(one.setting, one).attack == one.attack or judged.settings[one.setting].level == "not shown"

    every: list[Summary | Record] = [*summaries, *records]
    raised = {flag for one in every if counts(one) for flag in one.flags}
    return [*steps, *(step for name, step in _BY_FLAG.items() if name in raised), REPEAT]


def _least(judged: Verdicts, summaries: Sequence[Summary], records: Sequence[Record]) -> str | None:
    """Return which of several measured settings gave nothing away that shows, or that none is enough; None for one.

    A setting that leaks in part is none to advise: its words may all be there where no sentence is.
    """
    best = _strongest(summaries)
    if judged.overall.level not in ("leaks", "partly") or len(best) < 2:
        return None
    shut = [one for one in best.values() if judged.settings[one.setting].level == "not shown"]
    if not shut:
        return f"None of the {len(best)} settings measured here is known to be enough: none was without a leak."
    least = min(shut, key=strength)
    kind = scores_of(least.scores)
    mean, blind = (number_of(found[kind.main].mean, kind[kind.main].digits) for found in (least.scores, least.baseline))
    own = [r for r in records if (r.setting, r.attack) == (least.setting, least.attack)]
    return (
        f"Of the settings measured here, “{least.setting}” gave the least: {kind[kind.main].title} {mean} by "
        f"“{readers(own) if own else least.attack}”, blind guessing {blind}. What it costs is not in this report."
    )


def _strongest(summaries: Sequence[Summary]) -> dict[str, Summary]:
    """Return each setting's attack that read most."""
    best: dict[str, Summary] = {}
    for one in summaries:
        if one.attack != BLIND and strength(one) >= strength(best.get(one.setting, one)):
            best[one.setting] = one
    return best


def who_sees(records: Sequence[Record]) -> str:
    """Return who sees an update before defenses act on it, and after."""
    defended = any(record.knowledge.get("defenses") for record in records if record.attack != BLIND)
    if not defended:
        return "No defense acts on these updates: the server, and whoever reads along, sees them as the attack did."
    return (
        "The defenses act on the client: it alone sees the update before them, the server sees it after them. Where "
        "your server adds the noise itself, it sees the update without: audit that as well, without the defense."
    )
