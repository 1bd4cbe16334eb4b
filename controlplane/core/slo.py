"""Service-level objectives; each is None or a positive duration."""

from dataclasses import dataclass, field, fields, replace

from controlplane.core.clock import Duration

MOST_WEIGHT = 1_000


@dataclass(frozen=True, slots=True)
class Slo:
    """Objectives of one request.

    TTFT, the mean TPOT after the first token, end-to-end time, and the longest gap between two tokens.
    """

    ttft: Duration | None = None
    tpot: Duration | None = None
    e2e: Duration | None = None
    gap: Duration | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None and value <= 0:
                raise ValueError(
                    f"slo.{each.name}={value}: an objective is a positive duration; leave it out for none"
                )

    def overridden(self, by: "Slo") -> "Slo":
        """This SLO with every objective that `by` states replaced."""
        stated = {f.name: v for f in fields(by) if (v := getattr(by, f.name)) is not None}
        return replace(self, **stated)

    def without_tokens(self) -> "Slo":
        """The objectives of a response without output tokens: TTFT and end-to-end time."""
        return Slo(ttft=self.ttft, e2e=self.e2e)


@dataclass(frozen=True, slots=True)
class ServiceClass:
    """A named SLO with a priority; a larger `priority` is served sooner.

    A sheddable class is rejected when its SLO cannot be met; any other waits up to the maximum wait.
    `weight` is the value of a met SLO; `1 + priority` where `stated_weight` is None.
    """

    name: str
    slo: Slo
    priority: int
    sheddable: bool
    stated_weight: float | None = None
    weight: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.stated_weight is not None and not 0 < self.stated_weight <= MOST_WEIGHT:
            raise ValueError(
                f"weight={self.stated_weight}: the value of a met SLO; must be greater than 0 and "
                f"at most {MOST_WEIGHT:,}"
            )
        weight = 1.0 + max(0, self.priority) if self.stated_weight is None else float(self.stated_weight)
        object.__setattr__(self, "weight", weight)
