"""When does a request keep hidden states? Decided here, before each step, around Tandem's scheduler.

A request takes its form when it gets its first block and may leave hidden states while it runs; the way back
leads through preemption. What hidden states cost a step is measured at start-up on the kernels that serve
(`calibrated`), then fitted. Importing this module imports vLLM.

`additional_config["tandem_hybrid"]`: `forms` is `auto` for the greedy of
`controlplane.policy.cache_tiers.selection`, `on` for hidden states whenever a request starts; `price`,
seconds of a token, a request and a step, replaces the
measurement.
"""

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from hybridcache.calibration import CalibrationSetup, added_cost
from hybridcache.layout import BlockLayout
from vllm.platforms import current_platform

from backends.vllm.hybrid.cache import HybridCache
from backends.vllm.hybrid.step_forms import StepForms
from backends.vllm.plugin import rpc
from backends.vllm.scheduler import AsyncTandemScheduler, TandemScheduler
from controlplane.core.clock import Duration, Instant
from controlplane.core.view import HiddenStateCost
from controlplane.policy.cache_tiers.selection import TierChoice, choose_tiers
from controlplane.policy.engine.interface import EngineView
from controlplane.policy.engine.request_state import RequestState
from controlplane.policy.registry import lookup
from predictors.timing.hidden_state_cost import HiddenStateCostModel
from predictors.timing.step_time import StepWork

log = logging.getLogger(__name__)


class FormPolicy(Protocol):
    def choose(
        self, view: EngineView, waiting: Sequence[RequestState], hidden: set[str], price: HiddenStateCost
    ) -> TierChoice:
        """`hidden` are those of `view.running` on hidden states."""
        ...


class AlwaysHidden:
    """Who starts, starts on hidden states, and stays."""

    def __init__(self, layout: BlockLayout) -> None:
        pass

    def choose(
        self, view: EngineView, waiting: Sequence[RequestState], hidden: set[str], price: HiddenStateCost
    ) -> TierChoice:
        return TierChoice(hidden=frozenset(progress.request.id for progress in waiting))


class GreedyForms:
    def __init__(self, layout: BlockLayout) -> None:
        self._rows_per_block = layout.rows_per_block

    def choose(
        self, view: EngineView, waiting: Sequence[RequestState], hidden: set[str], price: HiddenStateCost
    ) -> TierChoice:
        return choose_tiers(view, waiting, hidden, rows_per_block=self._rows_per_block, price=price)


FORMS: Mapping[str, type[AlwaysHidden] | type[GreedyForms]] = {"auto": GreedyForms, "on": AlwaysHidden}


def calibrated(layout: BlockLayout, layers: int, dtype: torch.dtype, *, rotary: bool) -> HiddenStateCost:
    """About a second of measuring on the device that serves."""
    device = torch.device(current_platform.device_type)
    setting = CalibrationSetup(layout, dtype, device, 2, range(64, 513, 64), repeats=5, rotary=rotary)
    layer = added_cost(setting, "m1" if rotary else "m2", many=8)
    price = HiddenStateCost(*(max(0.0, layers * seconds) for seconds in layer))
    log.info(
        "hidden states add to a step %.3f ms, %.3f for a request and %.3f for 1,000 tokens, measured on %s",
        1e3 * price.step, 1e3 * price.request, 1e6 * price.token, device,
    )  # fmt: skip
    return price


if TYPE_CHECKING:
    _Base = TandemScheduler
else:
    _Base = object


