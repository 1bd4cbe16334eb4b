"""Builds requests: service class, objectives and id, from what a client states and its tenant may use."""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

from controlplane.config.fields import optional_duration
from controlplane.core.clock import Clock, Instant
from controlplane.core.errors import Refused
from controlplane.core.request import Kind, PromptFeatures, Request
from controlplane.core.slo import ServiceClass, Slo
from controlplane.service.request_jobs import Caller, RequestHints, RequestOrigin, RequestTerms

_Backend = TypeVar("_Backend")


@dataclass(frozen=True, slots=True)
class RequestFields:
    """The parts of a request that do not depend on its kind."""

    origin: RequestOrigin
    arrival: Instant
    features: PromptFeatures | None = None
    charged_tokens: int | None = None
    adapter: str | None = None


class RequestBuilder:
    """Builds requests by their caller's terms, or by `terms`, those in force; each gets an id of its own."""

    def __init__(self, clock: Clock, terms: RequestTerms) -> None:
        self.terms = terms
        self._clock = clock
        self._serial = count(1)

    def fields(self, origin: RequestOrigin, adapter: str | None = None) -> RequestFields:
        """The fields of a request that arrives now, unless its origin states when."""
        arrival = self._clock.now() if origin.arrival is None else origin.arrival
        return RequestFields(origin, arrival, adapter=adapter)

    def terms_of(self, caller: Caller) -> RequestTerms:
        """The terms of a request of `caller`."""
        return self.terms if caller.terms is None else caller.terms

    def build(
        self,
        fields: RequestFields,
        kind: Kind,
        model: str,
        prompt_tokens: int,
        max_output_tokens: int,
        sequences: int,
    ) -> Request:
        """The request of these sizes, with the class and objectives that its hints state. Raises Refused."""
        caller, hints = fields.origin.caller, fields.origin.hints
        service_class = self._class(caller, hints)
        stated = [*map(optional_duration, (hints.ttft_ms, hints.tpot_ms, hints.e2e_ms, hints.gap_ms))]
        slo = service_class.slo.overridden(Slo(*stated)) if any(stated) else service_class.slo
        if kind is Kind.EMBED:
            # An objective for output tokens would count as missed or met by accident.
            slo = slo.without_tokens()
        return Request(
            # Clients choose their request ids, and may use one twice.
            id=f"{fields.origin.request_id}-{next(self._serial)}",
            kind=kind,
            model=model,
            tenant=caller.tenant,
            service_class=service_class,
            slo=slo,
            arrival=fields.arrival,
            prompt_tokens=prompt_tokens,
            max_output_tokens=max_output_tokens,
            sequences=sequences,
            features=fields.features,
            adapter=fields.adapter,
        )

    def _class(self, caller: Caller, hints: RequestHints) -> ServiceClass:
        allowed, terms = caller.allowed_classes, self.terms_of(caller)
        name = hints.service_class
        if name is None:
            # A tenant that may not use the default class gets the first one that it may.
            usable = allowed is None or terms.default_class in allowed
            name = terms.default_class if usable else min(allowed or {terms.default_class})
        if name not in terms.classes:
            known = ", ".join(sorted(terms.classes))
            raise Refused(
                f"service_class={name!r}: no such class; use one of {known}",
                param="service_class",
                code="unknown_service_class",
            )
        if allowed is not None and name not in allowed:
            raise Refused(
                f"service_class={name!r}: this key may use {', '.join(sorted(allowed))}",
                param="service_class",
                code="service_class_not_allowed",
            )
        return terms.classes[name]


def named_backend(
    table: Mapping[str, _Backend], model: str | None, purpose: str, *, others: Iterable[Container[str]]
) -> _Backend:
    """The backend of `model` in `table`, or without a name the only one.

    `others` name all models that are served. Raises Refused.
    """
    served = ", ".join(sorted(table)) or "none"
    if model is None:
        if len(backends := set(table.values())) == 1:
            return backends.pop()
        raise Refused(
            f"model: missing, and not exactly one model serves {purpose}; models for it: {served}",
            param="model",
            code="missing_required_parameter",
        )
    if model in table:
        return table[model]
    if any(model in each for each in others):
        raise Refused(f"{model!r} does not serve {purpose}; models that do: {served}", param="model")
    raise Refused(
        f"the model {model!r} does not exist; models for {purpose}: {served}",
        param="model",
        code="model_not_found",
    )
