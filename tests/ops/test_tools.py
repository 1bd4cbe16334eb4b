"""The files in ops/ pass the programs that read them; `tests/programs.py` says what a missing one does.

Grafana's SDK is in the extra `ops`, too.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.programs import required

ROOT = Path(__file__).resolve().parents[2]
OPS = ROOT / "ops"
CHART = "ops/helm/tandem"
OPTIONS = (
    "autoscaling.enabled=true,monitoring.podMonitor=true,monitoring.rules=true,monitoring.dashboard=true,"
    "inferenceGateway.enabled=true"
)
CONFIG = "--set-file=config=ops/kubernetes/example/tandem.yaml"
"""With the series that inferenceGateway needs."""

pytestmark = pytest.mark.long


def run(program: str, *arguments: str, status: int = 0) -> str:
    """Standard output of a program in the repository's root, or standard error after an expected failure."""
    command = [required(program), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stderr if status else done.stdout


def test_dockerfiles_pass_hadolint():
    run("hadolint", "ops/image/cpu.Dockerfile", "ops/image/gpu.Dockerfile")


def test_compose_files_pass_dclint():
    run("dclint", "--max-warnings", "0", "ops/compose")


@pytest.mark.parametrize("files", [["compose.yaml"], ["compose.yaml", "compose.gpu.yaml"]], ids=str)
def test_compose_files_are_read_by_docker_compose(files):
    # The program alone checks them; no daemon is asked.
    stated = [argument for file in files for argument in ("-f", f"ops/compose/{file}")]
    services = json.loads(run("docker-compose", *stated, "config", "--format", "json"))["services"]
    assert services.keys() == {"tandem", "prometheus", "grafana"}
    sources = [mount["source"] for one in services.values() for mount in one["volumes"]]
    binds = [Path(source) for source in sources if source.startswith("/")]
    assert len(binds) == 5 and all(path.exists() for path in binds)


def test_the_unit_passes_systemd(tmp_path):
    unit = (OPS / "systemd/tandem.service").read_text(encoding="utf-8")
    assert "ExecStart=/opt/tandem/bin/tandem serve" in unit and "KillMode=mixed" in unit
    # Only the path of the command differs, which has to exist.
    copy = tmp_path / "tandem.service"
    copy.write_text(unit.replace("/opt/tandem/bin/tandem", "/bin/true"), encoding="utf-8")
    # It exits with 0 after a warning too.
    run("systemd-analyze", "verify", "--man=no", "--recursive-errors=yes", str(copy))


def test_rules_and_configuration_pass_promtool():
    run("promtool", "check", "config", "ops/prometheus/prometheus.yml")
    assert "SUCCESS" in run("promtool", "test", "rules", "ops/prometheus/rules_test.yml")


def test_expressions_of_the_dashboard_are_promql(tmp_path):
    panels = json.loads((OPS / "grafana/tandem.json").read_text(encoding="utf-8"))["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    rules = [
        {"record": f"panel:query:{number}", "expr": query.replace("$instance", ".*").replace("$class", ".*")}
        for number, query in enumerate(queries)
    ]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}), encoding="utf-8")
    assert f"{len(queries)} rules found" in run("promtool", "check", "rules", str(file))


def test_the_committed_dashboard_is_what_the_generator_writes():
    pytest.importorskip("grafana_foundation_sdk", reason="the extra `ops` is not installed")
    location = OPS / "grafana/generate.py"
    spec = importlib.util.spec_from_file_location("generate_dashboard", location)
    generator = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = generator
    spec.loader.exec_module(generator)
    assert generator.FILE.read_text(encoding="utf-8") == generator.text(), "run ops/grafana/generate.py"


def test_the_chart_passes_lint_and_its_objects_their_schemas(tmp_path):
    run("helm", "lint", "--strict", CHART, "--set", OPTIONS, CONFIG)
    for options in ([], ["--set", "service.type=NodePort,home.existingClaim=models,replicas=3"]):
        file = tmp_path / "objects.yaml"
        file.write_text(run("helm", "template", "tandem", CHART, *options), encoding="utf-8")
        assert file.read_text(encoding="utf-8").count("\nkind: ") == 4
        run("kubernetes-validate", "--strict", "-k", "1.34", str(file))


def test_the_chart_refuses_unknown_values_and_incomplete_configurations(tmp_path):
    assert "replica" in run("helm", "template", "t", CHART, "--set", "replica=2", status=1)
    part = tmp_path / "part.yaml"
    part.write_text("server: {port: 9000}\n", encoding="utf-8")
    assert "models` is missing" in run("helm", "template", "t", CHART, f"--set-file=config={part}", status=1)
    part.write_text("server: {port: 9000, drain_ms: 90500}\nmodels: {chat: {model: m}}\n", encoding="utf-8")
    text = run("helm", "template", "t", CHART, f"--set-file=config={part}")
    [pod] = [
        one for one in yaml.safe_load_all(text[text.index("---") :]) if one and one["kind"] == "Deployment"
    ]
    spec = pod["spec"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] == 5 + 91 + 25
    assert spec["containers"][0]["livenessProbe"]["httpGet"]["port"] == 9000
    # A change is not over before a pod has ended and its successor had all its time to start.
    start = spec["containers"][0]["startupProbe"]
    longest = spec["terminationGracePeriodSeconds"] + start["periodSeconds"] * start["failureThreshold"]
    assert pod["spec"]["progressDeadlineSeconds"] > longest


def test_labels_annotations_and_selectors_are_strings():
    """`--set` makes a boolean of `true` and a number of `8000`, and the API server refuses both there."""
    given = (
        r"nodeSelector.nvidia\.com/gpu\.present=true,podAnnotations.prometheus\.io/port=8000,"
        "podAnnotations.team=a,monitoring.podMonitor=true,monitoring.labels.release=1"
    )
    text = run("helm", "template", "t", CHART, "--set", given)
    objects = {one["kind"]: one for one in yaml.safe_load_all(text[text.index("---") :]) if one}
    pod = objects["Deployment"]["spec"]["template"]
    assert pod["spec"]["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    assert pod["metadata"]["annotations"] == {"prometheus.io/port": "8000", "team": "a"}
    assert objects["PodMonitor"]["metadata"]["labels"]["release"] == "1"


def test_the_chart_and_the_kustomize_base_are_the_same_objects():
    sys.path.insert(0, str(OPS / "kubernetes"))
    try:
        import render
    finally:
        sys.path.pop(0)
    run("helm", "version")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", path)
        for name, arguments in render.MANIFESTS.items():
            text = (render.FOLDER / name).read_text(encoding="utf-8")
            assert text == render.rendered(*arguments), "run ops/kubernetes/render.py"


def test_an_overlay_replaces_image_and_configuration_and_adds_components():
    objects = list(yaml.safe_load_all(run("kubectl", "kustomize", "ops/kubernetes/example")))
    by_kind = {one["kind"]: one for one in objects if one["metadata"]["name"] == "tandem"}
    assert by_kind.keys() == {
        "ConfigMap", "Deployment", "PodDisruptionBudget", "PodMonitor", "PrometheusRule", "ScaledObject",
        "Service",
    }  # fmt: skip
    spec = by_kind["Deployment"]["spec"]
    assert "replicas" not in spec
    assert spec["template"]["spec"]["containers"][0]["image"] == "registry.example/tandem:0.1.0"
    stated = (OPS / "kubernetes/example/tandem.yaml").read_text(encoding="utf-8")
    assert by_kind["ConfigMap"]["data"]["tandem.yaml"] == stated
    assert {one["metadata"].get("namespace") for one in objects} == {"tandem"}
