"""Ends the requests of an LLM engine that died, and rejects new ones until it serves again."""

from collections.abc import Mapping

from controlplane.core.decision import Reject
from controlplane.core.errors import BackendDown
from controlplane.service.gate.dispatcher import Dispatcher
from controlplane.service.runtime.engine_supervisor import EngineSupervisor


class EngineOutages:
    """The outages of the engines, by model; a model without a supervisor has none."""

    def __init__(self, dispatcher: Dispatcher, supervisors: Mapping[str, EngineSupervisor]) -> None:
        self._dispatcher = dispatcher
        self._supervisors = supervisors

    def begin(self, model: str, error: BackendDown, reject: Reject) -> None:
        """Ends all requests of the model: those accepted fail with `error`, those that wait are rejected.

        A stream may not be read for long, so the leases are closed here and not where it ends.
        """
        dispatcher = self._dispatcher
        affected = [ticket for ticket in dispatcher.tickets() if ticket.request.model == model]
        for ticket in affected:
            if ticket.timeline.dispatched is None:
                dispatcher.reject_or_evict(ticket, reject)
        dispatcher.fail([ticket for ticket in affected if ticket.outcome is None], error)
        dispatcher.prefixes.engine_died(model)

    def rejection(self, model: str) -> Reject | None:
        """The rejection of a new request; None while the engine is up."""
        supervisor = self._supervisors.get(model)
        return None if supervisor is None else supervisor.rejection()
