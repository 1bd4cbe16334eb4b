"""The objects for the Gateway API's inference extension: their fields, and what they name exists."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from controlplane.vllm_metric_names import DESCRIPTIONS
from tests.ops.test_tools import CHART, run

jsonschema = pytest.importorskip("jsonschema", reason="the extra `ops` is not installed")

FOLDER = Path("ops/kubernetes")
SCHEMA = json.loads(Path(__file__).with_name("inference_gateway.schema.json").read_text(encoding="utf-8"))


def objects(path: str) -> dict[str, Any]:
    """Objects of a rendered file by kind."""
    return {one["kind"]: one for one in yaml.safe_load_all((FOLDER / path).read_text(encoding="utf-8"))}


GATEWAY, BASE = objects("components/inference-gateway/gateway.yaml"), objects("base/tandem.yaml")
PICKER = yaml.safe_load(GATEWAY["ConfigMap"]["data"]["picker.yaml"])


@pytest.mark.parametrize(
    "one", [GATEWAY["InferencePool"], GATEWAY["HTTPRoute"], PICKER], ids=lambda one: one["kind"]
)
def test_fields_are_those_of_the_definitions(one: dict[str, Any]) -> None:
    jsonschema.validate(one, SCHEMA)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**one, "extensionRef": {}}, SCHEMA)


def test_the_pool_has_the_pods_of_the_deployment_and_the_service_of_the_picker() -> None:
    pool, template = GATEWAY["InferencePool"]["spec"], BASE["Deployment"]["spec"]["template"]
    assert pool["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert not pool["selector"]["matchLabels"].items() <= (
        GATEWAY["Deployment"]["spec"]["template"]["metadata"]["labels"].items()
    )
    ports = [port["containerPort"] for port in template["spec"]["containers"][0]["ports"]]
    assert pool["targetPorts"][0]["number"] == ports[0]
    service, reference = GATEWAY["Service"], pool["endpointPickerRef"]
    assert (reference["name"], reference["port"]["number"]) == (
        service["metadata"]["name"],
        service["spec"]["ports"][0]["port"],
    )
    assert service["spec"]["selector"] == GATEWAY["Deployment"]["spec"]["selector"]["matchLabels"]
    [backend] = GATEWAY["HTTPRoute"]["spec"]["rules"][0]["backendRefs"]
    assert backend["name"] == GATEWAY["InferencePool"]["metadata"]["name"]


def test_the_picker_reads_series_that_a_box_exports() -> None:
    [container] = GATEWAY["Deployment"]["spec"]["template"]["spec"]["containers"]
    stated = dict(argument.removeprefix("--").split("=", 1) for argument in container["args"])
    named = {key: value for key, value in stated.items() if key.endswith("-metric")}
    assert named.pop("lora-info-metric") == ""
    assert len(named) == 2 and set(named.values()) <= DESCRIPTIONS.keys()
    assert stated["pool-name"] == GATEWAY["InferencePool"]["metadata"]["name"]
    assert stated["config-file"] == "/config/picker.yaml"
    types = {plugin["type"] for plugin in PICKER["plugins"]}
    assert {plugin["pluginRef"] for plugin in PICKER["schedulingProfiles"][0]["plugins"]} == types


@pytest.mark.long
def test_the_chart_states_the_port_and_the_gateway_of_its_values(tmp_path: Path) -> None:
    part = tmp_path / "part.yaml"
    part.write_text(
        "server: {port: 9000, vllm_metric_names: true}\nmodels: {chat: {model: m}}\n", encoding="utf-8"
    )
    values = (
        "inferenceGateway.enabled=true,inferenceGateway.gateway=outer,inferenceGateway.gatewayNamespace=edge"
    )
    text = run("helm", "template", "t", CHART, "--set", values, f"--set-file=config={part}")
    found = {one["kind"]: one for one in yaml.safe_load_all(text[text.index("---") :]) if one}
    assert found["InferencePool"]["spec"]["targetPorts"] == [{"number": 9000}]
    assert found["HTTPRoute"]["spec"]["parentRefs"] == [{"name": "outer", "namespace": "edge"}]
    for kind in ("InferencePool", "HTTPRoute"):
        jsonschema.validate(found[kind], SCHEMA)


@pytest.mark.long
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "server.vllm_metric_names is not true"),
        ({"vllm_metric_names": True, "metrics_key_sha256": "0" * 64}, "server.metrics_key_sha256 is set"),
    ],
)
def test_a_configuration_that_the_picker_cannot_read_is_refused(
    keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Without the series every pod would have the same score."""
    file = tmp_path / "my.yaml"
    file.write_text(yaml.safe_dump({"server": keys, "models": {"chat": {"model": "m"}}}), encoding="utf-8")
    enabled = "inferenceGateway.enabled=true"
    assert message in run(
        "helm", "template", "t", CHART, "--set", enabled, f"--set-file=config={file}", status=1
    )
    run("helm", "template", "t", CHART, f"--set-file=config={file}")
