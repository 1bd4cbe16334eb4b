"""What was promised, and was it kept? An objective is absent (`None`) or a positive duration."""

from dataclasses import dataclass, fields, replace

from controlplane.core.clock import Duration, Instant, after


@dataclass(frozen=True, slots=True)
class Slo:
    """Time to first token, time per output token after the first, end to end."""

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
        """This objective with each part that `by` states put in its place."""
        stated = {f.name: v for f in fields(by) if (v := getattr(by, f.name)) is not None}
        return replace(self, **stated)

    def first_token_deadline(self, arrival: Instant) -> Instant | None:
        """When the first token (or, for embeddings, the answer) must be out; the sooner of both."""
        bounds = [after(arrival, d) for d in (self.ttft, self.e2e) if d is not None]
        return min(bounds) if bounds else None


@dataclass(frozen=True, slots=True)
class ServiceClass:
    """A named promise. A larger `priority` is served sooner.

    A sheddable class is rejected when its objective cannot be met; any other waits to the cap.
    """

    name: str
    slo: Slo
    priority: int
    sheddable: bool
