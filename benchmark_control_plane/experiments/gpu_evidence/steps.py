"""The steps of a GPU day, in order of worth, each with its command, time limit and rehearsal on a CPU."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_PACKAGE = "benchmark_control_plane.experiments"


@dataclass(frozen=True, slots=True)
class EvidenceStep:
    """One step.

    Attributes:
        name: name of the step, of its log and of its results.
        question: what it answers.
        command: arguments of Python; {out} is the results folder, {name} the step's name.
        limit_s: seconds after which it is stopped on a GPU.
        rehearsal: arguments of Python without a GPU; None if nothing of the step runs there.
        needs: package without which the step is skipped.
        prints_json: its standard output is its result.
        environment: further environment variables.
    """

    name: str
    question: str
    command: str
    limit_s: int
    rehearsal: str | None
    needs: str | None = None
    prints_json: bool = False
    environment: tuple[tuple[str, str], ...] = ()

    def arguments(self, out: Path, *, is_rehearsal: bool) -> Sequence[str] | None:
        """The command line, or None if nothing of the step runs without a GPU."""
        text = self.rehearsal if is_rehearsal else self.command
        if text is None:
            return None
        return [sys.executable, *(word.format(out=out, name=self.name) for word in text.split())]


_LOAD = f"-m {_PACKAGE}.gpu_evidence.served_load {{out}}/{{name}}.yaml --results {{out}}/{{name}}.json"
_COST = f"-m {_PACKAGE}.hidden_cache.decode_cost --results {{out}}/{{name}}.json --model"
_MIX = f"-m {_PACKAGE}.collocation.interference --models {{out}}/experiment.yaml --runs 1"
_COMPARE = f"-m {_PACKAGE}.gpu_evidence.one_gpu {{out}}/experiment.yaml --out {{out}}/{{name}}"

STEPS = (
    EvidenceStep(
        "kernels", "Do the compiled kernels equal their references?",
        "-m pytest -q -m gpu tests/kernels/hybridcache", 240,
        "-m pytest -q -m not(gpu) tests/kernels/hybridcache/test_reference.py "
        "tests/kernels/hybridcache/test_ops.py",
    ),
    EvidenceStep(
        "bandwidth-opt", "What share of a copy's bandwidth do the kernels of OPT-13B reach?",
        f"{_COST} OPT-13B", 120, f"{_COST} OPT-125M",
    ),
    EvidenceStep(
        "bandwidth-llama", "And those of Llama-2-7B, whose keys are rotated?",
        f"{_COST} Llama-2-7B", 120, None,
    ),
    EvidenceStep(
        "models", "Models of a real size with random weights, for the steps below.",
        f"-m {_PACKAGE}.gpu_evidence.random_models {{out}}", 90,
        f"-m {_PACKAGE}.gpu_evidence.random_models {{out}} --tiny",
    ),
    EvidenceStep(
        "check", "Does the memory plan fit this device?",
        "-m controlplane.cli check {out}/serve.yaml", 30, "-m controlplane.cli check {out}/serve.yaml",
    ),
    EvidenceStep(
        "serve", "Does the plan hold under load, and what do embeddings cost the chats?",
        f"{_LOAD} --seconds 45 --rate 8", 360, f"{_LOAD} --seconds 5 --rate 1",
    ),
    EvidenceStep(
        "collocation", "Two separate servers against Tandem, with the same models and arrivals.",
        f"{_MIX} --slices 2 --seconds 15 --rates 8 --chat-words 200", 420,
        f"{_MIX} --slices 1 --seconds 4 --rates 2", prints_json=True,
    ),
    EvidenceStep(
        "one-gpu", "How much more load within the objectives does one device serve?",
        f"{_COMPARE} --seeds 0", 480, f"{_COMPARE} --quick",
    ),
    EvidenceStep(
        "kvcached", "Do quotas move bytes between the cache and the embeddings?",
        f"{_LOAD} --seconds 30 --rate 8", 240, None, needs="kvcached",
        environment=(
            ("ENABLE_KVCACHED", "true"), ("KVCACHED_AUTOPATCH", "1"), ("KVCACHED_IPC_NAME", "tandem"),
        ),
    ),
    EvidenceStep(
        "outputs", "Do whole engines give the same tokens with the hidden-state cache?",
        "-m pytest -q -m engine tests/backends/vllm/hybrid", 300,
        # Without spaces, since words are split at them.
        "-m pytest -q -m (engine)and(not(slow)) tests/backends/vllm/hybrid",
    ),
)  # fmt: skip
"""They take at most 40 minutes together."""
