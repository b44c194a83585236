"""The client: an ordinary script of NVFlare's client API, with nothing of the audit in it."""

from __future__ import annotations

import argparse

import nvflare.client as flare
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

MESSAGES = {
    "site-1": "Clara Berg refused insulin on 14 March.",
    "site-2": "Please wire Tobias 900 euros before Friday.",
}


def main() -> None:
    """Take one step of AdamW on this site's message in every round, dropout on."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    folder = parser.parse_args().model
    flare.init()
    text = MESSAGES[flare.get_site_name()]
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    while flare.is_running():
        got = flare.receive()
        model.load_state_dict({name: torch.as_tensor(value) for name, value in got.params.items()})
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.01)
        model(**tokenizer([text], return_tensors="pt"), labels=torch.tensor([1])).loss.backward()
        optimizer.step()
        state = {name: value.detach().clone() for name, value in model.state_dict().items()}
        flare.send(flare.FLModel(params=state, meta={"NUM_STEPS_CURRENT_ROUND": 1}))


if __name__ == "__main__":
    main()
