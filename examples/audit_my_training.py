"""Audit your own training: capture one step of a plain PyTorch loop and one of transformers' Trainer, attack both.

    python examples/audit_my_training.py [--out FOLDER] [--model FOLDER] [--dropout 0.1]

Both loops fine-tune a classifier on two messages. Dropout is turned off in the model's configuration, as many
recipes do; run it with `--dropout 0.1` to see the attack fail on the same messages. Nothing but the two marked blocks
differs from an ordinary training script.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments

import gradaudit
from gradaudit.bundles.examine import examine
from gradaudit.models.packages import minilm_folder

MESSAGES = ["Please wire Tobias 900 euros before Friday.", "Clara Berg refused insulin on 14 March."]
LABELS = [1, 0]


def load(folder: str, dropout: float) -> tuple[Any, Any]:
    """Return the model to train and its tokenizer."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2, **rates)
    return model, tokenizer


def plain_loop(folder: str, dropout: float, out: Path) -> None:
    """Take one AdamW step of an ordinary loop, with gradient clipping."""
    model, tokenizer = load(folder, dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    batch = tokenizer(MESSAGES, padding=True, return_tensors="pt")
    model.train()
    # ---- the audit: put the step into this block
    with gradaudit.capture(model, out, tokenizer=tokenizer):
        loss = model(**batch, labels=torch.tensor(LABELS)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    # ----
    optimizer.zero_grad()


def trainer_step(folder: str, dropout: float, out: Path) -> None:
    """Take one step of transformers' Trainer."""
    model, tokenizer = load(folder, dropout)
    rows = [
        {"labels": label, **tokenizer(text, padding="max_length", max_length=16)}
        for text, label in zip(MESSAGES, LABELS, strict=True)
    ]
    arguments = TrainingArguments(
        output_dir=str(out.parent / "trainer"),
        max_steps=1,
        per_device_train_batch_size=2,
        learning_rate=2e-5,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    # ---- the audit
    with gradaudit.capture(model, out, tokenizer=tokenizer):
        trainer.train()
    # ----


def main() -> None:
    """Capture both steps and print what an attacker reads out of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("my-updates"))
    parser.add_argument("--model", default=None, help="a BERT-like model folder; the embedded MiniLM by default")
    parser.add_argument("--dropout", type=float, default=0.0)
    given = parser.parse_args()
    folder = given.model or str(minilm_folder())
    for name, step in (("plain loop", plain_loop), ("Trainer", trainer_step)):
        bundle = given.out / name.replace(" ", "-").lower()
        step(folder, given.dropout, bundle)
        found = examine(bundle, "dager", [], "all", None, 0, torch.device("cpu"))
        print(f"{name}: {bundle}")
        for text in found.texts or ("(nothing recovered, which is no sign of safety)",):
            print(f"  {text}")
        for note in found.notes:
            print(f"  note: {note}")


if __name__ == "__main__":
    main()
