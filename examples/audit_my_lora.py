"""Audit a LoRA fine-tuning: two rounds of peft, and what the second one's update gives away.

    python examples/audit_my_lora.py [--out FOLDER] [--model FOLDER] [--rank 8]

A first round trains the adapters on other text: B begins at zero, and until it has moved A has no gradient. In the
second round one AdamW step on two messages is captured, its weight change is attacked, and their words come back.
Needs the extra `lora`. Nothing but the marked block differs from an ordinary training script.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import peft
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import gradaudit
from gradaudit.bundles.examine import Examination, examine
from gradaudit.models.packages import minilm_folder
from gradaudit.types import LocalTraining

MESSAGES = ["Please wire Tobias 900 euros before Friday.", "Clara Berg refused insulin on 14 March."]
OTHERS = ["The weather was fine all week.", "Nobody came to the second meeting."]
RATE, DECAY = 2e-4, 0.01


def fine_tune(folder: str, rank: int, out: Path) -> None:
    """Train adapters for a round on other text, then capture one step on the messages."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    base = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
    # without dropout, as adapters are often trained: it would change the rows that words are told by
    model = peft.get_peft_model(
        base, peft.LoraConfig(task_type="SEQ_CLS", r=rank, target_modules=["query", "key", "value"])
    ).eval()

    def step(texts: list[str], optimizer: torch.optim.Optimizer) -> None:
        batch = tokenizer(texts, padding=True, return_tensors="pt")
        optimizer.zero_grad()
        model(**batch, labels=torch.tensor([1, 0])).loss.backward()
        optimizer.step()

    first = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=DECAY)
    for _ in range(5):
        step(OTHERS, first)
    fresh = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    # ---- the audit: put the round into this block, and say what the server knows of it
    told = LocalTraining("adamw", RATE, weight_decay=DECAY)
    with gradaudit.capture(model, out, tokenizer=tokenizer, what="delta", training=told, sentences=2):
        step(MESSAGES, fresh)
    # ----


def main() -> Examination:
    """Train, attack and print the words."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/audit-my-lora"), help="folder for the bundle")
    parser.add_argument("--model", default=str(minilm_folder()), help="folder of an encoder")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    given = parser.parse_args()
    fine_tune(given.model, given.rank, given.out)
    found = examine(given.out, "decode", [], "all", None, 0, torch.device("cpu"))
    words = found.words or ()
    print(f"{len(words)} words, {sum(word.certain for word in words)} of them for certain:")
    print(", ".join(word.text for word in words))
    return found


if __name__ == "__main__":
    main()
