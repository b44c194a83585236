"""The verdict: one plain sentence for a privacy officer, and the rule that produced it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradaudit.record import Record, Summary
from gradaudit.verdict.images import IMAGE_RULES, image_verdict
from gradaudit.verdict.level import BLIND, Level
from gradaudit.verdict.text import _RULES, _count, _judged, _leaks, _partly, _proven

WORST_FIRST: tuple[Level, ...] = ("leaks", "partly", "inconclusive", "not shown")
"""Which setting's verdict becomes the overall one; a setting nobody judged outranks a failed attack."""


@dataclass(frozen=True)
class Verdict:
    """What a run shows, in one sentence.

    Args:
        level: "leaks", "partly", "not shown" or "inconclusive".
        sentence: for a reader who is no expert.
        rule: the rule that produced the level, with its thresholds.
    """

    level: Level
    sentence: str
    rule: str


@dataclass(frozen=True)
class Verdicts:
    """The verdict of each setting, in the order in which settings were met, and the worst of them."""

    overall: Verdict
    settings: Mapping[str, Verdict]


def verdict(summaries: Sequence[Summary], records: Sequence[Record]) -> Verdict:
    """Return the overall verdict of a run: the worst of its settings' verdicts.

    Args:
        summaries: one a (setting, attack).
        records: the batches the summaries were made from.
    """
    return verdicts(summaries, records).overall


def verdicts(summaries: Sequence[Summary], records: Sequence[Record]) -> Verdicts:
    """Return one verdict a setting and the overall one.

    Args:
        summaries: one a (setting, attack).
        records: the batches the summaries were made from.
    """
    names = dict.fromkeys([r.setting for r in records] + [s.setting for s in summaries])
    by_setting = {
        name: _of_setting(
            name,
            [s for s in summaries if s.setting == name],
            [r for r in records if r.setting == name],
        )
        for name in names
    }
    if not by_setting:
        nothing = Verdict("inconclusive", "Nothing could be judged: the run holds no batch.", _RULES["inconclusive"])
        return Verdicts(nothing, {})
    worst = min(by_setting.values(), key=lambda found: WORST_FIRST.index(found.level))
    return Verdicts(_whole_run(worst, by_setting), by_setting)


def _whole_run(worst: Verdict, by_setting: Mapping[str, Verdict]) -> Verdict:
    if worst.level != "not shown" or len(by_setting) == 1:
        return worst
    sentence = (
        f"In none of the {len(by_setting)} settings did an attack read back clearly more than blind "
        "guessing does; that is not evidence that the updates are safe, because a stronger attack may "
        "still succeed."
    )
    return Verdict(worst.level, sentence, worst.rule)


def _of_setting(name: str, summaries: Sequence[Summary], records: Sequence[Record]) -> Verdict:
    attacks = [r for r in records if r.attack != BLIND]
    if any(r.images for r in records):
        level, text = image_verdict(name, [s for s in summaries if s.attack != BLIND], attacks)
        return Verdict(level, text, IMAGE_RULES[level])
    sentence = (
        _leaks(name, attacks, records)
        or _partly(name, [s for s in summaries if s.attack != BLIND], attacks)
        or _proven(name, attacks)
    )
    if sentence is not None:
        level, text = sentence
        return Verdict(level, text, _RULES[level])
    failed = [r for r in attacks if r.error is not None]
    if not any(_judged(r) for r in attacks):
        why = f"all {_count(len(failed), 'batch', 'batches')} failed" if failed else "no attack was judged"
        text = f"Nothing could be judged in the setting “{name}”: {why}, so the run says nothing about safety."
        return Verdict("inconclusive", text, _RULES["inconclusive"])
    text = (
        f"In the setting “{name}” no attack read back clearly more than blind guessing does; that is not "
        "evidence that the update is safe, because a stronger attack may still succeed"
    )
    if failed:
        text += f" ({_count(len(failed), 'batch', 'batches')} of {len(attacks)} failed and counted as 0)"
    return Verdict("not shown", text + ".", _RULES["not shown"])
