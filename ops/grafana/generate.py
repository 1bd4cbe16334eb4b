"""Writes the Grafana dashboard tandem.json beside this file.

    pip install -e '.[ops]'
    python ops/grafana/generate.py

A panel is a row of `PANELS`; ops/compose and the Helm chart provision the file. Recorded series are those of
ops/prometheus/rules.yml.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import common, dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as shapes
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    FieldColorModeId,
    ThresholdsMode,
    VariableRefresh,
)
from grafana_foundation_sdk.models.dashboard import Threshold as Step

FILE = Path(__file__).with_name("tandem.json")
_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_WIDTH, _HEIGHT = 8, 8
# Selects the chosen servers; panels of recorded series have none, because those are sums over all servers.
_S = 'instance=~"$instance"'
_SC = f'{_S},class=~"$class"'
_ENDED = ',outcome!="aborted"'


@dataclass(frozen=True, slots=True)
class PanelRow:
    """One time series panel.

    Attributes:
        title: heading.
        text: what it shows and what to look for.
        unit: Grafana's name of the unit.
        queries: PromQL expressions with the legend of each.
        threshold: a line at this value.
        is_stacked: whether the series add up.
    """

    title: str
    text: str
    unit: str
    queries: Sequence[tuple[str, str]]
    threshold: float | None = None
    is_stacked: bool = False


def quantile(level: float, name: str, by: str = "class") -> str:
    """The quantile of a histogram over five minutes."""
    rate = f"sum by ({by}, le) (rate(tandem_{name}_bucket{{{_SC}}}[5m]))"
    return f"histogram_quantile({level}, {rate})"


def rate(name: str, by: str, *, selector: str = _S) -> str:
    """The rate of a counter per second over five minutes."""
    return f"sum by ({by}) (rate(tandem_{name}{{{selector}}}[5m]))"


def gauge(name: str, by: str, *, selector: str = _S) -> str:
    """The sum of a gauge over the chosen servers."""
    return f"sum by ({by}) (tandem_{name}{{{selector}}})"


PANELS: dict[str, Sequence[PanelRow]] = {
    "Objectives": (
        PanelRow(
            "Attainment", "Share of requests that met every objective; rejected ones are misses.",
            "percentunit", [('1 - class:tandem_miss_ratio:rate5m{class=~"$class"}', "{{class}}")], 0.9,
        ),
        PanelRow(
            "Error budget burn", "1 misses exactly what the target allows. Alerts compare two windows.",
            "none",
            [
                ('class:tandem_burn_rate:rate5m{class=~"$class"}', "{{class}} 5m"),
                ('class:tandem_burn_rate:rate1h{class=~"$class"}', "{{class}} 1h"),
            ], 1,
        ),
        PanelRow(
            "Ended requests", "By outcome; only met ones count as goodput.", "reqps",
            [(rate("requests_total", "outcome", selector=_SC), "{{outcome}}")], is_stacked=True,
        ),
        PanelRow(
            "Missed objectives", "Which objective finished requests missed.", "reqps",
            [(rate("slo_missed_total", "class, objective", selector=_SC), "{{class}} {{objective}}")],
        ),
        PanelRow(
            "Rejections and evictions", "By reason; `POST /admin/explain` has the numbers of one.", "reqps",
            [(rate("decisions_total", "reason", selector=_S + ',decision=~"REJECT|EVICT"'), "{{reason}}")],
            is_stacked=True,
        ),
        PanelRow(
            "Deferrals", "Requests that waited at the gate, by the first reason.", "reqps",
            [(rate("decisions_total", "reason", selector=_S + ',decision="DEFER"'), "{{reason}}")],
            is_stacked=True,
        ),
    ),
    "Latency": (
        PanelRow(
            "Time to first token", "From arrival at the gate.", "s",
            [
                (quantile(0.5, "time_to_first_token_seconds"), "{{class}} p50"),
                (quantile(0.99, "time_to_first_token_seconds"), "{{class}} p99"),
            ],
        ),
        PanelRow(
            "Time per output token", "Mean of each request after its first token; 99th percentile.", "s",
            [(quantile(0.99, "time_per_output_token_seconds"), "{{class}} p99")],
        ),
        PanelRow(
            "End to end", "99th percentile, embeddings included.", "s",
            [(quantile(0.99, "e2e_request_latency_seconds", "class, kind"), "{{class}} {{kind}} p99")],
        ),
        PanelRow(
            "Wait at the gate", "99th percentile of the time to dispatch.", "s",
            [(quantile(0.99, "request_queue_time_seconds", "class, kind"), "{{class}} {{kind}} p99")],
        ),
        PanelRow(
            "Longest pause", "Between two output tokens of a request; 99th percentile.", "s",
            [(quantile(0.99, "longest_token_gap_seconds"), "{{class}} p99")],
        ),
        PanelRow(
            "Error of the first-token forecast", "Mean absolute error of the median forecast.", "s",
            [(f"max by (class) (tandem_ttft_forecast_error_seconds{{{_SC}}})", "{{class}}")],
        ),
    ),
    "Load": (
        PanelRow(
            "Predicted utilisation", "Largest part in use or predicted; at 1 an objective is at risk.",
            "percentunit", [(f"tandem_predicted_utilisation{{{_S}}}", "{{instance}}")], 1,
        ),
        PanelRow(
            "Waiting", "Requests at the gate and in the engine.", "none",
            [
                (gauge("requests_waiting", "owner"), "{{owner}} gate"),
                (gauge("engine_requests_waiting", "owner"), "{{owner}} engine"),
            ],
        ),
        PanelRow(
            "Running", "Open leases, and requests in the engine's batch.", "none",
            [
                (gauge("requests_running", "owner"), "{{owner}} leases"),
                (gauge("engine_requests_running", "owner"), "{{owner}} batch"),
            ],
        ),
        PanelRow(
            "Device time by owner",
            "Share of a second in engine steps and embedding passes, mean of the servers.", "percentunit",
            [(f"avg by (owner) (rate(tandem_device_seconds_total{{{_S}}}[5m]))", "{{owner}}")],
            is_stacked=True,
        ),
        PanelRow(
            "Preemptions", "By the gate (class) and by the engine.", "reqps",
            [
                (rate("preemptions_total", "class", selector=_SC), "gate {{class}}"),
                (rate("engine_preemptions_total", "owner"), "engine {{owner}}"),
            ],
        ),
        PanelRow(
            "Tokens", "Prompt tokens started, output tokens finished, and tokens to compute again.", "none",
            [
                (rate("prefix_cache_queries_total", "class", selector=_SC), "{{class}} prompt"),
                (rate("request_generation_tokens_sum", "class", selector=_SC), "{{class}} output"),
                (rate("engine_recompute_tokens_total", "owner"), "{{owner}} again"),
            ],
        ),
    ),
    "Memory": (
        PanelRow(
            "Leases and quotas", "What leases hold, and the quota of each owner.", "bytes",
            [
                (gauge("held_bytes", "owner"), "{{owner}} held"),
                (gauge("quota_bytes", "owner"), "{{owner}} quota"),
            ],
        ),
        PanelRow(
            "Predicted memory", "Predicted final sizes of open leases; bytes beyond the quota.", "bytes",
            [
                (gauge("predicted_lease_bytes", "owner"), "{{owner}} predicted"),
                (gauge("deficit_bytes", "owner"), "{{owner}} deficit"),
            ],
        ),
        PanelRow(
            "Urgency", "Of waiting and running requests; it moves the quotas.", "none",
            [(f"max by (owner) (tandem_urgency{{{_S}}})", "{{owner}}")],
        ),
        PanelRow(
            "Quota moves", "Changes, and bytes preempted for the other owner.", "none",
            [
                (f"sum(rate(tandem_quota_moves_total{{{_S}}}[5m]))", "moves/s"),
                (rate("reclaimed_bytes_total", "owner"), "{{owner}} reclaimed bytes/s"),
            ],
        ),
        PanelRow(
            "Device", "Free memory, that of other processes, and memory withheld from the quotas.", "bytes",
            [(gauge("device_bytes", "what", selector=_S + ',what=~"free|ours|others|withheld"'), "{{what}}")],
        ),
        PanelRow(
            "Prefix cache", "Share of prompt tokens that the engine had.", "percentunit",
            [
                (
                    f"{rate('prefix_cache_hits_total', 'class', selector=_SC)} / "
                    f"({rate('prefix_cache_queries_total', 'class', selector=_SC)} > 0)",
                    "{{class}}",
                )
            ],
        ),
    ),
    "Boxes": (
        PanelRow(
            "Attainment by box", "A box that misses more than its neighbours is slow, or gets too much.",
            "percentunit",
            [
                (
                    rate("requests_total", "instance", selector=_SC + ',outcome="met"')
                    + f" / ({rate('requests_total', 'instance', selector=_SC + _ENDED)} > 0)",
                    "{{instance}}",
                )
            ], 0.9,
        ),
        PanelRow(
            "Ended requests by box", "What the router gives to each.", "reqps",
            [(rate("requests_total", "instance", selector=_SC), "{{instance}}")], is_stacked=True,
        ),
        PanelRow(
            "Time to first token by box", "99th percentile.", "s",
            [(quantile(0.99, "time_to_first_token_seconds", "instance"), "{{instance}}")],
        ),
        PanelRow(
            "Waiting by box", "Requests at the gate.", "none",
            [(gauge("requests_waiting", "instance"), "{{instance}}")],
        ),
        PanelRow(
            "Restarts by box", "Of engines and embedding workers, in 10 minutes.", "none",
            [
                (
                    f"sum by (instance) (increase(tandem_{what}_restarts_total{{{_S}}}[10m]))",
                    f"{{{{instance}}}} {what}",
                )
                for what in ("engine", "embedding")
            ],
        ),
        PanelRow(
            "Configuration by box", "The version in force; it counts the changes since the start.", "none",
            [(f"tandem_config_version{{{_S}}}", "{{instance}}")],
        ),
    ),
    "Forecasts and faults": (
        PanelRow(
            "Coverage", "Share of outcomes within the 0.9 quantile; 0.9 is calibrated.", "percentunit",
            [
                (f"avg by (class) (tandem_length_forecast_coverage{{{_SC}}})", "{{class}} length"),
                (f"avg by (class) (tandem_ttft_forecast_coverage{{{_SC}}})", "{{class}} first token"),
                (f"avg by (level) (tandem_embedding_forecast_coverage{{{_S}}})", "embeddings {{level}}"),
            ], 0.9,
        ),
        PanelRow(
            "Length forecast error", "Mean absolute error, and bias, in tokens.", "none",
            [
                (f"avg by (class) (tandem_length_forecast_error_tokens{{{_SC}}})", "{{class}} error"),
                (f"avg by (class) (tandem_length_forecast_bias_tokens{{{_SC}}})", "{{class}} bias"),
            ],
        ),
        PanelRow(
            "Restarts and faults", "In 10 minutes; a healthy server has none.", "none",
            [
                (f"sum(increase(tandem_{name}{{{_S}}}[10m]))", legend)
                for name, legend in (
                    ("engine_stalls_total", "stalls"),
                    ("engine_restarts_total", "engine restarts"),
                    ("embedding_restarts_total", "worker restarts"),
                    ("embedding_out_of_memory_total", "out of memory"),
                    ("device_alerts_total", "device alerts"),
                    ("quota_failures_total", "quota failures"),
                    ("predictor_failures_total", "predictor failures"),
                    ("requests_shed_total", "shed"),
                )
            ],
        ),
    ),
}  # fmt: skip


def panel(row: PanelRow) -> timeseries.Panel:
    """The panel of one row."""
    made = (
        timeseries.Panel()
        .title(row.title)
        .description(row.text)
        .unit(row.unit)
        .datasource(_SOURCE)
        .height(_HEIGHT)
        .span(_WIDTH)
        .line_width(1)
        .fill_opacity(25 if row.is_stacked else 5)
        .show_points(shapes.VisibilityMode.NEVER)
        .axis_soft_min(0)
        .legend(
            common.VizLegendOptions()
            .display_mode(shapes.LegendDisplayMode.LIST)
            .placement(shapes.LegendPlacement.BOTTOM)
        )
        .tooltip(
            common.VizTooltipOptions().mode(shapes.TooltipDisplayMode.MULTI).sort(shapes.SortOrder.DESCENDING)
        )
    )
    for number, (expression, legend) in enumerate(row.queries):
        made.with_target(
            prometheus.Dataquery()
            .expr(expression)
            .legend_format(legend)
            .ref_id(chr(ord("A") + number))
            .datasource(_SOURCE)
        )
    if row.is_stacked:
        made.stacking(common.StackingConfig().mode(shapes.StackingMode.NORMAL))
    if row.threshold is not None:
        made.thresholds(
            dashboard.ThresholdsConfig()
            .mode(ThresholdsMode.ABSOLUTE)
            .steps([Step(value=None, color="transparent"), Step(value=row.threshold, color="red")])
        )
        made.thresholds_style(
            common.GraphThresholdsStyleConfig().mode(shapes.GraphThresholdsStyleMode.DASHED)
        )
    return made.color_scheme(dashboard.FieldColor().mode(FieldColorModeId.PALETTE_CLASSIC_BY_NAME))


def variable(label: str) -> dashboard.QueryVariable:
    """A variable that selects values of a label; all by default."""
    return (
        dashboard.QueryVariable(label)
        .label(label.capitalize())
        .datasource(_SOURCE)
        .query(f"label_values(tandem_requests_total, {label})")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
    )


def built() -> dict[str, Any]:
    """The dashboard as Grafana's JSON."""
    made = (
        dashboard.Dashboard("Tandem")
        .uid("tandem")
        .description("Generated by ops/grafana/generate.py. The server's own page is /dashboard.")
        .tags(["tandem", "llm"])
        .refresh("30s")
        .time("now-3h", "now")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .readonly()
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(variable("instance"))
        .with_variable(variable("class"))
        .annotation(
            dashboard.AnnotationQuery()
            .name("Configuration")
            .datasource(_SOURCE)
            .enable(True)
            .icon_color("orange")
            .expr(f"changes(tandem_config_version{{{_S}}}[1m]) > 0")
        )
    )
    for title, rows in PANELS.items():
        made.with_row(dashboard.Row(title))
        for row in rows:
            made.with_panel(panel(row))
    found: dict[str, Any] = json.loads(json.dumps(made.build(), cls=JSONEncoder))
    return found


def text() -> str:
    """The file's content."""
    return json.dumps(built(), indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
    sys.stdout.write(f"{FILE}: {sum(map(len, PANELS.values()))} panels\n")
