"""The wheel as a stranger installs it: small, a client without extras, a server with one, and plug-ins."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.untimed]

ROOT = Path(__file__).resolve().parent.parent
# The largest file of the code has 22 kB, compressed; a table of results, weights or a data set has over 50.
LARGEST_FILE = 30_000
LARGEST_WHEEL = 2_000_000
WEB = {"fastapi", "starlette", "uvicorn", "apscheduler", "prometheus-client", "torch", "vllm"}

CONFIG = {
    "pool": {"memory": "64MiB", "margin": 0.1, "reserve": 0},
    "quota": {"llm": {"nominal": 0.9}, "embedding": {"nominal": 0.1}},
    "models": {"chat": {"name": "chat", "backend": "scripted"}},
    "classes": {"standard": {"default": True, "ttft_ms": 1_000}},
    "admission": {"length_predictor": "history"},
    "scheduling": {"ordering": "shortest-prompt", "options": {"ms_per_token": 2}},
}
# A model's shapes are read from its folder; the scripted engine loads no weights.
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}
CLIENT = """
import sys
from controlplane.sdk import Tandem
assert not [name for name in sys.modules if name.startswith(("controlplane.service", "fastapi"))]
with Tandem(sys.argv[1]) as tandem:
    reply = tandem.chat("Hello", model="chat", max_tokens=8)
print(reply.text)
"""


def run(*command: object, **more) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False, **more)
    assert done.returncode == more.pop("expected", 0), f"{words}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT)
    (built,) = folder.glob("tandem_llm-*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory) -> Path:
    """The interpreter of a fresh environment with the bare wheel."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    run(sys.executable, "-m", "venv", folder)
    found = folder / "bin" / "python"
    run(found, "-m", "pip", "install", "-q", wheel)
    return found


def test_the_wheel_is_small_and_carries_configurations_but_no_research(wheel):
    assert wheel.stat().st_size < LARGEST_WHEEL
    files = zipfile.ZipFile(wheel).infolist()
    names = [file.filename for file in files]
    assert not [file for file in files if file.compress_size > LARGEST_FILE]
    assert {"controlplane/configs/dev.yaml", "controlplane/configs/colocated.yaml"} <= {*names}
    assert {"controlplane/py.typed", "controlplane/api/dashboard/index.html"} <= {*names}
    assert "controlplane/api/dashboard/uPlot.LICENSE.txt" in names
    research = (
        "backends/vllm/simulation/",
        "benchmark_control_plane/experiments/",
        "benchmark_control_plane/results/",
        "benchmark_control_plane/round_model/",
    )
    assert not [name for name in names if name.startswith(research)]


def test_the_bare_install_is_the_client_alone(python, tmp_path):
    listed = json.loads(run(python, "-m", "pip", "list", "--format=json").stdout)
    assert not {one["name"].lower() for one in listed} & WEB
    run(python, "-c", "import controlplane.sdk", cwd=tmp_path)
    imported = subprocess.run(
        [python, "-c", "import controlplane.sdk.langchain"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert imported.returncode != 0
    assert "pip install '.[langchain]'" in imported.stderr
    refused = subprocess.run(
        [python.with_name("tandem"), "serve", "dev"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert (
        refused.returncode != 0
        and "pip install '.[server]'" in refused.stderr
        and "Traceback" not in refused.stderr
    )


def test_a_plug_in_is_installed_and_served(wheel, python, tmp_path):
    run(python, "-m", "pip", "install", "-q", f"tandem-llm[server] @ {wheel.as_uri()}")
    run(python, "-m", "pip", "install", "-q", "--no-deps", ROOT / "tests" / "plugin_example")
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "model.safetensors").write_bytes(bytes(1_000))
    config = {**CONFIG, "models": {"chat": {**CONFIG["models"]["chat"], "model": str(tmp_path)}}}
    (tmp_path / "served.yaml").write_text(json.dumps(config))
    tandem = python.with_name("tandem")
    assert "KV" in run(tandem, "check", "served.yaml", cwd=tmp_path).stdout
    command = [tandem, "serve", "served.yaml", "--port", "0"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            address = next(
                line.partition(" s at ")[2].partition(": ")[0]
                for line in server.stderr
                if "ready after" in line
            )
            assert run(python, "-c", CLIENT, address, cwd=tmp_path).stdout == "Hello from a plug-in\n"
        finally:
            server.terminate()
            server.communicate(timeout=60)
    assert server.returncode == 0


def test_an_unknown_ordering_lists_the_plug_in(python, tmp_path):
    models = {"chat": {**CONFIG["models"]["chat"], "model": str(tmp_path)}}
    wrong = {**CONFIG, "models": models, "scheduling": {"ordering": "longest-prompt"}}
    (tmp_path / "wrong.yaml").write_text(json.dumps(wrong))
    done = subprocess.run(
        [python.with_name("tandem"), "check", "wrong.yaml"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 2 and "shortest-prompt" in done.stderr
