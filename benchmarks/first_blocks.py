"""Auditing a large model's update with its first blocks alone: peak memory and time of `gradaudit attack --blocks`.

    OMP_NUM_THREADS=1 python benchmarks/first_blocks.py --write benchmarks/results/first-blocks.md

SmolLM2's whole update, with all of the model and with two blocks of it; and an update of a model of Llama-2-7B's shape
(random weights, half precision, shards made here: embeddings and the first three blocks of 32; the client's gradient is
of these three), of which the other shards do not even exist.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from grid import DATA, OFF, commit, made, options, write_table
from safetensors.torch import save_file

from gradaudit.audit.batch import sent
from gradaudit.audit.prepare import prepare, private_batch
from gradaudit.bundles.bundle import MANIFEST, save_bundle
from gradaudit.case import parse_case
from gradaudit.machine import ready_process

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForSequenceClassification"], "vocab_size": 32000,
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "dtype": "float16",
}  # fmt: skip
"""The published shape of Llama-2-7B."""
_PEAK = (
    "import resource, runpy, sys; sys.argv = sys.argv[1:]\n"
    "try: runpy.run_module('gradaudit', run_name='__main__')\n"
    "finally: print('peak', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)"
)


def attack(bundle: Path, blocks: int | None) -> tuple[list[tuple[int, ...]], float, float, float]:
    """Return what `gradaudit attack` read, its peak memory in MiB, and its seconds in all and in the attack."""
    more = ["--blocks", str(blocks)] if blocks is not None else []
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, "gradaudit", "attack", str(bundle), "--json", *more],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if not done.stdout:
        raise RuntimeError(done.stderr)
    found = json.loads(done.stdout)
    peak = int(done.stderr.rsplit("peak", 1)[1]) / 1024
    return [tuple(row) for row in found["ids"]], peak, time.perf_counter() - began, found["seconds"]


def shards(folder: Path, blocks: int, tokenizer: Path) -> None:
    """Write the first blocks of a model of Llama-2-7B's shape, one shard each, and an index that names them all."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(LLAMA), encoding="utf8")
    for path in tokenizer.glob("*token*"):
        shutil.copy(path, folder)
    rng = torch.Generator().manual_seed(0)
    d, wide = LLAMA["hidden_size"], LLAMA["intermediate_size"]
    assert isinstance(d, int)
    assert isinstance(wide, int)

    def drawn(*shape: int) -> torch.Tensor:
        return (0.02 * torch.randn(shape, generator=rng)).half()

    where: dict[str, str] = {}

    def write(name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, folder / name, metadata={"format": "pt"})
        where.update(dict.fromkeys(tensors, name))

    write("embeddings.safetensors", {"model.embed_tokens.weight": drawn(32000, d)})
    for n in range(blocks):
        stem = f"model.layers.{n}."
        tensors = {f"{stem}self_attn.{r}_proj.weight": drawn(d, d) for r in "qkvo"}
        tensors |= {f"{stem}mlp.{r}_proj.weight": drawn(wide, d) for r in ("gate", "up")}
        tensors |= {f"{stem}mlp.down_proj.weight": drawn(d, wide)}
        norms = ("input_layernorm", "post_attention_layernorm")
        tensors |= {f"{stem}{norm}.weight": torch.ones(d).half() for norm in norms}
        write(f"block-{n}.safetensors", tensors)
    last = {"model.norm.weight": torch.ones(d).half(), "score.weight": drawn(2, d)}
    write("head.safetensors", last)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf8")


def main() -> None:
    """Measure both, and print or write the table."""
    parser = options(__doc__)
    parser.add_argument("--write", type=Path, default=None, help="Markdown file for the table")
    parser.add_argument("--size", type=int, default=8, help="batch size")
    given = parser.parse_args()
    ready_process()
    commit()
    lines = [
        "| update | blocks loaded | weights read MiB | peak MiB | seconds in all | of the attack | sentences exact |\n"
        + "|---" * 7 + "|"
    ]  # fmt: skip
    data = DATA["cola"] | {"shuffle_seed": 202, "batch_size": given.size, "batches": 1}
    with tempfile.TemporaryDirectory(dir="out") as place:
        folder = Path(place)
        case = {"name": "first blocks", "data": data, "client": OFF, "attack": {"name": "dager"}}
        from gradaudit.models import packages

        smollm2 = packages.smollm2_folder()
        shards(folder / "llama-2-7b-shaped", 3, smollm2)
        for name, model, layers, ways in (
            ("SmolLM2-135M, 30 blocks", "smollm2", None, (None, 2)),
            ("Llama-2-7B-shaped", str(folder / "llama-2-7b-shaped"), 3, (2,)),
        ):
            ready = prepare(parse_case(case | {"model": model, "layers": layers}), Path.cwd(), torch.device("cpu"))
            update, seen = sent(ready, private_batch(ready, 0), 0)
            truth = private_batch(ready, 0).sequences()
            if layers is not None:  # what a server has: of the whole model, and of its first blocks' attention
                keep = [v.parameter for n in (0, 1) for r in "qkv" for v in ready.model.views(n, r)]
                update = type(update)(**{**vars(update), "tensors": {n: update.tensors[n] for n in keep}})
            bundle = save_bundle(folder / "update", ready.model, update, seen.knowledge)
            if layers is not None:
                manifest = json.loads((bundle / MANIFEST).read_text("utf8"))
                manifest["model"]["layers"] = None
                (bundle / MANIFEST).write_text(json.dumps(manifest), encoding="utf8")
            del ready, update, seen
            for blocks in ways:
                found, peak, seconds, own = attack(bundle, blocks)
                exact = sum(tuple(s) in found for s in truth)
                read = weights(Path(model) if layers else smollm2, blocks)
                lines.append(
                    f"| {name} | {blocks or 'all'} | {read:.0f} | {peak:.0f} | {seconds:.1f} | {own:.1f} "
                    f"| {exact}/{len(truth)} |"
                )
                print(lines[-1], flush=True)
    head = f"{made()} CoLA, B = {given.size}, dropout off, float32 in memory."
    if given.write is not None:
        write_table(given.write, head, "\n".join(lines))


def weights(folder: Path, blocks: int | None) -> float:
    """Return the MiB that the parameters of a folder's first blocks take in float32."""
    from gradaudit.models.spec import ModelSpec
    from gradaudit.models.zoo import whole_shapes

    every = whole_shapes(ModelSpec(str(folder)))
    some = [s for n, s in every.items() if blocks is None or ".layers." not in n or int(n.split(".")[2]) < blocks]
    return sum(torch.Size(s).numel() for s in some) * 4 / 2**20


if __name__ == "__main__":
    main()
