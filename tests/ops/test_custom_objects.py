"""Objects of KEDA, the Prometheus operator and Grafana have fields and values of their definitions."""

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.ops.test_tools import CHART, CONFIG, OPTIONS, run

jsonschema = pytest.importorskip("jsonschema")

OPS = Path(__file__).resolve().parents[2] / "ops"
SCHEMA = json.loads(Path(__file__).with_name("custom_objects.schema.json").read_text(encoding="utf-8"))
CUSTOM = ("PodMonitor", "PrometheusRule", "ScaledObject")


def documents(text: str) -> list[Any]:
    return [one for one in yaml.safe_load_all(text) if one is not None]


def require_valid(name: str, found: Any) -> None:
    """Raises jsonschema.ValidationError if `found` is no object of the definition `name`."""
    jsonschema.validate(found, {**SCHEMA, "$ref": f"#/$defs/{name}"})


def checked(objects: list[Any]) -> Iterator[str]:
    """The kinds of the custom objects among these, each after its check."""
    for one in objects:
        if one["kind"] in CUSTOM:
            require_valid(one["kind"], one)
            yield one["kind"]


def committed() -> list[Any]:
    paths = sorted((OPS / "kubernetes/components").glob("*/*.yaml"))
    # test_inference_gateway checks the other ones.
    others = {"kustomization.yaml", "gateway.yaml"}
    manifests = [path for path in paths if path.name not in others]
    return [one for path in manifests for one in documents(path.read_text(encoding="utf-8"))]


def test_committed_custom_objects_follow_their_definitions():
    assert sorted(checked(committed())) == sorted(CUSTOM)
    unknown = {one["kind"] for one in committed()} - {*CUSTOM, "ConfigMap"}
    assert not unknown, "add a definition to custom_objects.schema.json"


def test_pods_are_scaled_by_their_own_load_and_not_by_that_of_a_release_with_a_longer_name():
    [scaled] = [one for one in committed() if one["kind"] == "ScaledObject"]
    query = scaled["spec"]["triggers"][0]["metadata"]["query"]
    pods = re.compile(re.findall(r'pod=~"([^"]+)"', query)[0])
    assert pods.fullmatch("tandem-6b7d9c5f4-x2x9k")
    assert not pods.fullmatch("tandem-batch-6b7d9c5f4-x2x9k")


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("ScaledObject", ("spec", "maxReplicas"), 4),
        ("ScaledObject", ("spec", "triggers", 0, "metadata", "threshold"), 0.8),
        ("ScaledObject", ("spec", "triggers", 0, "metricType"), "Average"),
        ("ScaledObject", ("spec", "advanced", "behavior"), {}),
        ("PodMonitor", ("spec", "podMetricsEndpoints", 0, "interval"), "5 s"),
        ("PodMonitor", ("spec", "endpoints"), []),
        ("PrometheusRule", ("spec", "groups", 0, "rules", 0, "alert"), "also an alert"),
        ("PrometheusRule", ("spec", "groups", 0, "rules", 0, "labels"), {"severity": 1}),
    ],
)
def test_a_wrong_field_or_value_is_found(kind: str, path: tuple[str | int, ...], value: Any):
    wrong = copy.deepcopy(next(one for one in committed() if one["kind"] == kind))
    *inner, last = path
    target = wrong
    for key in inner:
        target = target[key]
    target[last] = value
    with pytest.raises(jsonschema.ValidationError):
        require_valid(kind, wrong)


@pytest.mark.long
def test_custom_objects_of_the_chart_follow_their_definitions():
    labelled = f"{OPTIONS},monitoring.labels.release=prometheus,autoscaling.target=0.75"
    values = ("--namespace", "n", "--set", labelled, CONFIG)
    rendered = documents(run("helm", "template", "other", CHART, *values))
    assert sorted(checked(rendered)) == sorted(CUSTOM)


@pytest.mark.long
def test_every_object_of_the_example_follows_its_definition(tmp_path):
    objects = documents(run("kubectl", "kustomize", "ops/kubernetes/example"))
    assert sorted(checked(objects)) == sorted(CUSTOM)
    core = [one for one in objects if one["kind"] not in CUSTOM]
    assert len(core) == 5
    file = tmp_path / "core.yaml"
    file.write_text(yaml.safe_dump_all(core), encoding="utf-8")
    run("kubernetes-validate", "--strict", "-k", "1.34", str(file))


def test_the_alert_of_a_dead_server_selects_the_job_of_the_pods():
    """With any release and namespace: by default the job is `namespace/name` of the PodMonitor."""
    [monitor] = [one for one in committed() if one["kind"] == "PodMonitor"]
    job = monitor["spec"]["selector"]["matchLabels"][monitor["spec"]["jobLabel"]]
    [rules] = [one for one in committed() if one["kind"] == "PrometheusRule"]
    expressions = [rule["expr"] for group in rules["spec"]["groups"] for rule in group["rules"]]
    selected = [match[1] for expr in expressions for match in re.finditer(r'\bup\{job=~"([^"]+)"', expr)]
    assert selected and all(re.fullmatch(pattern, job) for pattern in selected)


def test_grafana_is_provisioned_with_what_compose_mounts():
    compose = yaml.safe_load((OPS / "compose/compose.yaml").read_text(encoding="utf-8"))["services"]
    mounts = dict(mount.split(":")[:2] for mount in compose["grafana"]["volumes"])
    folder = OPS / "compose" / next(source for source, at in mounts.items() if at.endswith("/provisioning"))
    found = {path.parent.name: documents(path.read_text("utf-8")) for path in folder.glob("*/*.yaml")}
    assert found.keys() == {"dashboards", "datasources"}
    for name, [one] in found.items():
        require_valid(name, one)
    [provider] = found["dashboards"][0]["providers"]
    dashboard = next(source for source, at in mounts.items() if at.startswith(provider["options"]["path"]))
    panels = json.loads((OPS / "compose" / dashboard).read_text(encoding="utf-8"))
    [source] = found["datasources"][0]["datasources"]
    # The dashboard's variable takes the default source of this type.
    [variable] = [one for one in panels["templating"]["list"] if one["name"] == "datasource"]
    assert (variable["query"], source["isDefault"]) == (source["type"], True)
    host, _, port = source["url"].removeprefix("http://").partition(":")
    assert compose[host]["ports"][0].endswith(f":{port}")


@pytest.mark.long
def test_a_pod_monitor_sends_the_key_of_the_metrics():
    given = "monitoring.podMonitor=true,monitoring.keySecret.name=tandem-metrics"
    text = run("helm", "template", "t", CHART, "--set", f"{given},monitoring.keySecret.key=token")
    [monitor] = [one for one in documents(text) if one["kind"] == "PodMonitor"]
    require_valid("PodMonitor", monitor)
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["authorization"] == {"credentials": {"name": "tandem-metrics", "key": "token"}}
    assert "keySecret" in run("helm", "template", "t", CHART, "--set", given, status=1)
