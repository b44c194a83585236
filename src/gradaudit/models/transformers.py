"""A transformers model as what attacks know as `TextModel`: pure functions by parameter name.

One file because it is one class, whose methods all work on the same patched modules.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from transformers.cache_utils import DynamicCache

from gradaudit.errors import BadInputError, NotSupportedError, unknown_name
from gradaudit.models.families import family_of
from gradaudit.models.family import Family
from gradaudit.models.model import FirstInputs, Model, Past, SpecialTokens, Weights
from gradaudit.models.spec import ModelSpec
from gradaudit.models.taps import Dropout, DropoutSites, Traced, tapped
from gradaudit.models.views import ROLES, View

_ADAPTER = "lora_A.default.weight"


class _Program(nn.Module):
    """The computations we need, as one module, so that `functional_call` can put parameters into any of them."""

    def __init__(self, module: nn.Module, family: Family, task: str, loaded: int | None) -> None:
        super().__init__()
        self.loaded = loaded
        self.module: Any = module
        self.family = family
        self.task = task

    def forward(self, ids: Tensor | None, embeddings: Tensor | None, mask: Tensor) -> Tensor:
        if self.loaded is not None:
            raise NotSupportedError(
                f"only the first {self.loaded} blocks of the model were loaded, and this needs its output; leave "
                "--blocks away"
            )
        family = self.family
        given = ids if ids is not None else embeddings
        assert given is not None
        length = given.shape[1]
        positions = torch.arange(length, device=given.device).expand(given.shape[0], length)
        allowed = additive(self._allowed(mask), self._dtype())
        word = {"input_ids": ids} if ids is not None else {"inputs_embeds": family.entering(given)}
        if family.causal:
            word["use_cache"] = False  # type: ignore[assignment]
        out = family.core(attention_mask=allowed, position_ids=family.position_ids(positions), **word)
        if self.task == "classification":
            return family.classify(out, mask)
        return family.next_words(out.last_hidden_state)

    def _allowed(self, mask: Tensor) -> Tensor:
        real = mask.bool()
        if not self.family.causal:
            return real[:, None, :].expand(-1, mask.shape[1], -1)
        steps = torch.arange(mask.shape[1], device=mask.device)
        before = steps[:, None] >= steps[None, :]
        # padding sees itself, so that no row of the softmax is empty
        return (real[:, None, :] & before) | (steps[:, None] == steps[None, :])

    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = next(self.module.parameters()).dtype
        return dtype


def additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the additive [B, 1, T, T] mask of a bool [B, T, T] one."""
    zero = torch.zeros((), dtype=dtype, device=allowed.device)
    return torch.where(allowed, zero, torch.full_like(zero, torch.finfo(dtype).min))[:, None]


