"""NVIDIA FLARE: a filter that records what clients changed, at a client or the server, and one that may block it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradaudit.bundles.gate import USUAL
from gradaudit.errors import BadInputError
from gradaudit.integrations.gatekeeper import Gatekeeper
from gradaudit.integrations.recording import Recorder, swallowing
from gradaudit.types import LocalTraining

try:
    from nvflare.apis.dxo import DXO, DataKind
    from nvflare.apis.dxo_filter import DXOFilter
    from nvflare.apis.filter import ContentBlockedException, FilterChainType, FilterContextKey
    from nvflare.apis.fl_context import FLContext
    from nvflare.apis.server_engine_spec import ServerEngineSpec
    from nvflare.apis.shareable import Shareable
except ImportError:
    raise BadInputError("AuditFilter needs NVIDIA FLARE: pip install 'gradaudit[nvflare]'") from None

Ends = tuple[str, str, str]
"""A job, this end of a connection and the other."""
_ROUND = "current_round"
"""Header under which the controllers of NVFlare tell the round, from 0."""


class _RoundFilter(DXOFilter):  # type: ignore[misc]
    """What both filters are told, kept under the names by which NVFlare reads it back for a job's configuration."""

    def __init__(
        self,
        model: str,
        tokenizer: str | None,
        training: dict[str, Any] | None,
        sentences: int | None,
        dropout: bool | float | None,
        defenses: list[dict[str, Any]] | None,
    ) -> None:
        kinds = [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF]
        super().__init__(supported_data_kinds=kinds, data_kinds_to_filter=kinds)
        self.model, self.tokenizer, self.training = model, tokenizer, training
        self.sentences, self.dropout, self.defenses = sentences, dropout, defenses

    def told(self) -> dict[str, Any]:
        """Return it as `Recorder` takes it."""
        how = None if self.training is None else LocalTraining(**self.training)
        known = {"sentences": self.sentences, "dropout": self.dropout, "defenses": self.defenses}
        return {"tokenizer": self.tokenizer, "training": how} | known

    def comes(self) -> bool:
        """Return whether what is filtered is on its way to a client."""
        return bool(self.get_prop(FilterContextKey.CHAIN_TYPE) == FilterChainType.TASK_DATA_CHAIN)


class AuditFilter(_RoundFilter):
    """Record what each round changed; add it twice, for what comes and for what goes.

    At the clients `recipe.add_client_input_filter(AuditFilter(...), tasks=["train"])` sees the weights before, and
    `recipe.add_client_output_filter(AuditFilter(...), tasks=["train"])` what is sent; of several output filters each
    sees what those before it made. At the server it is the output filter, then the input filter. Bundles go into
    FOLDER/round-1/site-1 and so on. What goes wrong is logged (logger "gradaudit") and swallowed.

    Args are plain data, because NVFlare writes them into a job's configuration.

    Args:
        folder: where the bundles go.
        model: the folder of the model; its present weights do not matter.
        tokenizer: folder or hub id; the model's folder when None.
        training: fields of `LocalTraining`; None: the attacker is not told.
        sentences, dropout, defenses, every, most: as `Recorder` takes them.
    """

    def __init__(
        self,
        folder: str,
        model: str,
        tokenizer: str | None = None,
        training: dict[str, Any] | None = None,
        sentences: int | None = None,
        dropout: bool | float | None = None,
        defenses: list[dict[str, Any]] | None = None,
        every: int = 1,
        most: int = 10,
    ) -> None:
        super().__init__(model, tokenizer, training, sentences, dropout, defenses)
        self.folder, self.every, self.most = folder, every, most
        self._recorder: Recorder | None = None

    def process_dxo(self, dxo: "DXO", shareable: "Shareable", fl_ctx: "FLContext") -> None:
        """Note weights that come, record what goes, and return None: nothing is filtered."""
        with swallowing("a round of NVFlare"):
            key = _ends(fl_ctx)
            if self.comes():
                _note(key, dxo)
                return
            number = int(shareable.get_header(_ROUND, dxo.get_meta_prop(_ROUND, 0)) or 0) + 1
            name = key[2] if isinstance(fl_ctx.get_engine(), ServerEngineSpec) else key[1]
            with swallowing(f"round {number}, {name}"):
                self._record(f"round-{number}/{Path(name).name}", number, dxo, key)

    def _record(self, name: str, number: int, dxo: Any, key: Ends) -> None:
        if self._recorder is None:
            self._recorder = Recorder(self.folder, self.model, **self.told(), every=self.every, most=self.most)
        if not self._recorder.due(number):
            return
        self._recorder.write(name, *_both(key, dxo))


class GateFilter(_RoundFilter):
    """Attack what a client is about to send, and block it where it is read or that could not be decided.

    Add it twice, as `AuditFilter`, as the last output filter: it judges what those before it made.

    Args:
        model, tokenizer, training, sentences, dropout, defenses: as `AuditFilter` takes them.
        fail_on: conditions that close the gate, as in `gradaudit gate`; its usual ones when None.
        within: seconds for the attack.
        attack: name of the attack; `auto` when None.
    """

    def __init__(
        self,
        model: str,
        tokenizer: str | None = None,
        training: dict[str, Any] | None = None,
        sentences: int | None = None,
        dropout: bool | float | None = None,
        defenses: list[dict[str, Any]] | None = None,
        fail_on: list[str] | None = None,
        within: float = 60.0,
        attack: str | None = None,
    ) -> None:
        super().__init__(model, tokenizer, training, sentences, dropout, defenses)
        self.fail_on, self.within, self.attack = fail_on, within, attack

    def process_dxo(self, dxo: "DXO", shareable: "Shareable", fl_ctx: "FLContext") -> None:
        """Note weights that come, and judge what goes.

        Raises:
            ContentBlockedException: the update must not be sent.
        """
        key = _ends(fl_ctx)
        if self.comes():
            with swallowing("a round of NVFlare"):  # what is missed here closes the gate later
                _note(key, dxo)
            return
        keeper = Gatekeeper(self.model, self.fail_on or USUAL, self.within, self.attack, **self.told())
        try:
            why = keeper.refusal(*_both(key, dxo))
        except BadInputError as error:
            why = f"not decided: {error}"
        if why is not None:
            raise ContentBlockedException(f"gradaudit did not let the update out ({why})")


_BEFORE: dict[Ends, Mapping[str, Any]] = {}
"""What went to each client last: the two filters of one process share it."""


def _ends(context: Any) -> Ends:
    peer = context.get_peer_context()
    other = "" if peer is None else peer.get_identity_name()
    return str(context.get_job_id()), context.get_identity_name(), other


def _note(key: Ends, dxo: Any) -> None:
    if dxo.data_kind != DataKind.WEIGHTS:
        raise BadInputError(f"the client was sent {dxo.data_kind}, and weights are needed")
    _BEFORE[key] = _copied(dxo.data)


def _both(key: Ends, dxo: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the weights before and after of what goes to the server."""
    if key not in _BEFORE:
        raise BadInputError("the weights before are not known: add a filter for what comes, with tasks")
    before, after = _BEFORE[key], _copied(dxo.data)
    if dxo.data_kind == DataKind.WEIGHT_DIFF:
        # of float32 weights the sum is again what the client had; what it did not send did not change
        after = {n: value + after[n] if n in after else value for n, value in before.items()}
    return before, after


def _copied(data: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if hasattr(value, "clone") else value.copy() for name, value in data.items()}
