"""Join Rotten Tomatoes' two files into one labeled table that a case can name.

python benchmarks/rotten_tomatoes.py ../shared/data/rotten_tomatoes out/data/rotten_tomatoes.tsv
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    """Write label and sentence, negative ones first; the case's shuffle seed draws from both."""
    folder, target = Path(sys.argv[1]), Path(sys.argv[2])
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("w", encoding="utf8") as out:
        for label, name in enumerate(("rt-polarity.neg", "rt-polarity.pos")):
            for line in (folder / name).read_text(encoding="utf8").split("\n"):
                if line.strip():
                    out.write(f"{label}\t{' '.join(line.split())}\n")


if __name__ == "__main__":
    main()
