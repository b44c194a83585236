"""What NVIDIA FLARE's real simulator does with `AuditFilter`, without it, and with one that can write nothing.

    OMP_NUM_THREADS=1 python benchmarks/nvflare_rounds.py --write benchmarks/results/integrations/nvflare-rounds.md

Needs the extra `nvflare`. The client of examples/nvflare, two sites, MiniLM, one AdamW step a round, seeded, so that
the global model at the end must be the same, bit by bit, whatever was recorded.
"""

from __future__ import annotations

import hashlib
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from grid import commit, made, markdown, options, write_table

EXAMPLE = Path(__file__).parent.parent / "examples" / "nvflare"
CLIENT = """
import runpy, sys, time
import nvflare.client as flare
import torch
torch.set_num_threads(1)
torch.manual_seed(7)
real = flare.receive
def receive(*given, **named):
    got = real(*given, **named)
    with open(HERE + "/" + flare.get_site_name() + ".times", "a") as file:
        file.write(f"{time.time()}\\n")
    torch.manual_seed(7)  # NVFlare's own threads share the generator
    return got
flare.receive = receive
sys.argv[0] = EXAMPLE
runpy.run_path(EXAMPLE, run_name="__main__")
"""
JOB = """
import torch
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe import SimEnv
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from gradaudit.integrations.nvflare import AuditFilter
from gradaudit.models.packages import minilm_folder
torch.manual_seed(0)
model = AutoModelForSequenceClassification.from_pretrained(str(minilm_folder()), num_labels=2)
model.save_pretrained(HERE + "/model")
AutoTokenizer.from_pretrained(str(minilm_folder())).save_pretrained(HERE + "/model")
torch.save(model.state_dict(), HERE + "/start.pt")
recipe = FedAvgRecipe(name="job", model=model, initial_ckpt=HERE + "/start.pt", min_clients=2, num_rounds=ROUNDS,
                      train_script=HERE + "/client.py", train_args="--model " + HERE + "/model")
if AUDIT:
    for add in (recipe.add_client_input_filter, recipe.add_client_output_filter):
        add(AuditFilter(HERE + "/updates", HERE + "/model", sentences=1, dropout=True, most=100), tasks=["train"])
recipe.execute(SimEnv(num_clients=2, workspace_root=HERE + "/work"))
"""


def job(here: Path, rounds: int, audit: bool) -> tuple[float, list[float], str]:
    """Run a job; return its seconds, those of its rounds, and the hash of the global model at its end."""
    told = f"HERE = {str(here)!r}\nEXAMPLE = {str(EXAMPLE / 'client.py')!r}\nROUNDS, AUDIT = {rounds}, {audit}\n"
    (here / "client.py").write_text(told + CLIENT, encoding="utf8")
    (here / "job.py").write_text(told + JOB, encoding="utf8")
    began = time.perf_counter()
    done = subprocess.run([sys.executable, str(here / "job.py")], cwd=here, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - began
    if done.returncode:
        raise RuntimeError(done.stdout[-3000:] + done.stderr[-3000:])
    times = [float(line) for line in (here / "site-1.times").read_text("utf8").split()]
    weights = torch.load(next(here.glob("work/**/FL_global_model.pt")), weights_only=True)["model"]
    whole = hashlib.sha256()
    for name, value in sorted(weights.items()):
        whole.update(name.encode() + torch.as_tensor(value).numpy().tobytes())
    return seconds, [b - a for a, b in itertools.pairwise(times)], whole.hexdigest()[:12]


def main() -> None:
    """Run the three jobs, and print or write the table."""
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", type=Path, default=None, help="Markdown file for the table")
    given = parser.parse_args()
    commit()
    rows = []
    for title in ("no filter", "AuditFilter", "AuditFilter, its folder is a file"):
        with tempfile.TemporaryDirectory() as place:
            here = Path(place)
            if title.endswith("a file"):
                (here / "updates").write_text("no folder", encoding="utf8")
            seconds, each, model = job(here, given.rounds, title != "no filter")
            bundles = len(list(here.glob("updates/*/*/manifest.json")))
        rows.append([title, f"{seconds:.0f}", f"{statistics.median(each):.1f}", str(bundles), f"`{model}`"])
        print(rows[-1], flush=True)
    columns = ["job", "seconds in all", "a round's", "bundles", "sha256 of the global model"]
    table = markdown(columns, rows)
    if given.write is not None:
        head = f"{made()} Two sites, MiniLM, {given.rounds} rounds of one AdamW step; a round's are medians of site 1."
        write_table(given.write, head, table)


if __name__ == "__main__":
    main()
