"""Service-level objectives; each is None or a positive duration."""

from dataclasses import dataclass, fields, replace

from controlplane.core.clock import Duration, Instant, after


@dataclass(frozen=True, slots=True)
class Slo:
    """Objectives of one request: TTFT, TPOT (after the first token) and end-to-end time."""

    ttft: Duration | None = None
    tpot: Duration | None = None
    e2e: Duration | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and value <= 0:
                raise ValueError(
                    f"slo.{field.name}={value}: an objective is a positive duration; leave it out for none"
                )

    def overridden(self, by: "Slo") -> "Slo":
        """This SLO with every objective that `by` states replaced."""
        stated = {f.name: v for f in fields(by) if (v := getattr(by, f.name)) is not None}
        return replace(self, **stated)

    def first_token_deadline(self, arrival: Instant) -> Instant | None:
        """Deadline of the first token (for embeddings: of the response); the earlier of TTFT and e2e."""
        bounds = [after(arrival, d) for d in (self.ttft, self.e2e) if d is not None]
        return min(bounds) if bounds else None


@dataclass(frozen=True, slots=True)
class ServiceClass:
    """A named SLO with a priority; a larger `priority` is served sooner.

    A sheddable class is rejected when its SLO cannot be met; any other waits up to the maximum wait.
    """

    name: str
    slo: Slo
    priority: int
    sheddable: bool
