"""What the files in ops/ name exists: metrics, recorded series, labels, configurations, commands, files."""

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from controlplane.api.operations.health_responder import _NICENESS
from controlplane.config import load
from controlplane.metrics import Metrics
from controlplane.service.preflight import _MPS_FOLDER
from controlplane.vllm_metric_names import DESCRIPTIONS
from ops.image.run_steps import steps

ROOT = Path(__file__).resolve().parents[2]
OPS = ROOT / "ops"
RULES = yaml.safe_load((OPS / "prometheus/rules.yml").read_text(encoding="utf-8"))["groups"]
DASHBOARD = json.loads((OPS / "grafana/tandem.json").read_text(encoding="utf-8"))
DEPLOYMENT, CONFIG_MAP = (
    next(
        part
        for part in yaml.safe_load_all((OPS / "kubernetes/base/tandem.yaml").read_text(encoding="utf-8"))
        if part["kind"] == kind
    )
    for kind in ("Deployment", "ConfigMap")
)
SUFFIXES = ("", "_bucket", "_sum", "_count")
RECORDED = re.compile(r"\b[a-z]+:tandem_\w+:\w+\b|\btandem:\w+")
# Recorded names are taken out first. A word after a slash or a dash is a path or a directory, not a metric.
METRIC = re.compile(r"(?<![\w/.:-])tandem_[a-z0-9_]*[a-z0-9](?![\w:])")
SELECTOR = re.compile(r"(tandem_\w+)\{([^}]*)\}")


def expressions() -> Iterator[str]:
    """All PromQL of rules and dashboard."""
    yield from (rule["expr"] for group in RULES for rule in group["rules"])
    for panel in DASHBOARD["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    yield from (note["expr"] for note in DASHBOARD["annotations"]["list"])


def labels_of_series() -> dict[str, set[str]]:
    """Labels of each sample name, those that Prometheus adds included."""
    return {
        series.name + suffix: {*series.labels, "instance", "job", "le"}
        for series in Metrics().described
        for suffix in (SUFFIXES if series.kind == "histogram" else ("",))
    }


FILES = sorted(
    path
    for path in OPS.rglob("*")
    if path.is_file() and not path.is_symlink() and path.parent.name != "__pycache__"
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(OPS)))
def test_metrics_that_a_file_names_are_served(path: Path) -> None:
    text = RECORDED.sub("", path.read_text(encoding="utf-8"))
    assert {name for name in METRIC.findall(text) if name not in labels_of_series()} == set()
    assert set(re.findall(r"\bvllm:\w+", text)) <= DESCRIPTIONS.keys()


def test_recorded_series_that_are_used_are_recorded() -> None:
    recorded = {rule["record"] for group in RULES for rule in group["rules"] if "record" in rule}
    used = {name for expression in expressions() for name in RECORDED.findall(expression)}
    assert used and used <= recorded


def test_the_dashboard_shows_most_series_and_the_pattern_finds_them() -> None:
    shown = {name for expression in expressions() for name in METRIC.findall(RECORDED.sub("", expression))}
    assert len(shown) > 40


def test_selectors_name_labels_that_the_series_has() -> None:
    known, seen = labels_of_series(), 0
    for expression in expressions():
        for name, selector in SELECTOR.findall(RECORDED.sub("", expression)):
            seen += 1
            assert set(re.findall(r"(\w+) *[=!]~?\"", selector)) <= known[name], expression
        for grouped in re.findall(r"by \(([^)]*)\)", expression):
            labels = {label.strip() for label in grouped.split(",")}
            assert any(labels <= known[name] for name in METRIC.findall(expression)), expression
    assert seen > 20


def test_each_alert_has_a_severity_and_texts_and_is_tested_firing_and_silent() -> None:
    tests = (OPS / "prometheus/rules_test.yml").read_text(encoding="utf-8")
    alerts = [rule for group in RULES for rule in group["rules"] if "alert" in rule]
    assert len(alerts) > 10
    for rule in alerts:
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"].keys() == {"summary", "description"}
        name = re.escape(rule["alert"])
        assert re.search(rf"alertname: {name}\n *eval_time.*\n *exp_alerts:\n|alertname=\"{name}\"", tests), (
            name
        )
        assert re.search(rf"alertname: {name}, eval_time: \w+, exp_alerts: \[\]", tests), name


