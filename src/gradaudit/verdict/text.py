"""When an audit of text says "leaks": rules, thresholds and sentences."""

from collections.abc import Iterable, Mapping, Sequence

from gradaudit.record import Interval, Record, SentenceMarks, Summary, readers
from gradaudit.verdict.level import BLIND, RULES, Level, Rules, counted

NEAR_SCORE, NEAR_WORDS = 90.0, 5
"""ROUGE-L from which a sentence of at least so many words counts as read almost word for word."""
MARGIN, MARGIN_ONE_BATCH, MARGIN_WORST_BATCH = 5.0, 20.0, 50.0
"""Points above blind guessing from which part of a text was read: by an interval's lower end, by a single batch, and by
the worst batch of many."""
WORDS_RIGHT = 90.0
"""Precision from which named words count as read."""

_RULES: Mapping[Level, str] = {
    "leaks": (
        "“Leaks” is said when any attack, in any setting, recovered at least one sentence exactly, or "
        f"almost word for word (ROUGE-L of {NEAR_SCORE:.0f} or more in a sentence of {NEAR_WORDS} words or "
        "more), that blind guessing does not recover as well; where no truth is known, when the attack "
        "proves a sentence from the update itself."
    ),
    "partly": (
        "“Partly” is said when no sentence was recovered whole, but some attack names the words of the batch: at least "
        f"{WORDS_RIGHT:.0f} of 100 that it names are there, and the share of the distinct words that it names lies "
        "above blind guessing by the margins that follow; or when for some attack the lower end of the "
        "interval of ROUGE-L, or of names and numbers recovered, lies above the mean of blind guessing by "
        f"at least {MARGIN:.0f} points (with a single batch: the score itself, by at least "
        f"{MARGIN_ONE_BATCH:.0f}), or ROUGE-L of any one batch lies above its own blind guess by at least "
        f"{MARGIN_WORST_BATCH:.0f}."
    ),
    "not shown": (
        "“Not shown” is said when batches were judged, no sentence came back exactly or almost word for "
        "word, and no attack’s interval of ROUGE-L, or of names and numbers, lies above blind guessing by "
        f"{MARGIN:.0f} points (single batch: {MARGIN_ONE_BATCH:.0f}; worst batch: "
        f"{MARGIN_WORST_BATCH:.0f}). It never means “safe”: an attack that fails proves nothing about the "
        "next one."
    ),
    "inconclusive": (
        "“Inconclusive” is said when no batch was judged in some setting, because every batch failed or no "
        "attack ran, and no other setting leaks, in full or in part; it says nothing about safety."
    ),
}


def _judge(
    name: str, summaries: Sequence[Summary], attacks: Sequence[Record], records: Sequence[Record]
) -> tuple[Level, str]:
    found = (
        _leaks(name, attacks, records)
        or _words_leak(name, summaries)
        or _partly(name, summaries, attacks)
        or _proven(name, attacks)
    )
    if found is not None:
        return found
    failed = [r for r in attacks if r.error is not None]
    if not any(_judged(r) for r in attacks):
        why = f"all {counted(len(failed), 'batch', 'batches')} failed" if failed else "no attack was judged"
        text = f"Nothing could be judged in the setting “{name}”: {why}, so the run says nothing about safety."
        return "inconclusive", text
    text = (
        f"In the setting “{name}” no attack read back clearly more than blind guessing does; that is not "
        "evidence that the update is safe, because a stronger attack may still succeed"
    )
    if failed:
        text += f" ({counted(len(failed), 'batch', 'batches')} of {len(attacks)} failed and counted as 0)"
    return "not shown", text + "."


def _leaks(name: str, attacks: Sequence[Record], records: Sequence[Record]) -> tuple[Level, str] | None:
    blind = {(r.case, r.batch): r for r in records if r.attack == BLIND and r.error is None}
    gains: dict[str, list[tuple[int, int, int, int]]] = {}
    for record in attacks:
        # Sentences of failed batches stay in the total: a failure is no proof that they were out of reach.
        failed = record.error is not None
        exact, near = (0, 0) if failed else _read_back(record, blind.get((record.case, record.batch)))
        gains.setdefault(record.attack, []).append(
            (exact, near, 0 if failed else record.proven, sentence_count(record))
        )
    totals = {attack: tuple(map(sum, zip(*found, strict=True))) for attack, found in gains.items()}
    attack, best = max(totals.items(), key=lambda item: item[1], default=("", (0, 0, 0, 0)))
    exact, near, proven, total = best
    if exact + near == 0:
        return None
    how = f"{exact} of {counted(total, 'sentence', 'sentences')} exactly" if exact else ""
    if near:
        word_for_word = f"{near} almost word for word"
        how = f"{how} and {word_for_word}" if exact else f"{near} of {total} sentences almost word for word"
    text = (
        f"Private text can be read back: in the setting “{name}” the attack "
        f"“{readers(r for r in attacks if r.attack == attack)}” recovered {how}, beyond what blind guessing recovers."
    )
    if proven:
        text += f" {counted(proven, 'sentence is', 'sentences are')} proven by the update itself."
    return "leaks", text


