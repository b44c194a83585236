"""NVIDIA FLARE: a filter that records what clients changed, at a client or at the server, and changes nothing."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from gradaudit.errors import BadInputError
from gradaudit.integrations.recording import Recorder, swallowing
from gradaudit.types import LocalTraining

try:
    from nvflare.apis.dxo import DXO, DataKind
    from nvflare.apis.dxo_filter import DXOFilter
    from nvflare.apis.filter import FilterChainType, FilterContextKey
    from nvflare.apis.fl_context import FLContext
    from nvflare.apis.server_engine_spec import ServerEngineSpec
    from nvflare.apis.shareable import Shareable
except ImportError:
    raise BadInputError("AuditFilter needs NVIDIA FLARE: pip install 'gradaudit[nvflare]'") from None

_ROUND = "current_round"
"""Header under which the controllers of NVFlare tell the round, from 0."""


class AuditFilter(DXOFilter):  # type: ignore[misc]
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

    _before: ClassVar[dict[tuple[str, str, str], Mapping[str, Any]]] = {}
    """What went to each client last, by job and both ends: two filters of one process share it."""

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
        kinds = [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF]
        super().__init__(supported_data_kinds=kinds, data_kinds_to_filter=kinds)
        # by these names NVFlare reads them back for a job's configuration
        self.folder, self.model, self.tokenizer, self.training = folder, model, tokenizer, training
        self.sentences, self.dropout, self.defenses, self.every, self.most = sentences, dropout, defenses, every, most
        self._recorder: Recorder | None = None

    def process_dxo(self, dxo: "DXO", shareable: "Shareable", fl_ctx: "FLContext") -> None:
        """Note weights that come, record what goes, and return None: nothing is filtered."""
        with swallowing("a round of NVFlare"):
            self._process(dxo, shareable, fl_ctx)

    def _process(self, dxo: Any, shareable: Any, context: Any) -> None:
        peer = context.get_peer_context()
        ends = (context.get_identity_name(), "" if peer is None else peer.get_identity_name())
        key = (str(context.get_job_id()), *ends)
        if self.get_prop(FilterContextKey.CHAIN_TYPE) == FilterChainType.TASK_DATA_CHAIN:
            if dxo.data_kind != DataKind.WEIGHTS:
                raise BadInputError(f"the client was sent {dxo.data_kind}, and weights are needed")
            self._before[key] = _copied(dxo.data)
            return
        number = int(shareable.get_header(_ROUND, dxo.get_meta_prop(_ROUND, 0)) or 0) + 1
        name = ends[1] if isinstance(context.get_engine(), ServerEngineSpec) else ends[0]
        with swallowing(f"round {number}, {name}"):
            self._record(f"round-{number}/{Path(name).name}", number, dxo, key)

    def _record(self, name: str, number: int, dxo: Any, key: tuple[str, str, str]) -> None:
        if self._recorder is None:
            how = None if self.training is None else LocalTraining(**self.training)
            known = (how, self.sentences, self.dropout, self.defenses)
            self._recorder = Recorder(self.folder, self.model, self.tokenizer, *known, self.every, self.most)
        if not self._recorder.due(number):
            return
        if key not in self._before:
            raise BadInputError("the weights before are not known: add an AuditFilter for what comes, with tasks")
        before = self._before[key]
        after = _copied(dxo.data)
        if dxo.data_kind == DataKind.WEIGHT_DIFF:
            # of float32 weights the sum is again what the client had; what it did not send did not change
            after = {n: value + after[n] if n in after else value for n, value in before.items()}
        self._recorder.write(name, before, after)


def _copied(data: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if hasattr(value, "clone") else value.copy() for name, value in data.items()}
