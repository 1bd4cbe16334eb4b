"""A run leaves no backlog that would slow down the next system on the same machine."""

import asyncio
from collections import Counter
from contextlib import closing
from dataclasses import dataclass

import pytest
import yaml

from benchmark_control_plane.common.command_line import BadInput
from benchmark_control_plane.judge.experiment_file import read_experiment
from benchmark_control_plane.judge.measurement_stages import Bench, requests_of
from benchmark_control_plane.judge.reference_system import saturation
from benchmark_control_plane.simulator.virtual_time import VirtualTimeLoop
from controlplane.core.request import Kind

EXPERIMENT = {
    "name": "overloaded",
    "question": "Does a backlog slow down the next system?",
    "loads": [1.0],
    "capacity": {"rps": 4},
    "reference": "deaf",
    "window": {"warmup_s": 0, "measured_s": 5, "drain_s": 1},
    "device": {"kv_memory": "512MiB"},
    "classes": {"documents": {"priority": 1, "e2e_ms": 2_000}},
    "streams": {
        "documents": {"kind": "embed", "service_class": "documents", "share": 1,
                      "prompt_tokens": {"fixed": 8}, "batch": {"fixed": 1}},
    },
    "systems": [{"name": "deaf", "kind": "baseline", "ungated": True}],
}  # fmt: skip


class IgnoresDisconnects:
    """Serves one request at a time at half the offered rate, and does not notice disconnects."""

    def __init__(self):
        self.turn, self.undone = asyncio.Lock(), 0

    async def send(self, planned, answer):
        answer.sent = asyncio.get_running_loop().time()
        self.undone += 1
        await asyncio.shield(asyncio.create_task(self.work(answer)))

    async def work(self, answer):
        async with self.turn:
            await asyncio.sleep(0.5)
        self.undone -= 1
        answer.ended = asyncio.get_running_loop().time()


@dataclass
class Stage:
    """A stage whose clock continues from one measurement to the next."""

    target: IgnoresDisconnects
    shares_machine: bool
    loop: VirtualTimeLoop

    def act(self, act):
        return self.loop.run_until_complete(act(self.target, self.loop.time, None))


@pytest.mark.parametrize("shares_machine", [True, False])
def test_backlog_is_waited_for_on_a_shared_machine(tmp_path, shares_machine):
    path = tmp_path / "overloaded.yaml"
    path.write_text(yaml.safe_dump(EXPERIMENT), encoding="utf-8")
    experiment = read_experiment(path, tmp_path)
    system, target, bench = (
        experiment.plan.systems[0],
        IgnoresDisconnects(),
        Bench(experiment, {}, capacity=4.0),
    )
    with closing(VirtualTimeLoop()) as loop:
        stage = Stage(target, shares_machine, loop)
        entry, _ = bench.run(stage, system, 1.0, 0, lambda answered, planned: None)
        assert entry["attainment"]["overall"] < 0.9
        assert target.undone > 0
        bench.settle(stage, system, 1.0, 0)
        assert (target.undone == 0) is shares_machine
        while left := asyncio.all_tasks(loop):
            loop.run_until_complete(asyncio.wait(left))


def test_no_requests_are_drawn_to_settle_a_machine_of_its_own(tmp_path):
    """Drawing those of a large run takes seconds, and nothing is sent."""
    trace = {"trace": {"file": "absent.csv", "columns": {"at": "s", "prompt": "tokens"}}}
    documents = {"kind": "embed", "service_class": "documents", "share": 1} | trace
    path = tmp_path / "traced.yaml"
    path.write_text(yaml.safe_dump(EXPERIMENT | {"streams": {"documents": documents}}), encoding="utf-8")
    experiment = read_experiment(path, tmp_path)
    bench, system = Bench(experiment, {}, capacity=4.0), experiment.plan.systems[0]
    with closing(VirtualTimeLoop()) as loop:
        bench.settle(Stage(IgnoresDisconnects(), False, loop), system, 1.0, 0)
        with pytest.raises(BadInput, match="absent"):
            bench.settle(Stage(IgnoresDisconnects(), True, loop), system, 1.0, 0)


class Fast:
    """Serves any number of requests concurrently, each in 20 ms."""

    async def send(self, planned, answer):
        loop = asyncio.get_running_loop()
        answer.sent = loop.time()
        await asyncio.sleep(0.02)
        answer.ended = loop.time()


def test_capacity_probe_draws_enough_requests_for_a_fast_server(tmp_path):
    """On a GPU, a small model can serve more requests per second than were drawn."""
    path = tmp_path / "fast.yaml"
    content = EXPERIMENT | {"capacity": {"clients": 48, "probe_s": 0.5}}
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    experiment = read_experiment(path, tmp_path)
    with closing(VirtualTimeLoop()) as loop:
        rate = saturation(experiment, Stage(Fast(), True, loop), experiment.plan.systems[0])
    assert rate == pytest.approx(48 / 0.02, rel=0.06)