def _read_back(record: Record, blind: Record | None) -> tuple[int, int]:
    """Return how many sentences were recovered exactly, and almost, that the blind guess does not match."""
    guessed_share = record.baseline.get("exact") or 0.0
    if not record.sentences:
        gain = ((record.scores.get("exact") or 0.0) - guessed_share) / 100 * record.batch_size
        return max(0, round(gain)), 0
    exact = {i for i, marks in enumerate(record.sentences) if marks.exact}
    near = {i for i, marks in enumerate(record.sentences) if _near(marks)} - exact
    if blind is not None and len(blind.sentences) == len(record.sentences):
        guessed = {i for i, marks in enumerate(blind.sentences) if marks.exact or _near(marks)}
        return len(exact - guessed), len(near - guessed)
    # Without the blind guess's own marks, nobody can say which sentence it matched: take its number off.
    guessed_exact = round(guessed_share / 100 * len(record.sentences))
    guessed_all = (record.baseline.get("rougeL") or 0.0) >= NEAR_SCORE
    spare = max(0, guessed_exact - len(exact))
    return max(0, len(exact) - guessed_exact), 0 if guessed_all else max(0, len(near) - spare)


def _near(marks: SentenceMarks) -> bool:
    return marks.rougeL >= NEAR_SCORE and len(marks.original) >= NEAR_WORDS


def _words_leak(name: str, summaries: Iterable[Summary]) -> tuple[Level, str] | None:
    """Judge named words by the attack that names most of them."""
    found: list[tuple[float, str]] = []
    for summary in summaries:
        words, blind = summary.words, summary.baseline_words
        if words is None or blind is None or (words["precision"].mean or 0.0) < WORDS_RIGHT:
            continue
        guessed = blind["recall"].mean or 0.0
        lead = _lead(words["recall"], guessed)
        if lead is None:
            continue
        text = (
            f"Words leak: in the setting “{name}” the attack “{summary.attack}” names {_scored(words['recall'])} of "
            f"100 distinct words of the batch, and {words['precision'].mean:.1f} of 100 that it names are right; blind "
            f"guessing names {guessed:.1f}"
        )
        told = words["minibatch"].mean
        text += "." if told is None else f". For {told:.1f} of 100 it tells the local steps that held them."
        found.append((lead, text))
    return ("partly", max(found)[1]) if found else None


def _partly(name: str, summaries: Iterable[Summary], attacks: Sequence[Record]) -> tuple[Level, str] | None:
    opening = f"Parts of the private text can be read back: in the setting “{name}” the attack "
    found: list[tuple[float, str]] = []
    for summary in summaries:
        own = [r for r in attacks if r.attack == summary.attack]
        blind_rouge = summary.baseline.get("rougeL")
        blind_spans = [r.sensitive_baseline for r in own if r.sensitive_baseline is not None]
        pairs = (
            ("ROUGE-L", summary.scores.get("rougeL"), (blind_rouge.mean if blind_rouge else None) or 0.0),
            ("names and numbers", summary.sensitive, sum(blind_spans) / len(blind_spans) if blind_spans else 0.0),
        )
        for what, interval, guessed in pairs:
            lead = _lead(interval, guessed)
            if interval is not None and lead is not None:
                text = f"“{summary.attack}” reaches {_scored(interval)} of 100 in {what}, blind guessing {guessed:.1f}."
                found.append((lead, text))
    for record in attacks:
        score, guessed = record.scores.get("rougeL"), record.baseline.get("rougeL") or 0.0
        if record.error is None and score is not None and score - guessed >= MARGIN_WORST_BATCH:
            text = (
                f"“{record.attack}” reaches {score:.1f} of 100 in ROUGE-L on its worst batch, blind guessing "
                f"{guessed:.1f} there."
            )
            # What holds over all batches says more than one batch, which is named only when alone.
            found.append((score - guessed - 1000.0, text))
    if not found:
        return None
    return "partly", opening + max(found)[1]


def _lead(interval: Interval | None, guessed: float) -> float | None:
    """Return by how much a score beats blind guessing beyond the margin; None where it does not."""
    if interval is None or interval.mean is None:
        return None
    single = interval.n < 2 or interval.low is None
    score = interval.mean if single or interval.low is None else interval.low
    lead = score - guessed - (MARGIN_ONE_BATCH if single else MARGIN)
    return lead if lead >= 0 else None


def _scored(interval: Interval) -> str:
    if interval.low is None or interval.high is None:
        return f"{interval.mean:.1f} (one batch)"
    return f"{interval.mean:.1f} (interval {interval.low:.1f} to {interval.high:.1f})"


def _proven(name: str, attacks: Sequence[Record]) -> tuple[Level, str] | None:
    """Judge audits without truth by the attack's certificates; with truth, the truth has judged already."""
    truthless = [r for r in attacks if r.error is None and not _scores_known(r)]
    levels: tuple[tuple[str, Level, str], ...] = (
        ("proven", "leaks", "Private text can be read back"),
        ("likely", "partly", "Parts of the private text can probably be read back"),
    )
    for certificate, level, opening in levels:
        count = sum(r.certificates.get(certificate, 0) for r in truthless)
        if count:
            text = (
                f"{opening}: in the setting “{name}” {counted(count, 'sentence is', 'sentences are')} "
                f"{certificate} by a check against the update itself (the truth is not known)."
            )
            return level, text
    return None


def _judged(record: Record) -> bool:
    return record.error is None and (_scores_known(record) or bool(record.certificates))


def _scores_known(record: Record) -> bool:
    return any(score is not None for score in record.scores.values())


def sentence_count(record: Record) -> int:
    """Return how many sentences a batch had, marked or not."""
    return len(record.sentences) or record.batch_size


RULES.add("text", Rules(_RULES, _judge))
