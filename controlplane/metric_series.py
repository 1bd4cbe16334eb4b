"""One Prometheus series: its description, and its values read at scrape time."""

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily


@dataclass(frozen=True, slots=True)
class SeriesInfo:
    """Describes one series for the reference page; `kind` is counter, gauge or histogram."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Series:
    """A series whose values are read from other objects at scrape time.

    A label value without a reading is absent from the page: its last value would look current. `is_total`
    marks a counter, whose name ends in `_total`.
    """

    name: str
    text: str
    label: str | None
    is_total: bool

    def family(self, values: Mapping[str, float] | float) -> GaugeMetricFamily | CounterMetricFamily:
        """Returns the metric family with one sample per label value."""
        kind = CounterMetricFamily if self.is_total else GaugeMetricFamily
        family = kind(f"tandem_{self.name}", self.text, labels=[self.label] if self.label else [])
        for label, value in values.items() if isinstance(values, Mapping) else [(None, values)]:
            family.add_metric([] if label is None else [label], value)
        return family


Readings = Mapping[Series, Mapping[str, float] | float]
"""Values by label; a number where the series has no label."""
