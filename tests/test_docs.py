"""The pages: complete against the code, links that lead somewhere, commands that parse, example code that runs."""
# Over 400 lines: every page is checked with the same few readers of Markdown, which belong together.

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, get_args

import click
import pytest
import torch
import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

import tiny_models
from gradaudit import registry
from gradaudit.accounting.claim import parse_claims
from gradaudit.bundles.bundle import BundleManifest, load_bundle
from gradaudit.bundles.examine import Examination
from gradaudit.bundles.model import ModelEntry
from gradaudit.case import Case, parse_case
from gradaudit.catalog import details, listing
from gradaudit.cli import app
from gradaudit.client.client import Client
from gradaudit.errors import BadInputError, ExitCode, NotSupportedError
from gradaudit.flags import FLAGS
from gradaudit.record import Diagnosis, Interval, Pictures, Record, RunInfo, Summary, Texts
from gradaudit.streams import stream
from gradaudit.types import Given, Knowledge, Observation

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")])
APACHE_2 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
"""sha256 of https://www.apache.org/licenses/LICENSE-2.0.txt."""

_FENCE = re.compile(r"^```([a-z]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf8")


def prose(text: str) -> str:
    """A page without its code blocks, where a "#" is a comment and a "[" is no link."""
    return _FENCE.sub("", text)


def blocks(text: str, language: str) -> list[str]:
    return [body for found, body in _FENCE.findall(text) if found == language]


def headings(text: str, level: int = 2) -> list[str]:
    return re.findall(rf"^{'#' * level} (.+)$", prose(text), re.MULTILINE)