class HybridScheduling(_Base):
    """Mixed in before one of Tandem's schedulers."""

    has_packed = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hybrid_cache: HybridCache = self.kv_cache_manager.coordinator.single_type_managers[0]
        config = self.vllm_config.additional_config.get("tandem_hybrid", {})
        spec = self.hybrid_cache.kv_cache_spec
        self.layout: BlockLayout = spec.layout
        self.forms: FormPolicy = lookup("tandem_hybrid.forms", FORMS, config.get("forms", "auto"))(
            self.layout
        )
        price = config.get("price")
        if price is None:
            model = self.vllm_config.model_config
            layers = model.get_num_layers(self.vllm_config.parallel_config)
            rotary = model.hf_config.model_type != "opt"
            measured = calibrated(self.layout, layers, spec.dtype, rotary=rotary)
        else:
            measured = HiddenStateCost(*price)
        self.hidden_cost = HiddenStateCostModel(measured)
        self._converting: Mapping[str, int] = {}
        self._in_flight_decoding: deque[Mapping[str, int] | None] = deque()
        self._decoded: Mapping[str, int] | None = None

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)
        held, hidden, scheduled = self._held, self.hybrid_cache.hidden, output.num_scheduled_tokens
        leaving = self._converting
        for name in leaving.keys() - scheduled.keys():
            # Who was passed over took no blocks, so it stays what it was.
            if held.get(name):
                hidden.add(name)
                self._set_rows_per_block(name)
        output.cache_forms = StepForms(
            hidden=frozenset(self.hybrid_cache.first_block(name) for name in scheduled if name in hidden),
            converted={
                self.hybrid_cache.first_block(name): tokens
                for name, tokens in leaving.items()
                if name in scheduled
            },
        )
        if scheduled:
            self._in_flight_decoding.append(self._only_decoded(output))
        return output

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if scheduler_output.num_scheduled_tokens:
            self._decoded = self._in_flight_decoding.popleft()
        return super().update_from_output(scheduler_output, *args, **kwargs)

    def _plan(self, now: Instant) -> None:
        # Behind the wait for embeddings: who came meanwhile may start in this step.
        self._converting = self._choose_forms(now)
        super()._plan(now)

    @property
    def _held(self) -> Mapping[str, Sequence[Any]]:
        blocks: Mapping[str, Sequence[Any]] = self.hybrid_cache.req_to_blocks
        return blocks

    def _choose_forms(self, now: Instant) -> dict[str, int]:
        """Those that leave hidden states in this step, with the tokens that they hold."""
        held, hidden = self._held, self.hybrid_cache.hidden
        # Who gave its blocks back chooses anew.
        hidden.intersection_update([name for name in hidden if held.get(name)])
        waiting = [request.tandem for request in self.waiting if not held.get(request.request_id)]
        choice = self.forms.choose(self.view(now), waiting, hidden, self.hidden_cost.price)
        leaving = {name: self.requests[name].num_computed_tokens for name in choice.leaving & hidden}
        hidden.update(choice.hidden)
        hidden.difference_update(leaving)
        for name in [*(progress.request.id for progress in waiting), *leaving]:
            self._set_rows_per_block(name)
        return leaving

    def _set_rows_per_block(self, name: str) -> None:
        """The policy counts the blocks of a request by its form."""
        on_hidden = name in self.hybrid_cache.hidden
        self.requests[name].tandem.per_block = self.layout.rows_per_block if on_hidden else None

    # --- what hidden states cost ---------------------------------------------------------------

    def _only_decoded(self, output: Any) -> Mapping[str, int] | None:
        """What a step's cells and requests were, if it did nothing but decode."""
        scheduled = output.num_scheduled_tokens
        is_mixed = output.total_num_scheduled_tokens != len(scheduled)
        if is_mixed or output.cache_forms.converted:
            return None
        tokens = {name: self.requests[name].num_computed_tokens for name in scheduled}
        on_hidden = [tokens[name] for name in scheduled if name in self.hybrid_cache.hidden]
        return {
            "tokens": sum(tokens.values()),
            "requests": len(tokens),
            "hidden_tokens": sum(on_hidden),
            "hidden_requests": len(on_hidden),
        }

    def _observe(self, work: StepWork, took: Duration, *, is_alone: bool) -> None:
        if is_alone and self._decoded is not None:
            self.hidden_cost.observe(**self._decoded, seconds=took / 1e9)
        super()._observe(work, took, is_alone=is_alone)


class HybridScheduler(HybridScheduling, TandemScheduler):
    """For engines that wait for each step."""


class AsyncHybridScheduler(HybridScheduling, AsyncTandemScheduler):
    """For engines that schedule a step while the last one runs."""


def make(vllm_config: Any, **kwargs: Any) -> HybridScheduling:
    """What `scheduler_cls` names."""
    rpc.install()
    is_async = vllm_config.scheduler_config.async_scheduling
    made: HybridScheduling = (AsyncHybridScheduler if is_async else HybridScheduler)(
        vllm_config=vllm_config, **kwargs
    )
    return made
