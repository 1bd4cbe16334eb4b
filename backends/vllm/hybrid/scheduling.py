"""When does a request keep hidden states? Decided here, before each step, around Tandem's scheduler.

A request takes its form when it gets its first block and may leave hidden states while it runs; the way back
leads through preemption. Importing this module imports vLLM.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from backends.vllm import control
from backends.vllm.hybrid.cache import HybridCache
from backends.vllm.hybrid.forms import StepForms
from backends.vllm.scheduler import AsyncTandemScheduler, TandemScheduler


@dataclass(frozen=True, slots=True)
class Choice:
    """Requests by id: of those waiting, who starts on hidden states; of those running, who leaves them."""

    hidden: frozenset[str] = frozenset()
    converted: frozenset[str] = frozenset()


class Forms(Protocol):
    def choose(self, waiting: Sequence[Any], running: Sequence[Any], hidden: set[str]) -> Choice:
        """Of vLLM's requests; `hidden` are those of `running` on hidden states."""
        ...


class AllHidden:
    """Who starts, starts on hidden states, and stays."""

    def choose(self, waiting: Sequence[Any], running: Sequence[Any], hidden: set[str]) -> Choice:
        return Choice(hidden=frozenset(request.request_id for request in waiting))


if TYPE_CHECKING:
    _Base = TandemScheduler
else:
    _Base = object


class HybridScheduling(_Base):
    """Mixed in before one of Tandem's schedulers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hybrid_cache: HybridCache = self.kv_cache_manager.coordinator.single_type_managers[0]
        self.forms: Forms = AllHidden()

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        held, hidden = self.hybrid_cache.req_to_blocks, self.hybrid_cache.hidden
        # Who gave its blocks back chooses anew.
        hidden.intersection_update([name for name in hidden if held.get(name)])
        fresh = [request for request in self.waiting if not held.get(request.request_id)]
        choice = self.forms.choose(fresh, self.running, hidden)
        leaving = {name: self.requests[name].num_computed_tokens for name in choice.converted & hidden}
        first = {name: self.hybrid_cache.first_block(name) for name in leaving}
        hidden |= choice.hidden
        hidden.difference_update(leaving)
        output = super().schedule(*args, **kwargs)
        scheduled = output.num_scheduled_tokens
        # Who was passed over took no blocks, so it stays what it was.
        hidden.update(name for name in leaving if name not in scheduled and held.get(name))
        output.cache_forms = StepForms(
            hidden=frozenset(self.hybrid_cache.first_block(name) for name in scheduled if name in hidden),
            converted={first[name]: tokens for name, tokens in leaving.items() if name in scheduled},
        )
        return output


class HybridScheduler(HybridScheduling, TandemScheduler):
    """For engines that wait for each step."""


class AsyncHybridScheduler(HybridScheduling, AsyncTandemScheduler):
    """For engines that schedule a step while the last one runs."""


def make(vllm_config: Any, **kwargs: Any) -> HybridScheduling:
    """What `scheduler_cls` names."""
    control.install()
    is_async = vllm_config.scheduler_config.async_scheduling
    made: HybridScheduling = (AsyncHybridScheduler if is_async else HybridScheduler)(
        vllm_config=vllm_config, **kwargs
    )
    return made
