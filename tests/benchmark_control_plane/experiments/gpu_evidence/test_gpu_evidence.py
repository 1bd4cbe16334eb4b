"""The GPU day: its steps can run, end within their limits with all processes, and do not stop each other."""

import json
import os
import signal
import struct
from collections.abc import AsyncIterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import cast

import pytest
import yaml

from benchmark_control_plane.experiments.gpu_evidence import one_gpu, random_models, run, served_load
from benchmark_control_plane.experiments.gpu_evidence.steps import STEPS, EvidenceStep
from benchmark_control_plane.judge.experiment_file import read_experiment
from benchmark_control_plane.judge.system_schema import Live
from benchmark_control_plane.simulator.virtual_time import VirtualTimeLoop
from controlplane.config import load
from controlplane.config.models_section import ChatModel, EmbeddingModel
from controlplane.sdk.async_client import AsyncTandem

ROOT = Path(__file__).resolve().parents[4]
EMBEDDING = EmbeddingModel("tandem/minilm", name="embed")
SCRIPTS = {
    "good": "print('{}')",
    "bad": "raise SystemExit(3)",
    "hangs": """
import os, signal, subprocess, sys
from pathlib import Path
child = [sys.executable, "-c", "import signal; signal.signal(15, signal.SIG_IGN); signal.pause()"]
Path(sys.argv[1]).write_text(str(subprocess.Popen(child, start_new_session=True).pid))
signal.pause()
""",
    "after": "import os; print(os.environ['STEP_SETTING'])",
}
TITLED = """
import subprocess, sys
from pathlib import Path
text = "import setproctitle as s, signal; s.setproctitle('EngineCore'); print(flush=True); signal.pause()"
child = subprocess.Popen([sys.executable, "-c", text], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
Path(sys.argv[1]).write_text(str(child.pid))
"""


def test_the_steps_take_at_most_40_minutes_and_have_their_own_names():
    assert sum(step.limit_s for step in STEPS) <= 40 * 60
    assert len({step.name for step in STEPS}) == len(STEPS)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
@pytest.mark.parametrize("is_rehearsal", [False, True], ids=["gpu", "cpu"])
def test_what_a_step_runs_exists(step: EvidenceStep, tmp_path: Path, *, is_rehearsal: bool) -> None:
    arguments = step.arguments(tmp_path, is_rehearsal=is_rehearsal)
    if arguments is None:
        assert step.rehearsal is None
        return
    assert arguments[1] == "-m"
    spec = find_spec(arguments[2])
    assert spec is not None and spec.origin is not None
    assert [word for word in arguments if word.startswith("tests/") and not (ROOT / word).exists()] == []
    assert not any("{" in word for word in arguments)


def test_only_what_needs_a_gpu_has_no_rehearsal():
    """Llama's costs differ from OPT's in the device only, and kvcached is not installed on a CPU."""
    assert [step.name for step in STEPS if step.rehearsal is None] == ["bandwidth-llama", "kvcached"]


