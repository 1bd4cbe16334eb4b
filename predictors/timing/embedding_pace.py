"""Learns the present rate of each embedding model from its passes."""

from collections.abc import Iterable

from controlplane.core.clock import Duration
from controlplane.core.engine_reports import StepCost
from controlplane.core.pool_view import Pace
from controlplane.core.ports import Embedder
from controlplane.core.request import Owner
from predictors.timing.online_step_time import ObservedPace, ReportedPace

# A full embedding batch, which gives the time per token under load: texts, and tokens of each.
_PASSAGES, _PASSAGE_TOKENS = 32, 512


class ModelPaces(ObservedPace):
    """Step rates of embedding models, one worker process each; `pace` is the rate over all of them."""

    def __init__(self, embedders: Iterable[Embedder] = ()) -> None:
        super().__init__()
        self._of: dict[str, ObservedPace] = {}
        for embedder in embedders:
            self.add(embedder)

    def add(self, embedder: Embedder) -> None:
        """Adds a model, or begins anew for one whose worker was replaced.

        The start-up profile counts as one observation only, because it was measured on an idle device, and a
        token takes longer while an LLM runs.
        """
        self._of[embedder.model] = ObservedPace()
        lengths = [min(_PASSAGE_TOKENS, embedder.max_input_tokens)] * _PASSAGES
        if took := embedder.batch_time(lengths):
            self.observe_prefill(lengths[0], Duration(took // _PASSAGES), model=embedder.model)

    def pace_of(self, model: str) -> Pace | None:
        """Step rate of one model, also after its removal, for the requests that it still has."""
        return self._of[model].pace

    def observe_prefill(self, prompt_tokens: int, took: Duration, *, model: str | None = None) -> None:
        """Learns from an embedding call of `model`."""
        super().observe_prefill(prompt_tokens, took)
        if model is not None:
            self._of[model].observe_prefill(prompt_tokens, took)


def rate_models(
    step_cost: StepCost | None, embedders: Iterable[Embedder] = ()
) -> dict[Owner, ObservedPace | ReportedPace]:
    """Step-rate estimators of the LLM and the embedding models, both timed at the gate.

    `step_cost` is the prior of the LLM.
    """
    return {Owner.LLM: ObservedPace(prior=step_cost), Owner.EMBEDDING: ModelPaces(embedders)}
