"""Two sites of NVFlare in its simulator, and what their updates give away.

    python examples/nvflare/job.py --out /tmp/updates
    gradaudit attack /tmp/updates/round-1/site-1

Needs the extra `nvflare`. Two sites fine-tune MiniLM on one message each, for two rounds of one AdamW step, dropout
on. The marked lines are the audit: a filter for what comes to a client, and one for what it sends.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe import SimEnv
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from gradaudit.integrations.nvflare import AuditFilter
from gradaudit.models.packages import minilm_folder


def main() -> None:
    """Write the model that all begin with, run the job, and leave the bundles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("updates"))
    parser.add_argument("--model", default=str(minilm_folder()), help="folder of an encoder")
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    out = given.out.resolve()
    torch.manual_seed(0)
    start = AutoModelForSequenceClassification.from_pretrained(given.model, num_labels=2)
    folder = str(out / "model")
    start.save_pretrained(folder)
    AutoTokenizer.from_pretrained(given.model).save_pretrained(folder)
    torch.save(start.state_dict(), out / "start.pt")
    recipe = FedAvgRecipe(
        name="audited",
        model=start,
        initial_ckpt=str(out / "start.pt"),  # the job holds the model's configuration alone
        min_clients=2,
        num_rounds=given.rounds,
        train_script=str(Path(__file__).with_name("client.py")),
        train_args=f"--model {folder}",
    )
    # ---- the audit: a filter for what comes and one for what goes, and what is known of the training
    training = {"optimizer": "adamw", "learning_rate": 5e-5, "weight_decay": 0.01}

    def audit() -> AuditFilter:
        return AuditFilter(str(out), folder, training=training, sentences=1, dropout=True)

    recipe.add_client_input_filter(audit(), tasks=["train"])
    recipe.add_client_output_filter(audit(), tasks=["train"])
    # ----
    recipe.execute(SimEnv(num_clients=2, workspace_root=str(out / "simulator")))


if __name__ == "__main__":
    main()
