"""When an evaluation cannot be trusted as it stands: each flag has a section of its name in docs/flags.md."""

FLAGS: dict[str, str] = {
    "blind-not-beaten": "the attack scored no higher than a guess made without any gradient",
    "defense-not-modeled": "the update was defended and the attack does not know of defenses: read it as a lower bound",
    "delta-as-gradient": "a weight change of several local steps was read as one gradient",
    "dropout-not-modeled": "dropout was on and the attack assumes it is off: read its score as a lower bound",
    "few-batches": "fewer than 10 batches: the interval says little",
    "full-rank": "the row space is full: span checks cannot tell tokens apart",
    "load-above-width": "more tokens than the model is wide (b > d): beyond the reach of span checks",
    "no-truth": "nobody knows the original here, so nothing was scored",
    "objective-failed": "a wrong text fits the update as well as the truth: the objective failed, not the search",
    "optimizer-failed": "the truth fits the update better than the guess: a better search would recover more",
    "random-weights": "the model has random weights: scores need not carry over to trained ones",
    "short-references": "an original of a single word: no ROUGE-2, and ROUGE is all or nothing",
    "surplus-guesses": "more was recovered than the batch holds: each original was held against the nearest of it",
    "truncated": "a text was longer than the model takes and was cut",
    "word-rows-shared": "the word-embedding gradient was shared: its nonzero rows name every word of the batch",
}
"""Name -> what it means, in one line."""
