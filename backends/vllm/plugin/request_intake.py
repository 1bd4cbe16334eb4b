"""The policy's states of the requests in vLLM, made from their metadata and found by the client's id."""

import logging
from collections.abc import Sequence
from typing import Any

from backends.vllm.plugin.request_metadata import (
    Defaults,
    EngineRequest,
    extract_metadata,
    make_engine_request,
)
from controlplane.core.clock import Instant

log = logging.getLogger(__name__)


class RequestIntake:
    """Makes the state of each request that enters the engine; `malformed` counts those with bad metadata."""

    def __init__(self, defaults: Defaults) -> None:
        self.malformed = 0
        self._defaults = defaults
        self._by_client_id: dict[str, list[EngineRequest]] = {}

    def admit(self, request: Any, now: Instant) -> EngineRequest:
        """The state of a request that has just entered; with bad metadata it gets the defaults."""
        state = self._engine_request(request, now)
        self._by_client_id.setdefault(state.name, []).append(state)
        return state

    def remove(self, state: EngineRequest) -> None:
        """Forgets a request that has ended."""
        siblings = self._by_client_id[state.name]
        siblings.remove(state)
        if not siblings:
            del self._by_client_id[state.name]

    def samples(self, name: str) -> Sequence[EngineRequest]:
        """All samples of the client's request `name` that are still here."""
        return self._by_client_id.get(name, ())

    def _engine_request(self, request: Any, now: Instant) -> EngineRequest:
        facts = {"request_id": request.request_id, "prompt_tokens": request.num_prompt_tokens}
        params = request.sampling_params or request.pooling_params
        limit = request.max_tokens or 1
        try:
            metadata = extract_metadata(getattr(params, "extra_args", None))
            return make_engine_request(metadata, self._defaults, max_tokens=limit, now=now, **facts)
        except ValueError as error:
            # vLLM has already accepted the request, and raising here would end the engine.
            self.malformed += 1
            log.warning("request %s gets the default class: %s", request.request_id, error)
            return make_engine_request({}, self._defaults, max_tokens=limit, now=now, **facts)
