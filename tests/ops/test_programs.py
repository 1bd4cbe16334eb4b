"""The summary of outside programs names what is missing and its remedy."""

import subprocess
from pathlib import Path

import pytest

from tests import programs

ROOT = Path(__file__).resolve().parents[2]


def test_the_summary_names_what_is_there_and_how_to_install_the_rest(monkeypatch):
    monkeypatch.setattr(
        programs.shutil, "which", lambda name, path: None if name == "kubectl" else f"/{name}"
    )
    there, missing = programs.summary().splitlines()
    assert "systemd-analyze" in there and "kubectl" not in there
    assert missing == "missing, their tests were skipped: kubectl (pip install -e '.[ops]')"


@pytest.mark.parametrize(
    ("stated", "outcome"), [("promtool kubectl", pytest.fail.Exception), ("promtool", pytest.skip.Exception)]
)
def test_a_missing_program_fails_its_test_only_where_it_is_required(monkeypatch, stated, outcome):
    monkeypatch.setenv("TANDEM_REQUIRED_PROGRAMS", stated)
    monkeypatch.setattr(programs.shutil, "which", lambda name, path: None)
    with pytest.raises(outcome, match=r"kubectl is not installed: pip install"):
        programs.required("kubectl")


def stub(folder: Path, name: str, text: str = "exit 0") -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize("has_network", [True, False])
def test_continuous_integration_requires_what_it_could_install(tmp_path, has_network):
    """Its script runs here with stubs in place of every program; apt-get and npm install nothing."""
    for name in ("bash", "dirname", "env"):
        (tmp_path / name).symlink_to(programs.shutil.which(name))
    reachable = "exit 0" if has_network else "exit 1"
    stub(tmp_path, "id", "echo 0")
    stub(tmp_path, "apt-get", reachable)
    # An archive that has all but one of the packages.
    stub(tmp_path, "apt-cache", '[ "$2" != systemd ]')
    stub(tmp_path, "npm", reachable)
    stub(tmp_path, "promtool")
    stub(tmp_path, "make", 'echo "required:" $TANDEM_REQUIRED_PROGRAMS')
    done = subprocess.run(
        [str(ROOT / ".ci/run")], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    found = set(done.stdout.rpartition("required:")[2].split())
    of_pip = {"docker-compose", "hadolint", "helm", "kubectl", "kubernetes-validate"}
    of_system = {"chromium", "dclint", "node", "prometheus"} if has_network else set()
    assert found == of_pip | of_system | {"promtool"}
    assert found <= programs.SOURCES.keys()


@pytest.mark.long
def test_shell_scripts_parse():
    scripts = [path for path in ROOT.rglob("*.sh") if ".venv" not in path.parts]
    for script in [ROOT / ".ci/run", *scripts]:
        done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), script
