"""What both sides share: the model, and how a client trains it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from gradaudit.models.packages import minilm_folder

MESSAGES = [
    "Clara Berg refused insulin on 14 March.",
    "Please wire Tobias 900 euros before Friday.",
]
"""What the two clients hold: one message each, so that the example is quick to attack."""
RATE, DECAY = 5e-5, 0.01


def load() -> tuple[Any, Any]:
    """Return the model and its tokenizer: MiniLM with a head of its own, the same on both sides."""
    torch.manual_seed(0)
    folder = str(minilm_folder())
    return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2), AutoTokenizer.from_pretrained(
        folder
    )


def train(model: Any, tokenizer: Any, text: str) -> float:
    """Take one step of AdamW on a message, dropout on, and return the loss."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    loss = model(**tokenizer([text], return_tensors="pt"), labels=torch.tensor([1])).loss
    loss.backward()
    optimizer.step()
    return float(loss)
