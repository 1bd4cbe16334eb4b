"""vLLM's names for series of the chat model, for routers and dashboards that know vLLM.

Each value is computed from Tandem's own series, over all service classes. Names, labels and meaning are
those of vLLM's `vllm/v1/metrics/loggers.py`; `gpu_cache_usage_perc` is the earlier name of
`kv_cache_usage_perc`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.samples import Sample

from controlplane.core.kv_geometry import KvGeometry

_HISTOGRAM = ("_bucket", "_sum", "_count")
_USED, _QUOTA = "tandem_engine_used_bytes", "tandem_quota_bytes"
_CACHE_CONFIG = "vllm:cache_config_info"


@dataclass(frozen=True, slots=True)
class VllmSeries:
    """A series under vLLM's name: the sum of the samples `sources`, over `divisor` where one is given.

    `kind` is counter, gauge or histogram. Sources of a histogram are named without `_bucket`.
    """

    name: str
    kind: str
    sources: tuple[str, ...]
    text: str
    divisor: str | None = None

    @property
    def family(self) -> str:
        """The name without the suffix of a counter."""
        return self.name.removesuffix("_total")


_USAGE = "Share of the KV-cache quota that requests hold; 1 is full."
SERIES = (
    VllmSeries(
        "vllm:num_requests_running",
        "gauge",
        ("tandem_engine_requests_running",),
        "Requests in the engine's running batch.",
    ),
    VllmSeries(
        "vllm:num_requests_waiting",
        "gauge",
        ("tandem_requests_waiting", "tandem_engine_requests_waiting"),
        "Requests that wait at the gate or in the engine.",
    ),
    VllmSeries("vllm:kv_cache_usage_perc", "gauge", (_USED,), _USAGE, _QUOTA),
    VllmSeries("vllm:gpu_cache_usage_perc", "gauge", (_USED,), f"{_USAGE} Earlier name.", _QUOTA),
    VllmSeries(
        "vllm:num_preemptions_total",
        "counter",
        ("tandem_engine_preemptions_total",),
        "Preemptions by the engine.",
    ),
    VllmSeries(
        "vllm:prompt_tokens_total",
        "counter",
        ("tandem_prefix_cache_queries_total",),
        "Prompt tokens of requests that the engine started.",
    ),
    VllmSeries(
        "vllm:generation_tokens_total",
        "counter",
        ("tandem_request_generation_tokens_sum",),
        "Output tokens of finished requests, of choices the longest; vLLM counts all of them, at each step.",
    ),
    VllmSeries(
        "vllm:prefix_cache_queries_total",
        "counter",
        ("tandem_prefix_cache_queries_total",),
        "Prompt tokens that were looked up in the prefix cache.",
    ),
    VllmSeries(
        "vllm:prefix_cache_hits_total",
        "counter",
        ("tandem_prefix_cache_hits_total",),
        "Prompt tokens that were in the prefix cache.",
    ),
    VllmSeries(
        "vllm:time_to_first_token_seconds",
        "histogram",
        ("tandem_time_to_first_token_seconds",),
        "Time from arrival at the host to the first token.",
    ),
    VllmSeries(
        "vllm:request_time_per_output_token_seconds",
        "histogram",
        ("tandem_time_per_output_token_seconds",),
        "Mean time per output token of a request after its first token.",
    ),
    VllmSeries(
        "vllm:e2e_request_latency_seconds",
        "histogram",
        ("tandem_e2e_request_latency_seconds",),
        "Time from arrival at the host to the end.",
    ),
    VllmSeries(
        "vllm:request_queue_time_seconds",
        "histogram",
        ("tandem_request_queue_time_seconds",),
        "Time from arrival at the host to dispatch to the engine.",
    ),
    VllmSeries(
        "vllm:request_prompt_tokens",
        "histogram",
        ("tandem_request_prompt_tokens",),
        "Prompt tokens of a finished request.",
    ),
    VllmSeries(
        "vllm:request_generation_tokens",
        "histogram",
        ("tandem_request_generation_tokens",),
        "Output tokens of a finished request; of several choices, of the longest.",
    ),
)
"""The series computed from Tandem's own; `vllm:cache_config_info` is added from the cache's geometry."""

DESCRIPTIONS: Mapping[str, tuple[str, str]] = {
    **{series.name: (series.kind, series.text) for series in SERIES},
    _CACHE_CONFIG: ("gauge", "1, with the labels `block_size` in tokens and `num_gpu_blocks` of the quota."),
}
"""Type and meaning by name, for the reference page."""


class _Collected(CollectorRegistry):
    """Families that were collected already, in the form that `generate_latest` reads."""

    def __init__(self, families: Iterable[Metric]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def exposition_with_vllm_names(families: Iterable[Metric], model_name: str, geometry: KvGeometry) -> bytes:
    """Returns the Prometheus text page of the families, followed by those under vLLM's names."""
    own = list(families)
    return generate_latest(_Collected([*own, *vllm_families(own, model_name, geometry)]))


def vllm_families(families: Iterable[Metric], model_name: str, geometry: KvGeometry) -> Iterator[Metric]:
    """The families under vLLM's names; one whose source has no sample, as of a dead engine, has none."""
    samples: dict[str, list[Sample]] = {}
    for family in families:
        for sample in family.samples:
            of_the_model = sample.labels.get("kind", "generate"), sample.labels.get("owner", "llm")
            if of_the_model == ("generate", "llm"):
                samples.setdefault(sample.name, []).append(sample)
    labels = {"model_name": model_name, "engine": "0"}
    for series in SERIES:
        family = Metric(series.family, series.text, series.kind)
        for suffix in _HISTOGRAM if series.kind == "histogram" else ("",):
            for bucket, value in _summed(series, suffix, samples).items():
                more = {} if bucket is None else {"le": bucket}
                family.add_sample(series.name + suffix, labels | more, value)
        yield family
    config = Metric(_CACHE_CONFIG, DESCRIPTIONS[_CACHE_CONFIG][1], "gauge")
    blocks = sum(int(quota.value) for quota in samples.get(_QUOTA, ())) // geometry.bytes_per_block
    sizes = {"block_size": str(geometry.block_tokens), "num_gpu_blocks": str(blocks)}
    config.add_sample(_CACHE_CONFIG, labels | sizes, 1)
    yield config


def _summed(
    series: VllmSeries, suffix: str, samples: Mapping[str, Iterable[Sample]]
) -> Mapping[str | None, float]:
    """The sum over sources and classes, by bucket bound (None without); empty if a source has no sample."""
    names = [source + suffix for source in series.sources]
    if not all(name in samples for name in names):
        return {}
    sums: dict[str | None, float] = {}
    for name in names:
        for sample in samples[name]:
            bucket = sample.labels.get("le")
            sums[bucket] = sums.get(bucket, 0.0) + sample.value
    if series.divisor is None:
        return sums
    divisor = sum(sample.value for sample in samples.get(series.divisor, ()))
    return {bucket: value / divisor for bucket, value in sums.items()} if divisor else {}
