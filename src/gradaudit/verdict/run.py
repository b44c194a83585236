"""The verdict: one plain sentence for a privacy officer, and the rule that produced it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradaudit.record import Record, Summary
from gradaudit.scores import scores_of
from gradaudit.verdict import images, text  # noqa: F401 - each registers its rules
from gradaudit.verdict.level import BLIND, RULES, Level

WORST_FIRST: tuple[Level, ...] = ("leaks", "partly", "inconclusive", "not shown")
"""Which setting's verdict becomes the overall one; a setting nobody judged outranks a failed attack."""


_NAMED = 3
"""Settings named beside the worst: more are counted."""


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
    """The verdict of each setting, in the order in which settings were met, and the worst of them.

    Args:
        overall: of the run.
        settings: by name.
        worst: the setting that the overall verdict is of; None for a run without any.
    """

    overall: Verdict
    settings: Mapping[str, Verdict]
    worst: str | None = None


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
        name: _of_setting(name, [s for s in summaries if s.setting == name], [r for r in records if r.setting == name])
        for name in names
    }
    if not by_setting:
        nothing = Verdict(
            "inconclusive", "Nothing could be judged: the run holds no batch.", RULES["text"].words["inconclusive"]
        )
        return Verdicts(nothing, {})
    proven = Counter[str]()
    for record in records:
        proven[record.setting] = max(proven[record.setting], record.proven)
    # of equals the one where most is proven
    worst = min(by_setting, key=lambda name: (WORST_FIRST.index(by_setting[name].level), -proven[name]))
    return Verdicts(_whole_run(by_setting[worst], by_setting), by_setting, worst)


def _whole_run(worst: Verdict, by_setting: Mapping[str, Verdict]) -> Verdict:
    if worst.level != "not shown" or len(by_setting) == 1:
        others = [name for name, found in by_setting.items() if found is not worst and found.level == worst.level]
        parts = [name for name, found in by_setting.items() if found.level == "partly" != worst.level]
        sentence = worst.sentence
        for names, how in ((others, "The same holds for"), (parts, "Part comes back in")):
            if names:
                sentence += f" {how} {_listed(names)}."
        return Verdict(worst.level, sentence, worst.rule)
    sentence = (
        f"In none of the {len(by_setting)} settings did an attack read back clearly more than blind "
        "guessing does; that is not evidence that the updates are safe, because a stronger attack may "
        "still succeed."
    )
    return Verdict(worst.level, sentence, worst.rule)


def _listed(names: Sequence[str]) -> str:
    quoted = [f"“{name}”" for name in names[:_NAMED]]
    more = len(names) - len(quoted)
    return ", ".join(quoted) + (f" and {more} more {'setting' if more == 1 else 'settings'}" if more else "")


def _of_setting(name: str, summaries: Sequence[Summary], records: Sequence[Record]) -> Verdict:
    rules = RULES[scores_of(score for found in (records, summaries) for one in found for score in one.scores).kind]
    attacks = [r for r in records if r.attack != BLIND]
    level, sentence = rules.judge(name, [s for s in summaries if s.attack != BLIND], attacks, records)
    return Verdict(level, sentence, rules.words[level])
