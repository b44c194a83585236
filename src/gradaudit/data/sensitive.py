"""Which parts of a text are likely sensitive, by their form alone."""

import re

_TITLES = frozenset(["Mr", "Mrs", "Ms", "Miss", "Mx", "Dr", "Prof", "Professor", "Sir", "Madam"])
_PRONOUN = re.compile(r"I(['’].*)?")
_SENTENCE_END = re.compile(r"[.!?][\"'”’)\]]*$")


def spans(text: str) -> list[str]:
    """Return the likely sensitive substrings of a text, each once, in order of appearance.

    Three forms count: a word with a digit in it ("555-0147", "14:30", "3.5"; outer punctuation and currency
    signs left off), an e-mail address, and capitalized words that do not start a sentence, adjacent ones
    joined ("Anna Berg"). Titles ("Dr.") and "I" do not count, and a title's dot does not end a sentence.

    Limits: missed are a name that starts a sentence or is written in lower case, particles ("van der") and
    numbers in words; counted too much is any other capitalized word ("MRI", the first word of a quotation).
    A text without capitals yields only words with digits and e-mail addresses.

    Args:
        text: one text, in its original case.
    """
    found: list[str] = []
    run: tuple[int, int] | None = None  # bounds of the last capitalized run
    starts_sentence = True
    previous_end = 0
    for match in re.finditer(r"[^\s—…]+", text):
        starts_sentence = starts_sentence or "\n" in text[previous_end : match.start()]
        previous_end = match.end()
        start, end = _core(text, match.start(), match.end())
        word = text[start:end]
        title = word in _TITLES
        initial = len(word) == 1 and word.isupper() and word != "I" and text[end : end + 1] == "."
        if re.search(r"\d", word) or re.search(r"\w@\w", word):
            found.append(word)
        elif word[:1].isupper() and not (starts_sentence or title or _PRONOUN.fullmatch(word)):
            if run is not None and text[run[1] : start] == " ":
                start = run[0]
                found.pop()
            found.append(text[start:end])
            # the dot of an initial does not part it from the name: "J. Berg"
            run = (start, end + initial)
        ends_sentence = _SENTENCE_END.search(match.group()) is not None and not (title or initial)
        starts_sentence = ends_sentence or (starts_sentence and not word)
    return list(dict.fromkeys(found))


def _core(text: str, start: int, end: int) -> tuple[int, int]:
    """Return the bounds of a word without its outer punctuation and possessive ending."""
    while start < end and not text[start].isalnum():
        start += 1
    while start < end and not text[end - 1].isalnum():
        end -= 1
    if text[end - 2 : end] in ("'s", "’s") and end - 2 > start:
        end -= 2
    return start, end
