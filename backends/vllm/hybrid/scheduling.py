"""Tandem's scheduler extended to choose each request's form before every step.

A request gets its form with its first block. While it runs it may change from hidden states to keys and
values; the reverse needs a preemption. What hidden states add to a step is measured at start-up with the
kernels in use (`calibrated`), then refined from measured steps. Importing this module imports vLLM.

`additional_config["tandem_hybrid"]` has two keys. `forms` is `auto` for the greedy choice of
`controlplane.policy.cache_tiers.selection`, or `on` to start every request on hidden states. `price` (seconds
per token, request and step) replaces the measurement.
"""

import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from hybridcache.calibration import CalibrationSetup, added_cost
from hybridcache.layout import BlockLayout
from vllm.platforms import current_platform

from backends.vllm.hybrid.cache import HybridCache
from backends.vllm.hybrid.step_forms import StepForms
from backends.vllm.plugin import rpc
from backends.vllm.scheduler import AsyncTandemScheduler, TandemScheduler
from controlplane.core.clock import Duration, Instant
from controlplane.core.pool_view import HiddenStateCost
from controlplane.policy.cache_tiers.selection import TierChoice, choose_tiers
from controlplane.policy.engine.interface import EngineView
from controlplane.policy.engine.request_state import RequestState
from controlplane.policy.registry import lookup
from predictors.timing.hidden_state_cost import HiddenStateCostModel
from predictors.timing.online_step_time import StepWork

log = logging.getLogger(__name__)


def all_hidden(
    view: EngineView,
    waiting: Sequence[RequestState],
    hidden: Collection[str],
    *,
    rows_per_block: int,
    price: HiddenStateCost,
) -> TierChoice:
    """Starts every request on hidden states and keeps it there; arguments as of `choose_tiers`."""
    return TierChoice(hidden=frozenset(state.request.id for state in waiting))


FORMS: Mapping[str, Callable[..., TierChoice]] = {"auto": choose_tiers, "on": all_hidden}


def calibrated(layout: BlockLayout, layers: int, dtype: torch.dtype, *, rotary: bool) -> HiddenStateCost:
    """Seconds that hidden states add to a step, measured for about a second on the engine's device."""
    device = torch.device(current_platform.device_type)
    setup = CalibrationSetup(layout, dtype, device, 2, range(64, 513, 64), repeats=5, rotary=rotary)
    layer = added_cost(setup, "m1" if rotary else "m2", many=8)
    price = HiddenStateCost(*(max(0.0, layers * seconds) for seconds in layer))
    log.info(
        "hidden states add %.3f ms to a step, %.3f ms per request and %.3f ms per 1,000 tokens on %s",
        1e3 * price.step, 1e3 * price.request, 1e6 * price.token, device,
    )  # fmt: skip
    return price


if TYPE_CHECKING:
    _Base = TandemScheduler
else:
    _Base = object


class HybridScheduling(_Base):
    """Choice of forms as a mixin; precedes one of Tandem's schedulers in the bases."""

    has_packed = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hybrid_cache: HybridCache = self.kv_cache_manager.coordinator.single_type_managers[0]
        config = self.vllm_config.additional_config.get("tandem_hybrid", {})
        spec = self.hybrid_cache.kv_cache_spec
        self.layout: BlockLayout = spec.layout
        self.choose_tiers = lookup("tandem_hybrid.forms", FORMS, config.get("forms", "auto"))
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
        """Schedules a step and attaches the forms of its requests as `cache_forms`."""
        output = super().schedule(*args, **kwargs)
        held, hidden, scheduled = self._held, self.hybrid_cache.hidden, output.num_scheduled_tokens
        leaving = self._converting
        for name in leaving.keys() - scheduled.keys():
            # A request that was not scheduled got no blocks, so it keeps its form.
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
        """Notes what the finished step decoded; vLLM processes its output."""
        if scheduler_output.num_scheduled_tokens:
            self._decoded = self._in_flight_decoding.popleft()
        return super().update_from_output(scheduler_output, *args, **kwargs)

    def _plan(self, now: Instant) -> None:
        # After the delay for embeddings, so that requests that arrived during it are considered.
        self._converting = self._choose_forms(now)
        super()._plan(now)

    @property
    def _held(self) -> Mapping[str, Sequence[Any]]:
        blocks: Mapping[str, Sequence[Any]] = self.hybrid_cache.req_to_blocks
        return blocks

    def _choose_forms(self, now: Instant) -> dict[str, int]:
        """Applies the choice of forms; returns the requests that leave hidden states, with their tokens."""
        held, hidden = self._held, self.hybrid_cache.hidden
        # A request that has lost its blocks may get another form.
        hidden.intersection_update([name for name in hidden if held.get(name)])
        waiting = [request.tandem for request in self.waiting if not held.get(request.request_id)]
        rows, price = self.layout.rows_per_block, self.hidden_cost.price
        choice = self.choose_tiers(self.view(now), waiting, hidden, rows_per_block=rows, price=price)
        leaving = {name: self.requests[name].num_computed_tokens for name in choice.leaving & hidden}
        hidden.update(choice.hidden)
        hidden.difference_update(leaving)
        for name in [*(state.request.id for state in waiting), *leaving]:
            self._set_rows_per_block(name)
        return leaving

    def _set_rows_per_block(self, name: str) -> None:
        """Sets the tokens per block with which the policy counts the request's blocks."""
        on_hidden = name in self.hybrid_cache.hidden
        self.requests[name].tandem.block_tokens = self.layout.rows_per_block if on_hidden else None

    # --- cost of hidden states -----------------------------------------------------------------

    def _only_decoded(self, output: Any) -> Mapping[str, int] | None:
        """Tokens and requests of a step that only decoded, in total and on hidden states; else None."""
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
    """Hybrid scheduler for synchronous scheduling."""


class AsyncHybridScheduler(HybridScheduling, AsyncTandemScheduler):
    """Hybrid scheduler for asynchronous scheduling, which plans a step while the previous one runs."""


def make(vllm_config: Any, **kwargs: Any) -> HybridScheduling:
    """Factory named by `scheduler_cls`; picks the class that fits vLLM's scheduling mode."""
    rpc.install()
    is_async = vllm_config.scheduler_config.async_scheduling
    scheduler_class = AsyncHybridScheduler if is_async else HybridScheduler
    scheduler: HybridScheduling = scheduler_class(vllm_config=vllm_config, **kwargs)
    return scheduler
