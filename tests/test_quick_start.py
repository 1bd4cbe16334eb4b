"""The program of README.md against the service of the quick start: configs/dev.yaml, on real engines."""

import re
import sys
from pathlib import Path

import pytest
import yaml

from benchmark_control_plane.common.servers import Server, free_port, serving

pytestmark = [pytest.mark.engine, pytest.mark.untimed]

ROOT = Path(__file__).resolve().parent.parent


def quick_start(folder: Path) -> Path:
    """configs/dev.yaml, whose embedding worker does not wait for idle cores: other tests may use them all."""
    config = yaml.safe_load((ROOT / "configs/dev.yaml").read_text(encoding="utf-8"))
    config["models"]["embeddings"][0]["idle_cpu_priority"] = False
    path = folder / "dev.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def test_the_readme_answers_from_the_documentation(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    (program,) = re.findall(
        r"^```python\n(.*?)^```", Path("README.md").read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
    port, found = free_port(), {}
    config = str(quick_start(tmp_path))
    command = [sys.executable, "-m", "controlplane.cli", "serve", config, "--port", str(port)]
    with serving(Server("tandem", command, port, "/ready"), tmp_path / "log") as server:
        exec(program.replace("http://127.0.0.1:8000", server.url), found)
    answer = found["answer"]
    assert answer.text
    assert set(answer.passages) <= set(found["passages"])
    # The vector of a paragraph finds this paragraph.
    assert [found["retrieve"](found["vectors"][at])[0] for at in (0, 7)] == [
        found["passages"][at] for at in (0, 7)
    ]
    assert list(answer.stage_ms) == ["embed", "retrieve", "chat"]
    assert found["vectors"].shape == (len(found["passages"]), 384)
