"""The client: an ordinary Flower client, with nothing of the audit in it."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from audited.task import MESSAGES, load, train

app = ClientApp()


@app.train()
def fit(message: Message, context: Context) -> Message:
    """Train on this client's message from the weights that came, and send the weights back."""
    model, tokenizer = load()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    loss = train(model, tokenizer, MESSAGES[int(context.node_config["partition-id"]) % len(MESSAGES)])
    metrics = MetricRecord({"loss": loss, "num-examples": 1})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)
