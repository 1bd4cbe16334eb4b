"""Writes the manifests in base and components from the Helm chart, so that both install the same objects.

pip install -e '.[ops]'
python ops/kubernetes/render.py
"""

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
CHART = FOLDER.parent / "helm" / "tandem"
_NOTE = "# Rendered from ops/helm/tandem by ops/kubernetes/render.py; do not edit.\n"
_MONITORING = ("podMonitor", "rules", "dashboard")
MANIFESTS = {
    "base/tandem.yaml": (),
    "components/autoscaling/scaledobject.yaml": (
        "--show-only=templates/scaledobject.yaml",
        "--set=autoscaling.enabled=true",
    ),
    "components/inference-gateway/gateway.yaml": (
        "--show-only=templates/inferencegateway.yaml",
        "--set=inferenceGateway.enabled=true",
        f"--set-file=config={FOLDER / 'example' / 'tandem.yaml'}",
    ),
    "components/monitoring/monitoring.yaml": (
        "--show-only=templates/monitoring.yaml",
        *(f"--set=monitoring.{name}=true" for name in _MONITORING),
    ),
}
"""Arguments of `helm template` for each file."""


def rendered(*arguments: str) -> str:
    """The chart's objects. Raises CalledProcessError with helm's message in `stderr`."""
    command = ["helm", "template", "tandem", str(CHART), "--namespace", "tandem", *arguments]
    return _NOTE + subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    for name, arguments in MANIFESTS.items():
        (FOLDER / name).write_text(rendered(*arguments), encoding="utf-8")
        sys.stdout.write(f"{name}\n")