class TransformersModel(Model):
    """A model of transformers of one of `FAMILIES`, for classification or causal language modeling.

    Functions take `params` by name (the model's own when None), so that attacks and local training never write into the
    module. Positions count from 0 for every family.

    Args:
        module: the transformers model, in evaluation mode, with eager attention (others have no double backward
            on the CPU).
        tokenizer: its tokenizer.
        spec: how it was made.
        depth: blocks of the model, where the module holds only the first of them (`spec.loaded`).

    Raises:
        NotSupportedError: for an architecture without a role table.
    """

    causal: bool
    """True for decoders: a token sees only those before it."""
    absolute_positions: bool
    """True when block 0's input depends on the position (BERT, GPT-2), False for relative ones (RoPE)."""
    dropout_before_norm: bool
    """True when dropout acts on the embeddings before block 0's normalization (GPT-2), False after it (BERT)."""
    first_position_row: int
    """Row of the position table that position 0 uses (RoBERTa and MPNet start at 2)."""

    def __init__(self, module: Any, tokenizer: Any, spec: ModelSpec, depth: int | None = None) -> None:
        family = family_of(spec.name, module.config.model_type)
        super().__init__(module, spec)
        self.tokenizer = tokenizer
        self.family = family(module)
        # the module behind `logits`: takes token ids, embeddings (or None for either) and the mask
        self.program = _Program(module, self.family, spec.task, spec.loaded)
        config = module.config
        self.causal = self.family.causal
        self.absolute_positions = self.family.absolute_positions
        self.dropout_before_norm = self.family.dropout_before_norm
        self.width = int(config.hidden_size)
        self.depth = depth if depth is not None else len(self.family.blocks)
        self.vocabulary_size = int(config.vocab_size)
        probe = torch.zeros(1, dtype=torch.long)
        self.first_position_row = int(self.family.position_ids(probe)[0])
        # within a sliding window a token sees all before it, as everywhere else here
        self.max_length = int(config.max_position_embeddings) - self.first_position_row
        self.max_length = min(self.max_length, getattr(config, "sliding_window", None) or self.max_length)
        self.special = self._special_tokens()

    # parameters and roles

    def views(self, layer: int, role: str) -> list[View]:
        if role not in ROLES:
            raise unknown_name("role", role, ROLES)
        if not 0 <= layer < self.depth:
            raise BadInputError(f"layer {layer} is not there: {self.spec.name} has blocks 0 to {self.depth - 1}")
        return [self._adapted(view) for view in self.family.views(layer, role)]

    def _adapted(self, view: View) -> View:
        """Return the adapter that reads what a matrix reads, [r, in], in place of a matrix that has one."""
        adapter = view.parameter.removesuffix("weight") + _ADAPTER
        return View(adapter, adapter) if adapter in self._parameters else view

    def group(self, name: str) -> list[str]:
        table = [self.family.word] if self.family.position is None else [self.family.word, self.family.position]
        groups = {
            "embeddings": table,
            "word": [self.family.word],
            "position": table[1:],
            "segment": [f"{self.family.base}.{self.family.segments}.weight"],
            "head": [n for n in self._parameters if n.startswith(self.family.head)],
        }
        if name not in groups:
            raise unknown_name("parameter group", name, groups)
        return [n for n in groups[name] if n in self._parameters]

    # pure functions

    def logits(
        self,
        *,
        ids: Tensor | None = None,
        embeddings: Tensor | None = None,
        mask: Tensor,
        params: Weights | None = None,
    ) -> Tensor:
        """Return [B, classes] (classification) or [B, T, V] (causal-lm) logits.

        Args:
            ids: [B, T] token ids, or
            embeddings: [B, T, d] word vectors in their place.
            mask: [B, T], 1 where a token is real; padding on one side (decoders: either, encoders: the right).
            params: parameters to use in place of the model's own.
        """
        if params is None:
            out: Tensor = self.program(ids, embeddings, mask)
            return out
        inside = {f"module.{name}": value for name, value in params.items()}
        return functional_call(self.program, inside, (ids, embeddings, mask))  # type: ignore[no-any-return]

    def loss(
        self,
        *,
        ids: Tensor | None = None,
        embeddings: Tensor | None = None,
        mask: Tensor,
        labels: Tensor,
        params: Weights | None = None,
    ) -> Tensor:
        """Return the mean loss the client trains with (`spec.loss`).

        Args:
            labels: [B] classes or [B, C] distributions (classification); [B, T] ids or [B, T, V] distributions
                (causal-lm), of which position t is predicted from position t - 1 and the first one is not used.
        """
        logits = self.logits(ids=ids, embeddings=embeddings, mask=mask, params=params)
        if self.spec.task == "classification":
            return self._losses(logits, labels).mean()
        each, real = self._next_losses(logits, mask, labels)
        return each.sum() / real.sum()

    def sentence_losses(self, logits: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        """Return each sentence's own loss [B]; of next words the mean over its own tokens.

        Args:
            logits: [B, C] or [B, T, vocabulary].
            mask: [B, T], True where a token is real.
            labels: [B] classes, or the [B, T] tokens.
        """
        if self.spec.task == "classification":
            return self._losses(logits, labels)
        each, real = self._next_losses(logits, mask, labels)
        return each.sum(1) / real.sum(1).clamp_min(1)

    def traced(
        self,
        *,
        embeddings: Tensor,
        mask: Tensor,
        labels: Tensor,
        watch: Sequence[str],
        dropout: Dropout | None = None,
        rate: float | None = None,
        every_row: bool = False,
    ) -> Traced:
        """Return the loss of each sentence and where the watched parameters' gradients come from.

        Args:
            embeddings: [n, T, d] word vectors.
            mask: [n, T].
            labels: as `loss` takes them.
            watch: parameter names.
            dropout: takes the place of every dropout site; None runs without dropout.
            rate: dropout rate at every site; None takes the configured ones.

        Returns:
            Losses whose mean (classification), or whose sum over the number of predicted tokens (causal-lm), is `loss`.
        """
        mode = self.training_mode(rate) if dropout is not None else nullcontext()
        sites = DropoutSites(dropout) if dropout is not None else nullcontext()
        fewer = self.spec.task == "classification" and not every_row
        read = self.family.classifying() if fewer else nullcontext()
        with tapped(self.module, watch, len(embeddings)) as taps, mode, sites, read:
            logits = self.program(None, embeddings, mask)
        if self.spec.task == "classification":
            return Traced(self._losses(logits, labels), taps)
        return Traced(self._next_losses(logits, mask, labels)[0].sum(1), taps)

    def _next_losses(self, logits: Tensor, mask: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of each next token [B, T - 1], and 1 where one is predicted: a real one behind a real one."""
        real = (mask[:, 1:].bool() & mask[:, :-1].bool()).to(logits.dtype)
        each = self._losses(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(0, 1))
        return each.view_as(real) * real, real

    def _losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each row of logits [n, C] under labels [n] or distributions [n, C]."""
        if self.spec.loss == "cross-entropy":
            return F.cross_entropy(logits, labels, reduction="none")
        wanted = labels if labels.dim() == 2 else F.one_hot(labels, logits.shape[1]).to(logits.dtype)
        return (logits - wanted).square().sum(-1)

    def word_vectors(self) -> Tensor:
        """Return the [V, d] word embedding table."""
        return self._parameters[self.family.word].detach()

    @torch.no_grad()
    def first_inputs(self, position: int, ids: Tensor | None = None) -> Tensor:
        """Return what enters q, k, v of block 0 for each token at one position, [n, d].

        Args:
            position: 0-based position of the token.
            ids: [n] token ids; the whole vocabulary when None.
        """
        if ids is None:
            ids = torch.arange(self.vocabulary_size, device=self.device)
        with self._evaluating():
            hidden = self.family.embed(ids[:, None], torch.full_like(ids, position)[:, None])
            return self.family.norm(0, hidden)[:, 0]

    @torch.no_grad()
    def first_input_parts(self) -> FirstInputs:
        """Return the parts that `first_inputs` is made of."""
        return self.family.first_input_parts(self.max_length)

    def attention_inputs(
        self, layer: int, ids: Tensor, positions: Tensor | None = None, allowed: Tensor | None = None
    ) -> Tensor:
        """Return what enters q, k, v of block `layer`, [B, T, d], running only the blocks before it.

        Args:
            layer: 0-based block.
            ids: [B, T] token ids, no padding unless `allowed` hides it.
            positions: [B, T] positions; 0, 1, 2, ... when None.
            allowed: [B, T, T] bool, True where row t may attend to column s; the family's own pattern when None.
        """
        return self.matrix_inputs([(layer, "q")], ids, positions, allowed)[0]

    @torch.no_grad()
    def matrix_inputs(
        self,
        wanted: Sequence[tuple[int, str]],
        ids: Tensor,
        positions: Tensor | None = None,
        allowed: Tensor | None = None,
        past: Past = (),
    ) -> list[Tensor]:
        """Return what enters some matrices, each [B, T, in], from one pass through the blocks that they need.

        Args:
            wanted: (block, role) pairs.
            ids, positions: as `attention_inputs` takes them.
            allowed: as there; [B, T, t + T] behind a past of t tokens.
            past: a decoder's keys and values of t tokens before these, of all blocks that run (`attended`).
        """
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        if allowed is None:
            allowed = self.program._allowed(torch.ones_like(ids))
        mask = additive(allowed, self.program._dtype())
        # q, k and v read what the block's norm makes of the residual stream; what others read only the block can say
        attention = {layer for layer, role in wanted if role in "qkv"}
        inside = [(layer, role) for layer, role in wanted if role not in "qkv"]
        found: dict[tuple[int, str], Tensor] = {}
        before = DynamicCache(past) if past else None
        with self._evaluating(), self._reading(inside, found):
            hidden = self.family.embed(ids, positions)
            run = max([-1, *(layer for layer, _ in inside), *(layer - 1 for layer in attention)])
            for block in range(run + 2):
                if block in attention:
                    found[block, "q"] = self.family.norm(block, hidden)
                if block <= run:
                    hidden = self.family.run_block(block, hidden, mask, positions, before)
        return [found[layer, "q" if role in "qkv" else role] for layer, role in wanted]

    @torch.no_grad()
    def attended(self, blocks: int, ids: Tensor, start: int = 0, past: Past = ()) -> Past:
        """Return a decoder's keys and values of the first blocks, for later tokens to attend to.

        Args:
            blocks: so many.
            ids: [B, T] token ids.
            start: position of the first token of all.
            past: keys and values of t tokens before these; the result holds them too.
        """
        if not self.causal:
            raise NotSupportedError("an encoder's rows read what comes after them: it keeps no keys and values")
        behind = past[0][0].shape[2] if past else 0
        slot = torch.arange(behind + ids.shape[1], device=ids.device)
        positions = (start + slot[behind:]).expand_as(ids)
        allowed = (slot[behind:, None] >= slot[None]).expand(len(ids), -1, -1)
        mask = additive(allowed, self.program._dtype())
        cache = DynamicCache(past or None)
        with self._evaluating():
            hidden = self.family.embed(ids, positions)
            for block in range(blocks):
                hidden = self.family.run_block(block, hidden, mask, positions, cache)
        return [(layer.keys, layer.values) for layer in cache.layers]

    @torch.no_grad()
    def foretold(self, prefixes: Tensor) -> Tensor:
        """Return how likely a decoder holds each word behind prefixes [P, t], as scores [P, V].

        Its last output is held against the word table, by which most decoders write, and from which a classifier that
        was made of one has not moved far. Of random weights, or where another table writes, scores say nothing.
        """
        with self._evaluating():
            hidden = self.family.core(input_ids=prefixes, use_cache=False).last_hidden_state[:, -1]
        scores: Tensor = hidden @ self.word_vectors().T
        return scores

    @contextmanager
    def _reading(self, wanted: Sequence[tuple[int, str]], found: dict[tuple[int, str], Tensor]) -> Iterator[None]:
        """Note what enters the matrices of some roles while the block runs."""

        def reader(key: tuple[int, str]) -> Callable[[nn.Module, tuple[Any, ...]], None]:
            def read(_: nn.Module, inputs: tuple[Any, ...]) -> None:
                found[key] = inputs[0]

            return read

        places = [self.family.views(layer, role)[0].parameter.removesuffix(".weight") for layer, role in wanted]
        hooks = [
            self.module.get_submodule(place).register_forward_pre_hook(reader(key))
            for place, key in zip(places, wanted, strict=True)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def first_attention(self, ids: Tensor, mask: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return block 0's queries, keys and values, and what its attention mixes of them, in one graph.

        Args:
            ids: [B, T] token ids.
            mask: [B, T] bool, False for padding.

        Returns:
            Three of [B, T, d], and the mixed values [B, T, d], which read the attention's output matrix.
        """
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        names = [self.family.views(0, role)[0].parameter for role in "qkvo"]
        if len(set(names)) < len(names):
            raise NotSupportedError(f"{self.spec.name} makes queries, keys and values by one matrix")
        with torch.enable_grad(), self._evaluating(), tapped(self.module, names, len(ids)) as taps:
            hidden = self.family.embed(ids, positions).detach().requires_grad_(True)
            self.family.run_block(0, hidden, additive(self.program._allowed(mask), self.program._dtype()), positions)
        *made, mixed = (taps[name][0] for name in names)
        return [tap.written for tap in made], mixed.read

    @torch.no_grad()
    def after_attention(self, layer: int, hidden: Tensor, mixed: Tensor) -> Tensor:
        """Return what an encoder's block makes of rows whose attention is at hand, [N, d].

        Args:
            layer: block.
            hidden: [N, d] what enters it at these rows.
            mixed: [N, d] values mixed by attention, what enters its output matrix.
        """
        if self.causal:
            raise NotSupportedError("only an encoder's rows are finished by themselves")

        def instead(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return (mixed[:, None], *inputs[1:])

        ones = torch.ones(len(hidden), 1, 1, dtype=torch.bool, device=hidden.device)
        place = self.family.views(layer, "o")[0].parameter.removesuffix(".weight")
        hook = self.module.get_submodule(place).register_forward_pre_hook(instead)
        try:
            with self._evaluating():  # each row attends to itself, and the result is replaced on its way out
                alone = additive(ones, self.program._dtype())
                return self.family.run_block(layer, hidden[:, None], alone, torch.zeros_like(ones[:, 0]).long())[:, 0]
        finally:
            hook.remove()

    @torch.no_grad()
    def attention_bias(self, length: int) -> Tensor | None:
        """Return what a model adds to all attention scores by position, [heads, T, T]; None for nothing."""
        return self.family.attention_bias(length)

    @torch.no_grad()
    def project(self, layer: int, role: str, rows: Tensor) -> Tensor:
        """Return a block's q, k or v of some input rows by head, [n, heads, width of a head], in the rows' dtype."""
        view = self.family.views(layer, role)[0]
        stem = view.parameter.removesuffix("weight")
        base = stem + "base_layer." if view.parameter not in self._parameters else stem
        whole = self._parameters[base + "weight"]
        if base != stem:
            whole = whole + self.module.get_submodule(stem.removesuffix(".")).get_delta_weight("default")
        out = rows @ view(whole).to(rows).T
        bias = self._parameters.get(base + "bias")
        if bias is not None:
            out = out + (bias if view.rows is None else bias[view.rows[0] : view.rows[1]]).to(rows)
        return out.view(len(rows), -1, self.head_width)

    @property
    def head_width(self) -> int:
        """Width of an attention head."""
        config = self.module.config
        size: int = getattr(config, "head_dim", None) or self.width // int(config.num_attention_heads)
        return size

    # text

    def tokens(self, text: str) -> list[int]:
        """Return a text's token ids with special tokens, however long it is."""
        ids: list[int] = self.tokenizer(text, truncation=False, verbose=False)["input_ids"]
        return ids

    @property
    def unknown(self) -> int | None:
        """The token that stands for what the vocabulary does not hold, where that is no special token; None without."""
        found = self.tokenizer.unk_token_id
        return None if found is None or found in self.special.ids else int(found)

    def encode(self, text: str) -> tuple[list[int], bool]:
        """Return a text's token ids with special tokens, cut to the longest the model takes, and whether it was cut."""
        ids = self.tokens(text)
        if len(ids) <= self.max_length:
            return ids, False
        suffix = list(self.special.suffix)
        return ids[: self.max_length - len(suffix)] + suffix, True

    def decode(self, ids: list[int] | tuple[int, ...]) -> str:
        """Return the text of token ids, special tokens left out."""
        text: str = self.tokenizer.decode(self.content(ids))
        return text.strip()

    def content(self, ids: list[int] | tuple[int, ...]) -> list[int]:
        """Return the ids that carry text: special tokens left out (an unknown-word token is text)."""
        return [i for i in ids if i not in self.special.ids]

    def pieces(self, ids: list[int] | tuple[int, ...]) -> list[str]:
        """Return one readable string a token, for the report's word marks."""
        return [self.tokenizer.decode([i]) for i in ids]

    # bookkeeping

    @contextmanager
    def training_mode(self, rate: float | None = None) -> Iterator[None]:
        # Llama's attention keeps its rate in a plain attribute
        places = [
            (module, name)
            for module in self.module.modules()
            for name in (("p",) if isinstance(module, nn.Dropout) else ("attention_dropout",))
            if rate is not None and isinstance(getattr(module, name, None), float)
        ]
        before = [getattr(module, name) for module, name in places]
        for module, name in places:
            setattr(module, name, rate)
        self.module.train()
        try:
            yield
        finally:
            self.module.eval()
            for (module, name), old in zip(places, before, strict=True):
                setattr(module, name, old)

    def dropout_rate(self) -> float:
        rates = [m.p for m in self.module.modules() if isinstance(m, nn.Dropout)]
        named = ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop")
        rates += [float(getattr(self.module.config, n, 0.0) or 0.0) for n in named]
        return max(rates, default=0.0)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        # one by one: someone's model may have some parts in training and others not
        training = [part for part in self.module.modules() if part.training]
        for part in training:
            part.training = False
        try:
            yield
        finally:
            for part in training:
                part.training = True

    def _special_tokens(self) -> SpecialTokens:
        tok = self.tokenizer
        ids = {i for i in tok.all_special_ids if i != tok.unk_token_id}
        # GPT-2 has one token for beginning, end and unknown: it never occurs in a text, so it is special there
        ids |= {i for i in (tok.bos_token_id, tok.eos_token_id, tok.pad_token_id) if i is not None}
        framed = tok("a", verbose=False)["input_ids"]
        plain = tok("a", add_special_tokens=False, verbose=False)["input_ids"]
        at = next((i for i in range(len(framed)) if framed[i : i + len(plain)] == plain), 0)
        pad = tok.pad_token_id if tok.pad_token_id is not None else (tok.eos_token_id or 0)
        return SpecialTokens(
            frozenset(int(i) for i in ids), tuple(framed[:at]), tuple(framed[at + len(plain) :]), int(pad)
        )
