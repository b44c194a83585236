"""Text for an attacker who has none: words drawn one by one by their frequency in a language (package wordfreq)."""

import numpy as np

from gradaudit.errors import BadInputError

_WORDS = 50_000
"""Most frequent words that are drawn from: 96% of English text (wordfreq 3.1)."""
_EACH = 16
"""Words a text: about as many as a sentence has."""


def drawn_texts(language: str, count: int, seed: int) -> tuple[str, ...]:
    """Return texts of words drawn independently, each with its frequency in the language.

    Args:
        language: code, as "en" or "de".
        count: of texts.
        seed: numpy seed of the draw.

    Raises:
        BadInputError: the extra `words` is missing, or the package has no such language.

    Source: LTI, section 3.3 (LTI-P), for an attacker without counts of its own.
    """
    try:
        import wordfreq
    except ImportError:
        raise BadInputError("words by their frequency need wordfreq: pip install 'gradaudit[words]'") from None
    known = sorted(wordfreq.available_languages())
    if language not in known:  # the package itself takes another language's, silently but for a log line
        raise BadInputError(f"wordfreq has no words of language '{language}'; it has {', '.join(known)}")
    words = wordfreq.top_n_list(language, _WORDS)
    shares = np.array([wordfreq.word_frequency(word, language) for word in words])
    draw = np.random.default_rng(seed)
    chosen = draw.choice(len(words), size=(count, _EACH), p=shares / shares.sum())
    return tuple(" ".join(words[n] for n in row) for row in chosen)