def test_capacity_counts_responses_that_miss_the_deadline_of_their_workflow(tmp_path):
    """100 % load is what the system computes; at saturation most responses may be late."""
    length, path = {"fixed": 8}, tmp_path / "workflow.yaml"
    rag = {
        "kind": "retrieval", "service_class": "documents", "embed_class": "documents", "share": 1,
        "deadline_ms": 10, "query_tokens": length, "prompt_tokens": length, "output_tokens": length,
    }  # fmt: skip
    content = EXPERIMENT | {"streams": {"rag": rag}, "capacity": {"clients": 48, "probe_s": 0.5}}
    path.write_text(yaml.safe_dump(content))
    experiment = read_experiment(path, tmp_path)
    with closing(VirtualTimeLoop()) as loop:
        rate = saturation(experiment, Stage(CountsKinds(), True, loop), experiment.plan.systems[0])
    assert rate == pytest.approx(48 / 0.02, rel=0.06)


class CountsKinds(Fast):
    """Also counts the requests by kind."""

    def __init__(self):
        self.kinds = Counter()

    async def send(self, planned, answer):
        self.kinds[planned.kind] += 1
        answer.tokens = [asyncio.get_running_loop().time()]
        await super().send(planned, answer)


def test_capacity_probe_has_the_mix_of_the_streams(tmp_path):
    """It uses the first second of what it draws, in which documents that come in bursts may be absent."""
    path, one = tmp_path / "bursts.yaml", {"fixed": 1}
    chat = {"kind": "generate", "service_class": "documents", "share": 3, "prompt_tokens": one,
            "output_tokens": one}  # fmt: skip
    documents = EXPERIMENT["streams"]["documents"] | {"arrivals": {"bursts": {"on_s": 1, "off_s": 2}}}
    content = EXPERIMENT | {
        "streams": {"chat": chat, "documents": documents}, "capacity": {"clients": 8, "probe_s": 1},
    }  # fmt: skip
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    experiment, target = read_experiment(path, tmp_path), CountsKinds()
    with closing(VirtualTimeLoop()) as loop:
        saturation(experiment, Stage(target, True, loop), experiment.plan.systems[0])
    assert target.kinds.total() > 300
    assert target.kinds[Kind.EMBED] / target.kinds.total() == pytest.approx(0.25, abs=0.06)


def test_the_deadline_of_a_workflow_is_scaled_like_every_objective(tmp_path):
    length, path = {"fixed": 8}, tmp_path / "workflow.yaml"
    rag = {
        "kind": "retrieval", "service_class": "documents", "embed_class": "documents", "share": 1,
        "deadline_ms": 1_000, "query_tokens": length, "prompt_tokens": length, "output_tokens": length,
    }  # fmt: skip
    stated = {"deadlines": {"state": "budgets", "shares": {"query": 0.2, "answer": 0.8}}}
    systems = [EXPERIMENT["systems"][0] | stated]
    content = EXPERIMENT | {"slo_scale": 0.5, "streams": {"rag": rag}, "systems": systems}
    path.write_text(yaml.safe_dump(content))
    experiment = read_experiment(path, tmp_path)
    first = requests_of(experiment, experiment.plan.systems[0], 4.0, seed=0)[:2]
    assert [(one.stage.deadline_ms, one.stage.budget_ms) for one in first] == [(500, 100), (500, 400)]


def test_a_system_with_known_lengths_states_the_output_tokens_of_the_same_requests(tmp_path):
    path = tmp_path / "known.yaml"
    chat = {"kind": "generate", "service_class": "documents", "share": 1, "max_tokens": 64,
            "prompt_tokens": {"fixed": 8}, "output_tokens": {"between": [1, 32]}}  # fmt: skip
    systems = [
        {"name": "limited", "kind": "tandem", "simulated": {}},
        {"name": "known", "kind": "what-if", "known_lengths": True, "simulated": {}},
    ]
    path.write_text(
        yaml.safe_dump(EXPERIMENT | {"streams": {"chat": chat}, "systems": systems, "reference": "limited"})
    )
    experiment = read_experiment(path, tmp_path)
    limited, known = (requests_of(experiment, each, 4.0, seed=0) for each in experiment.plan.systems)
    assert {request.max_tokens for request in limited} == {64}
    assert {request.max_tokens for request in known} == {None}
    assert [(r.at, r.output_tokens) for r in limited] == [(r.at, r.output_tokens) for r in known]
