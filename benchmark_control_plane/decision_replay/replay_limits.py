"""What a replay leaves as in the log although a configuration differs there, and what it extrapolates."""

from collections.abc import Iterator, Mapping
from typing import Any

from benchmark_control_plane.decision_replay.recorded_traffic import RecordedTraffic
from benchmark_control_plane.decision_replay.static_shares import EMBEDDING_SHARE, LLM_SHARE, decide_sizes
from benchmark_control_plane.report.formats import yaml_value
from benchmark_control_plane.simulator.simulation import config_of
from controlplane.config import Config
from controlplane.config.documents import flattened
from controlplane.config.redacted import redacted_values
from controlplane.core.engine_reports import DeviceSharing

_AS_LOGGED = ("models", "pool", "predictors")


def cautions(traffic: RecordedTraffic, config: Config) -> list[str]:
    """One sentence for each key of `config` that is not replayed, and for what the log cannot show of it.

    Raises ConfigError if this release refuses the configuration of the log.
    """
    return [*_not_replayed(traffic, config), *_extrapolated(traffic, config)]


def _not_replayed(traffic: RecordedTraffic, config: Config) -> Iterator[str]:
    sections = _AS_LOGGED if traffic.machine.pool_bytes is not None else (*_AS_LOGGED, "quota")
    logged = _values(traffic.config["config"], sections)
    given = _values(redacted_values(config, lambda name: name), sections)
    replayed = {LLM_SHARE, EMBEDDING_SHARE} if decide_sizes(traffic) else set[str]()
    for key in sorted((logged.keys() | given.keys()) - replayed):
        if logged.get(key) != given.get(key):
            now, was = (_shown(values, key) for values in (given, logged))
            yield f"{key}: {now} is not replayed; it stays {was}, as in the log"


def _values(content: Mapping[str, Any], sections: tuple[str, ...]) -> dict[str, Any]:
    return dict(flattened({name: content[name] for name in sections if name in content}))


def _shown(values: Mapping[str, Any], key: str) -> str:
    return yaml_value(values[key]) if key in values else "its default"


def _extrapolated(traffic: RecordedTraffic, config: Config) -> Iterator[str]:
    logged = config_of(traffic.sections, has_pool=traffic.machine.pool_bytes is not None)
    was, now = _pacing(logged), _pacing(config)
    if was != now and traffic.machine.sharing is not DeviceSharing.TURNS:
        yield (
            f"decode pacing is {now:g} instead of {was:g}: how much passes and steps slow each other down is "
            "known of the log's alone, and no stated error counts it"
        )


def _pacing(config: Config) -> float:
    """0 with the engine's own scheduler, whose steps wait for no pass."""
    options = config.engine_options()
    return 0.0 if options is None else options.decode_pacing