def test_the_pods_probes_follow_the_configuration_in_the_chart() -> None:
    colocated = (ROOT / "configs/colocated.yaml").read_text(encoding="utf-8")
    assert CONFIG_MAP["data"]["tandem.yaml"].strip() == colocated.strip()
    server = load(ROOT / "configs/colocated.yaml").server
    pod = DEPLOYMENT["spec"]["template"]["spec"]
    [container] = pod["containers"]
    probes = {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")}
    assert {probe["port"] for probe in probes.values()} == {server.health_port}
    assert [probes[kind]["path"] for kind in probes] == ["/ready", "/ready", "/health"]
    assert {port["containerPort"] for port in container["ports"]} == {server.port, server.health_port}
    assert pod["terminationGracePeriodSeconds"] > 5 + server.drain_ms / 1_000


def test_a_service_named_vllm_sets_no_variable_of_vllm() -> None:
    """Its VLLM_PORT would be a URL, for which vLLM raises ValueError at its start."""
    assert DEPLOYMENT["spec"]["template"]["spec"]["enableServiceLinks"] is False


def test_what_a_cpu_engine_compiles_at_its_start_can_be_loaded() -> None:
    # The final stage alone is the image.
    final = (OPS / "image/cpu.Dockerfile").read_text(encoding="utf-8").rpartition("\nFROM ")[2]
    assert re.search(r"apt-get install [^&]*\bg\+\+ ", final)
    compose = yaml.safe_load((OPS / "compose/compose.yaml").read_text(encoding="utf-8"))["services"]["tandem"]
    # Docker's default for a tmpfs is noexec.
    assert compose["tmpfs"] == ["/tmp:exec,mode=1777"]


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_the_images_copy_what_their_steps_read_and_end_without_root(kind: str) -> None:
    text = (OPS / f"image/{kind}.Dockerfile").read_text(encoding="utf-8")
    ignore = (OPS / f"image/{kind}.Dockerfile.dockerignore").read_text(encoding="utf-8").split()
    copied = [line[1:] for line in ignore if line.startswith("!")]
    assert [name for name in copied if not (ROOT / name).exists()] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {path.split("/")[0] for path in (*wheel["packages"], *wheel["force-include"])}
    assert needed | {"pyproject.toml", "README.md", "LICENSE"} <= set(copied)
    assert re.search(r"^USER 10001$", text, re.MULTILINE)
    extras = re.search(r"EXTRAS=(\S+)|\.\[(\S+)\]", text)
    assert extras is not None
    stated = (extras[1] or extras[2]).split(",")
    assert set(stated) <= project["project"]["optional-dependencies"].keys()
    assert "tandem" in project["project"]["scripts"] and '"tandem"]' in text


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_what_the_images_start_is_understood_without_a_builder(kind: str) -> None:
    last = {step.name: step for step in steps(OPS / f"image/{kind}.Dockerfile")}
    command = last["CMD"]
    assert (command.user, command.folder, command.environment["HOME"]) == ("10001", *["/home/tandem"] * 2)
    assert last["ENTRYPOINT"].words()[-1] == "tandem"
    assert command.words()[:2] == ["serve", "/etc/tandem/tandem.yaml"]
    assert "/ready" in last["HEALTHCHECK"].words()[-1]


def test_configurations_of_ops_are_valid() -> None:
    config = load(OPS / "kubernetes/example/tandem.yaml")
    assert config.server.vllm_metric_names and config.server.health_port == 8001


def test_the_unit_sees_the_pipes_of_mps() -> None:
    unit = (OPS / "systemd/tandem.service").read_text(encoding="utf-8")
    assert f"\nBindPaths=-{_MPS_FOLDER}\n" in unit and "\nPrivateTmp=yes\n" in unit


def test_the_unit_permits_the_niceness_of_the_health_process_without_a_capability():
    unit = (OPS / "systemd/tandem.service").read_text(encoding="utf-8")
    assert f"\nLimitNICE={_NICENESS}\n" in unit and "\nCapabilityBoundingSet=\n" in unit
    # The limit is stated as a number elsewhere; the kernel counts from 20 downwards.
    guide = (ROOT / "docs/operator-guide.md").read_text(encoding="utf-8")
    assert f"--ulimit nice={20 - _NICENESS}" in guide