def test_without_a_cuda_compiler_engines_use_a_sampler_that_needs_none(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "_CUDA_HOME", str(tmp_path / "nowhere"))
    bare = {"PATH": str(tmp_path)}
    assert run.sampler_settings(bare) == {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
    assert run.sampler_settings({**bare, "VLLM_USE_FLASHINFER_SAMPLER": "1"}) == {}
    compiler = tmp_path / "bin" / "nvcc"
    compiler.parent.mkdir()
    compiler.touch(mode=0o755)
    assert run.sampler_settings({**bare, "CUDA_HOME": str(tmp_path)}) == {}
    assert run.sampler_settings({"PATH": str(compiler.parent)}) == {}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs four steps of scripts, of which one hangs with a child in a session of its own."""
    for name, text in SCRIPTS.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    steps = [
        EvidenceStep(
            name,
            "?",
            "x",
            3 if name == "hangs" else 60,
            f"{tmp_path}/{name}.py {{out}}/child",
            prints_json=name == "good",
            environment=(("STEP_SETTING", "done"),),
        )
        for name in SCRIPTS
    ]
    steps += [
        EvidenceStep("gpu", "?", "x", 1, None),
        EvidenceStep("other", "?", "x", 1, "y", needs="no_such"),
    ]
    monkeypatch.setattr(run, "STEPS", steps)
    out = tmp_path / "out"
    assert run.run(out, [step.name for step in steps], 5.0, is_rehearsal=True) == 1
    return out


@pytest.mark.long
def test_a_step_that_fails_or_hangs_does_not_stop_the_others(results: Path) -> None:
    found = json.loads((results / "summary.json").read_text(encoding="utf-8"))
    ended = {name: step["ended"] for name, step in found["steps"].items()}
    assert ended == {
        "good": "passed", "bad": "failed", "hangs": "stopped", "after": "passed", "gpu": "skipped",
        "other": "skipped",
    }  # fmt: skip
    assert found["steps"]["bad"]["status"] == 3
    assert found["device"]["commit"] and found["device"]["is_rehearsal"]
    assert (results / "good.json").read_text(encoding="utf-8") == "{}\n"
    assert (results / "after.log").read_text(encoding="utf-8") == "done\n"
    page = (results / "summary.md").read_text(encoding="utf-8")
    assert "| [hangs](hangs.log) | ? | stopped: took more than 3 s |" in page
    # A process that ignores SIGTERM, in another session, has ended too.
    assert has_ended(results / "child")


@pytest.mark.long
def test_a_process_that_sets_its_title_ends_with_its_step(tmp_path: Path) -> None:
    """As EngineCore does; the title overwrites the start of the environment that /proc shows."""
    pytest.importorskip("setproctitle")
    (tmp_path / "titled.py").write_text(TITLED, encoding="utf-8")
    step = EvidenceStep("titled", "?", "x", 60, f"{tmp_path}/titled.py {{out}}/child")
    assert run.run_step(step, tmp_path, 60.0, is_rehearsal=True)["ended"] == "passed"
    assert has_ended(tmp_path / "child")


def has_ended(file: Path) -> bool:
    """Whether the process whose id is in `file` ends within ten seconds."""
    child = int(file.read_text(encoding="utf-8"))
    for _ in range(1_000):
        try:
            os.kill(child, 0)
            # A zombie still takes the signal; its parent is gone, so the system reaps it.
            if Path(f"/proc/{child}/stat").read_text(encoding="utf-8").split()[2] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        signal.sigtimedwait([signal.SIGUSR2], 0.01)
    return False


def test_the_end_of_a_step_that_is_stopped_is_within_the_minutes(tmp_path: Path) -> None:
    assert run.run(tmp_path, ["kernels"], run._GRACE_S / 60, is_rehearsal=True) == 0
    [step] = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))["steps"].values()
    assert step == {"ended": "skipped", "reason": "no time was left"}


def test_without_a_gpu_it_says_how_to_rehearse(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(run, "has_gpu", lambda: False)
    assert run.main([]) == 2
    assert "--rehearse" in capsys.readouterr().err


class TwoParts:
    """A client whose chats have two parts of text."""

    async def stream(self, *_: object, **__: object) -> AsyncIterator[str]:
        yield "a"
        yield "b"


def test_a_served_load_keeps_its_rate_if_the_client_falls_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, delays = list[int](), list[float]()
    for cost in (0.0, 0.02):
        with closing(VirtualTimeLoop()) as loop:

            def slowly(*_: object, loop: VirtualTimeLoop = loop, cost: float = cost) -> str:
                loop._set_time(loop.time() + cost)
                return "text"

            monkeypatch.setattr(served_load, "passage", slowly)
            client = cast(AsyncTandem, TwoParts())
            seen = loop.run_until_complete(served_load.phase(client, 5.0, 40.0, has_bursts=False))
            sent.append(len(seen.ttft))
            delays.append(max(seen.ttft))
    assert sent[0] == sent[1] > 150
    assert delays[0] < 1e-6 and delays[1] > 0.02


def test_a_served_load_complains_of_faults_and_of_nothing_else() -> None:
    phase = {"chats": 3, "bursts": 1, "rejected": 2, "failed": []}
    counters = dict.fromkeys(served_load._FAULTS, 0.0)
    good = {"phases": {"chats alone": phase}, "counters": counters | {"tandem_quota_moves_total": 9.0}}
    assert served_load.complaints(good) == []
    bad = {
        "phases": {"chats alone": phase | {"failed": ["ConnectionLost: x"], "chats": 0}},
        "counters": counters | {"tandem_device_alerts_total": 1.0},
    }
    assert served_load.complaints(bad) == [
        "tandem_device_alerts_total=1: must be 0",
        "chats alone: ConnectionLost: x",
        "chats alone: no chat was answered",
    ]


@pytest.mark.long
def test_the_comparison_runs_on_the_servers_that_it_describes(tmp_path: Path) -> None:
    plan = read_experiment(one_gpu.EXPERIMENT, tmp_path).plan
    live = Live(
        ChatModel("tandem/tiny-llama", name="chat", engine={"kv_cache_memory_bytes": 2**25}), EMBEDDING
    )
    servers = one_gpu.described_servers(plan, live, tmp_path)
    tandem, vllm, embedding = servers
    config = yaml.safe_load((tmp_path / "tandem.yaml").read_text(encoding="utf-8"))
    assert config["classes"]["interactive"]["ttft_ms"] == plan.classes["interactive"].ttft_ms
    assert "priority" in vllm.command

    file = tmp_path / "experiment.yaml"
    stated = yaml.safe_load(one_gpu.EXPERIMENT.read_text(encoding="utf-8"))
    file.write_text(yaml.safe_dump(one_gpu.on_servers(stated, servers)), encoding="utf-8")
    found = {system.name: system.endpoints for system in read_experiment(file, tmp_path).plan.systems}
    assert {
        name: (at.chat.url, at.embeddings.url, at.classes, at.priorities) for name, at in found.items()
    } == {
        "tandem": (tandem.url, tandem.url, True, False),
        "vllm + embedding server": (vllm.url, embedding.url, False, False),
        "vllm priority + embedding server": (vllm.url, embedding.url, False, True),
    }


@pytest.mark.long
def test_random_models_have_the_size_that_they_state_and_valid_configurations(tmp_path: Path) -> None:
    random_models.write_configurations(tmp_path, is_tiny=True)
    weights = tmp_path / "models/chat/model.safetensors"
    with weights.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    assert weights.stat().st_size == 8 + length + header["weights"]["data_offsets"][1]
    assert load(tmp_path / "serve.yaml").models.chat.engine["load_format"] == "dummy"
    assert load(tmp_path / "kvcached.yaml").pool.kv_allocator == "kvcached"
    experiment = read_experiment(tmp_path / "experiment.yaml", tmp_path).plan
    assert experiment.live is not None and experiment.live.chat.served_name == "chat"
