"""The server: an ordinary Flower server; the marked lines are the audit."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from audited.task import DECAY, RATE, load
from gradaudit.integrations.flower import AuditGrid
from gradaudit.types import LocalTraining

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run two rounds of FedAvg with two clients."""
    model, tokenizer = load()
    # ---- the audit: wrap the Grid, and say what this server knows of the training
    told = LocalTraining("adamw", RATE, weight_decay=DECAY)
    folder = str(context.run_config.get("updates", "updates"))
    grid = AuditGrid(grid, folder, model=model, tokenizer=tokenizer, training=told, sentences=1, dropout=True)
    # ----
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=2)
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(model.state_dict()),
        num_rounds=int(context.run_config.get("num-server-rounds", 2)),
    )
