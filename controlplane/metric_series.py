"""Prometheus series: how they are declared, described, read at scrape time and exposed."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from controlplane.core.kv_geometry import KvGeometry
from controlplane.vllm_metric_names import exposition_with_vllm_names

# `_created` series would double the number of series, and the text format shows them as gauges.
disable_created_metrics()  # type: ignore[no-untyped-call]


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


class SeriesRegistry:
    """Series in a registry of their own: one process may hold several services."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.described: list[SeriesInfo] = []
        self._read_elsewhere: list[Series] = []
        self._readings: Readings = {}
        self.registry.register(self)

    def _histogram(
        self, name: str, text: str, labels: tuple[str, ...], buckets: tuple[float, ...]
    ) -> Histogram:
        self.described.append(SeriesInfo(f"tandem_{name}", "histogram", labels, text))
        return Histogram(f"tandem_{name}", text, labels, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, text: str, labels: tuple[str, ...]) -> Counter:
        self.described.append(SeriesInfo(f"tandem_{name}_total", "counter", labels, text))
        return Counter(f"tandem_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, label: str) -> Series:
        return self._series(Series(name, text, label, is_total=False))

    def _total(self, name: str, text: str, label: str | None = None) -> Series:
        return self._series(Series(name, text, label, is_total=True))

    def _series(self, series: Series) -> Series:
        labels = () if series.label is None else (series.label,)
        kind = "counter" if series.is_total else "gauge"
        self.described.append(SeriesInfo(f"tandem_{series.name}", kind, labels, series.text))
        self._read_elsewhere.append(series)
        return series

    def collect(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        """The families that `exposition` was given readings for; called by the registry."""
        return [series.family(self._readings.get(series, {})) for series in self._read_elsewhere]

    def exposition(self, readings: Readings, vllm: tuple[str, KvGeometry] | None = None) -> bytes:
        """Returns the Prometheus text page with these readings.

        `vllm` repeats series under vLLM's names, for the model of this name with this KV geometry.
        """
        self._readings = readings
        if vllm is None:
            return generate_latest(self.registry)
        return exposition_with_vllm_names(self.registry.collect(), *vllm)