def section(text: str, title: str) -> str:
    """What stands between a heading and the next one of its level or above, code blocks left out."""
    level, rest = re.split(rf"^(#+) {re.escape(title)}$", prose(text), maxsplit=1, flags=re.MULTILINE)[1:]
    return re.split(rf"^#{{1,{len(level)}}} ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def coded(text: str) -> set[str]:
    """Everything a page sets in `code`."""
    return set(re.findall(r"`([^`\n]+)`", prose(text)))


def anchor(heading: str) -> str:
    """GitHub's name for a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


# flags, attacks: a section each, and none for what is not there


def test_every_flag_has_a_section_and_every_section_a_flag():
    text = page("docs/flags.md")
    assert headings(text) == sorted(FLAGS)
    for name in FLAGS:
        for part in ("**Meaning.**", "**Raised when**", "**Why it matters.**", "**What to do.**"):
            assert section(text, name).count(part) == 1, (name, part)


def test_every_attack_has_a_section_and_every_section_an_attack():
    text = page("docs/attacks.md")
    named = [title for title in headings(text) if title in registry.known("attack") or "_" in title or title.islower()]
    assert sorted(named) == [item["name"] for item in listing("attacks")]
    for name in named:
        body = section(text, name)
        for part in ("**What it does.**", "**Needs.**", "**Differs from its source.**", "**Use it**", "**Limits.**"):
            assert body.count(part) == 1, (name, part)
        shown = details("attack", name)
        assert set(shown["needs"]) <= coded(body), f"{name}: a fact it needs is not named"


def test_every_defense_has_a_section_and_every_section_a_defense():
    text = page("docs/defenses.md")
    names = [item["name"] for item in listing("defenses")]
    assert sorted(t for t in headings(text) if t.islower()) == names
    for name in names:
        for part in ("**What it does.**", "**Promises.**", "**Does not.**", "**Use it**"):
            assert section(text, name).count(part) == 1, (name, part)


def test_attack_fields_that_pages_name_are_fields():
    text = page("docs/attacks.md")
    for name, attack in registry.known("attack").items():
        own = {f.name for f in fields(attack)}
        for setting in re.findall(r"`(\w+) = [^`]+`", section(text, name)):
            case_keys = {key for _, table in tables() for key in table.model_fields}
            assert setting in own | case_keys, f"{name}: '{setting}' is neither its field nor a key of a case"


# the case file


def tables() -> Iterator[tuple[str, type[BaseModel]]]:
    """Every table of a case, the top first, with its name."""
    yield "", Case
    for key, field in Case.model_fields.items():
        table = table_of(field)
        if table is not None:
            yield key, table


def table_of(field: FieldInfo) -> type[BaseModel] | None:
    """The model behind a field that is a table, None for a plain key."""
    options = (field.annotation, *get_args(field.annotation))
    return next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), None)


def default_of(field: FieldInfo) -> str:
    """A key's default as one writes it in TOML."""
    if field.is_required():
        return "must be set"
    value = field.get_default(call_default_factory=True)
    return "not set" if value is None else f"`{json.dumps(list(value) if isinstance(value, tuple) else value)}`"


def reference() -> dict[str, list[str]]:
    """The lines of docs/case-file.md's tables, one list a TOML table, made from the models' own descriptions."""
    out: dict[str, list[str]] = {}
    for name, table in tables():
        plain = {k: f for k, f in table.model_fields.items() if table_of(f) is None}
        out[name] = [f"| `{key}` | {default_of(f)} | {f.description} |" for key, f in plain.items()]
    return out


@pytest.mark.parametrize("table", [name for name, _ in tables()])
def test_the_reference_has_every_key_with_its_default_and_meaning(table: str):
    text = page("docs/case-file.md")
    body = section(text, f"`[{table}]`" if table else "Top of the file")
    own = [line for line in reference()[table] if table != "public" or line not in reference()["data"]]
    missing = [line for line in own if line not in body]
    assert not missing, "put these lines into docs/case-file.md:\n" + "\n".join(missing)
    described = re.findall(r"^\| `(\w+)` \|", body, re.MULTILINE)
    assert len(described) == len(own), f"[{table}] describes keys that are not there: {described}"
    as_in_data = [line.split("`")[1] for line in reference()[table] if line not in own]
    assert all(f"`{key}`" in body for key in as_in_data)


def in_pages(language: str) -> list[Any]:
    """Every code block of a language as a test's parameters: page, number on the page, text."""
    return [
        pytest.param(body, id=f"{path.name}-{number}")
        for path in PAGES
        for number, body in enumerate(blocks(path.read_text(encoding="utf8"), language), 1)
    ]


@pytest.mark.parametrize("body", in_pages("toml"))
def test_every_toml_block_is_a_case_or_a_claim(body: str, word_rows: ModuleType):
    data = tomllib.loads(body)
    if "claim" in data:
        parse_claims(data["claim"])
        return
    # what is shown without an attack is a part of a case: it must fit beside one
    parse_case({"attack": {"name": "blind"}} | data)


def test_the_reference_names_what_attacks_and_keys_may_be_called():
    text = page("docs/case-file.md")
    for item in listing("models") + listing("metrics"):
        assert f"`{item['name']}`" in text, item["name"]
    for key, head in (("defenses", "## `[[defense]]`"), ("attacks", "## `[attack]`")):
        section = text.split(head)[1].split("\n## ")[0]
        for item in listing(key):
            assert f"`{item['name']}`" in section, item["name"]


def test_the_overview_of_attacks_has_all_of_them():
    table = page("docs/attacks.md").split("\n## ")[0]
    for item in listing("attacks"):
        assert f"| [{item['name']}](#{item['name']}) |" in table, item["name"]


# the site


def test_every_page_is_in_the_contents_of_the_site():
    listed = [line for body in blocks_of("toctree") for line in body.splitlines() if line and not line.startswith(":")]
    assert sorted(listed) == sorted(path.stem for path in (ROOT / "docs").glob("*.md") if path.stem != "index")


def test_the_generator_of_the_site_is_pinned_exactly():
    needed = tomllib.loads(page("pyproject.toml"))["project"]["optional-dependencies"]["docs"]
    assert needed
    assert all(re.fullmatch(r"[\w-]+==[\d.]+", one) for one in needed)


def blocks_of(directive: str) -> list[str]:
    return re.findall(rf"^```\{{{directive}\}}\n(.*?)^```$", page("docs/index.md"), re.MULTILINE | re.DOTALL)


def test_style_has_twenty_sentences_before_and_after():
    rows = [line for line in page("docs/style.md").splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 20


# the command line

ROOT_COMMAND = typer.main.get_command(app)
assert isinstance(ROOT_COMMAND, click.Group)
COMMANDS: dict[str, click.Command] = ROOT_COMMAND.commands


def options_of(command: click.Command) -> list[str]:
    return [name for p in command.params if isinstance(p, click.Option) for name in p.opts + p.secondary_opts]


def command_lines(body: str) -> list[list[str]]:
    """The arguments of every `gradaudit ...` line of a code block, without comments and redirections."""
    found = []
    for line in body.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars="<>|&;")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if not set(word) <= set("<>|&;"):
                words.append(word)
                continue
            if words and words[0].endswith("gradaudit"):
                found.append(words[1:])
            words = []
    return found


def every_command_line() -> list[Any]:
    return [
        pytest.param(words, id=f"{path.name}: {' '.join(words)}")
        for path in PAGES
        for language in ("", "sh", "console")
        for body in blocks(path.read_text(encoding="utf8"), language)
        for words in command_lines(body)
    ]


@pytest.mark.parametrize("words", every_command_line())
def test_every_command_line_in_a_block_parses(words: list[str]):
    if words[-1] == "--help":  # every command has it, and prints it when asked
        assert words[:-1] == [] or words[0] in COMMANDS
        return
    at = next((n for n, w in enumerate(words) if w in COMMANDS), len(words))
    before = [w for w, last in zip(words[:at], ["", *words], strict=False) if last != "--threads"]
    assert set(before) <= set(options_of(ROOT_COMMAND))
    if at == len(words):  # gradaudit --version
        return
    name = words[at]
    COMMANDS[name].make_context(name, words[at + 1 :])  # parses, and runs nothing


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_commands_named_in_the_text_exist(path: Path):
    for text in coded(path.read_text(encoding="utf8")):
        words = text.split()
        if words[0] != "gradaudit" or len(words) < 2:
            continue
        command = ROOT_COMMAND if words[1].startswith("-") else COMMANDS[words[1]]
        for word in words[1:]:
            if word.startswith("--"):
                assert word.split("=")[0] in options_of(command), text


def test_the_command_line_page_has_a_section_a_command_with_all_its_options():
    text = page("docs/cli.md")
    shown = [title for title in headings(text, 3) if title.startswith("`gradaudit ")]
    assert [title.strip("`").split()[1] for title in shown] == list(COMMANDS)
    for title, command in zip(shown, COMMANDS.values(), strict=True):
        body = section(text, title)
        described = re.findall(r"^\| `(--[\w-]+)", body, re.MULTILINE)
        assert sorted(described) == sorted(o for o in options_of(command) if o != "--help"), title
        for argument in (p for p in command.params if isinstance(p, click.Argument)):
            assert f"`{argument.make_metavar(click.Context(command)).strip('[]{}')}`" in body, (title, argument.name)


def test_the_command_line_page_has_every_exit_code():
    body = section(page("docs/cli.md"), "Exit codes")
    assert [int(code) for code in re.findall(r"^\| (\d) \|", body, re.MULTILINE)] == [int(code) for code in ExitCode]


def first_column(body: str) -> list[str]:
    return re.findall(r"^\| `([\w.]+)` \|", body, re.MULTILINE)


def test_the_json_of_run_is_described_key_by_key():
    text = page("docs/cli.md")
    long = {"spectrum", "sentences", "images", "images_baseline"}  # in records.jsonl alone
    record = section(text, "A record line")
    assert first_column(record) == [k for k in Record.model_fields if k not in long]
    for key in (*long, *Diagnosis.model_fields):
        assert f"`{key}`" in record
    summary = section(text, "The summary line")
    assert first_column(summary) == [*Summary.model_fields, "intervals", "baseline_intervals"]
    for key in Interval.model_fields:
        assert f"`{key}`" in summary


def test_the_json_of_attack_is_described_key_by_key():
    empty = Examination("blind", "", Knowledge(), (), (), None, None, (), {}, (), 0.0)
    assert first_column(section(page("docs/cli.md"), "JSON of `attack`")) == list(empty.as_json())


def test_the_files_of_a_run_are_described():
    body = section(page("docs/cli.md"), "Folders and files")
    for key in {*RunInfo.model_fields, *Texts.model_fields, *Pictures.model_fields, "spectrum", "sentences"}:
        assert f"`{key}`" in body, key


def test_the_manifest_is_described_key_by_key():
    described = first_column(section(page("docs/bundles.md"), "The manifest"))
    keys = [k for k in BundleManifest.model_fields if k != "model"]
    assert sorted(described) == sorted([*keys, *(f"model.{k}" for k in ModelEntry.model_fields)])


def test_the_code_of_the_bundle_page_runs(load, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = load("gpt2").module
    tokenizer = load("gpt2").tokenizer
    texts = tiny_models.sentences([4, 3], seed=2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batch = dict(tokenizer(texts, padding=True, return_tensors="pt"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    labels = torch.tensor([0, 1])

    def train() -> None:
        model(**batch, labels=labels).loss.backward()
        optimizer.step()

    scope: dict[str, Any] = {"model": model, "tokenizer": tokenizer, "batch": batch, "labels": labels}
    scope |= {"optimizer": optimizer, "trainer": SimpleNamespace(train=train), "images": torch.rand(2, 1, 28, 28)}
    made: dict[str, Any] = {}
    try:
        for body in blocks(page("docs/bundles.md"), "python"):
            made = dict(scope)  # a block's own names, as its model of images, do not reach the next
            exec(compile(body, "docs/bundles.md", "exec"), made)  # noqa: S102 - the page's own code
            model.load_state_dict(before)
            optimizer.zero_grad()
    finally:
        model.load_state_dict(before)
        model.eval()
        model.zero_grad()
    assert sorted(made["found"].sentences) == sorted(texts)
    assert load_bundle(tmp_path / "my-images").manifest.model.image == (1, 28, 28)
    assert load_bundle(tmp_path / "trainer-update").manifest.kind == "gradient"
    assert load_bundle(tmp_path / "my-delta").manifest.kind == "delta"
    assert {p.name for p in (tmp_path / "my-update").iterdir()} == {"manifest.json", "update.safetensors", "model"}


# adding an attack


@pytest.fixture
def word_rows(tmp_path: Path) -> Iterator[ModuleType]:
    """The page's example attack, imported as a module; out of the registry again after."""
    code = next(b for b in blocks(page("docs/adding_an_attack.md"), "python") if "@register" in b)
    before = registry.known("attack")
    (tmp_path / "word_rows.py").write_text(code, encoding="utf8")
    spec = importlib.util.spec_from_file_location("word_rows", tmp_path / "word_rows.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["word_rows"] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        registry._entries["attack"].pop("word_rows", None)
        del sys.modules["word_rows"]
    assert registry.known("attack") == before


def test_the_example_is_as_long_as_the_page_says():
    code = next(b for b in blocks(page("docs/adding_an_attack.md"), "python") if "@register" in b)
    assert 30 <= len(code.splitlines()) <= 55
    assert max(map(len, code.splitlines())) <= 120


def test_the_example_is_known_to_the_command_line(word_rows: ModuleType):
    about = "Guess one sentence of all words whose row of the word-embedding gradient is not zero."
    assert {"name": "word_rows", "about": about} in listing("attacks")
    assert [f["name"] for f in details("attack", "word_rows")["fields"]] == ["floor", "most"]
    with pytest.raises(BadInputError, match="did you mean 'most'"):
        parse_case({"attack": {"name": "word_rows", "mots": 3}})


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
@pytest.mark.parametrize("dropout", [False, True])
def test_the_example_finds_the_words_of_the_batch(load, word_rows: ModuleType, family: str, dropout: bool):
    model = load(family)
    batch = tiny_models.batch_of(model, tiny_models.sentences([4, 7, 3], seed=5))
    seen = tiny_models.seen_of(Client(model, dropout=dropout), batch)
    found = registry.build("attack", "word_rows", {})(seen, stream(0, "attack"))
    assert len(found.sequences) == 1
    words = {token for sentence in batch.sequences() for token in model.content(sentence)}
    assert sorted(model.content(found.sequences[0])) == sorted(words)
    assert found == registry.build("attack", "word_rows", {})(seen, stream(0, "attack"))
    fewer = registry.build("attack", "word_rows", {"most": 5})(seen, stream(0, "attack"))
    assert len(model.content(fewer.sequences[0])) == 5


def test_the_example_says_what_it_cannot_do(load, word_rows: ModuleType):
    attack = registry.build("attack", "word_rows", {})
    model = load("bert")
    batch = tiny_models.batch_of(model, tiny_models.sentences([4, 3], seed=5))
    frozen = tiny_models.seen_of(Client(model, freeze=("embeddings",)), batch)
    with pytest.raises(NotSupportedError, match="was not shared"):
        attack(frozen, stream(0, "attack"))
    noise = registry.build("defense", "gaussian", {"sigma": 0.1})
    noisy = tiny_models.seen_of(Client(model, defenses=(noise,)), batch)
    found = attack(noisy, stream(0, "attack"))
    assert found.sequences == ()
    assert found.notes[0].startswith("not identifiable")


def test_the_page_lists_what_an_observation_holds():
    body = section(page("docs/adding_an_attack.md"), "The wall")
    assert first_column(body) == [f.name for f in fields(Observation)]
    for fact in fields(Given):
        assert fact.name.replace("_", " ") in body, fact.name


# links and license


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_every_relative_link_leads_somewhere(path: Path):
    text = prose(path.read_text(encoding="utf8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, part = target.partition("#")
        other = (path.parent / file).resolve() if file else path
        assert other.exists(), f"{path.name}: {target} is not there"
        assert other.is_relative_to(ROOT), f"{path.name}: {target} lies outside the repository"
        if part:
            there = re.findall(r"^#+ (.+)$", prose(other.read_text(encoding="utf8")), re.MULTILINE)
            assert part in [anchor(title) for title in there], f"{path.name}: {target} has no such heading"


def test_files_that_pages_name_exist():
    for path in PAGES:
        for name in coded(path.read_text(encoding="utf8")):
            if re.fullmatch(r"(src|tests|docs|cases|benchmarks|examples)/[\w./-]*", name):
                planned = name.endswith("word_rows.py")
                assert planned or (ROOT / name).exists(), f"{path.name}: {name} is not there"
            elif "/" in name and re.fullmatch(r"[a-z_/]+\.py", name):
                assert (ROOT / "src/gradaudit" / name).exists(), f"{path.name}: {name} is not in the package"


def test_the_license_is_the_whole_apache_license():
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == APACHE_2


def test_the_readme_has_700_to_900_words():
    """As a reader counts: prose, headings and tables; no code blocks, pictures, markup or where links lead."""
    page = (ROOT / "README.md").read_text(encoding="utf8")
    for markup, left in ((r"(?s)```.*?```", ""), (r"!\[.*?\]\(.*?\)", ""), (r"\[(.*?)\]\(.*?\)", r"\1")):
        page = re.sub(markup, left, page)
    words = [word for word in re.split(r"[\s|]+", page) if re.search(r"\w", word)]
    assert 700 <= len(words) <= 900


def test_every_table_of_results_is_linked_from_a_page():
    folder = ROOT / "benchmarks/results"
    links = [(one, to) for one in PAGES for to in re.findall(r"\]\(([^)#\s]+)", prose(one.read_text("utf8")))]
    linked = {(one.parent / to).resolve() for one, to in links}
    assert {one.relative_to(folder) for one in folder.rglob("*.md") if one.resolve() not in linked} == set()
