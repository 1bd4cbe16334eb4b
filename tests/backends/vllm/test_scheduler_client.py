"""The state that the server's client of Tandem's scheduler reads."""

from backends.vllm.plugin.preemption_log import PreemptionLog
from backends.vllm.plugin.shared_state import SharedState, key_of
from backends.vllm.scheduler_client import SchedulerClient
from controlplane.core.engine_reports import EnginePreemption
from controlplane.policy.engine.options import EngineOptions
from tests.backends.vllm.plugin.test_preemption_log import request
from tests.backends.vllm.plugin.test_shared_state import facts


def test_the_state_of_an_idle_engine_stands_until_its_next_step(tmp_path):
    shared = SharedState.create(tmp_path / "state")
    client = SchedulerClient(None, shared, EngineOptions(), total=9, block_bytes=16)
    client.track("a")
    shared.write(facts(1), [key_of("a")], [2])
    running = client.state(is_idle=False)
    assert (running.running, running.held_bytes) == (2, {"a": 32})
    assert client.state(is_idle=False) is running
    idle = client.state(is_idle=True)
    assert (idle.running, idle.waiting, idle.used_bytes) == (0, 0, 0)
    # A request was forwarded, and no step was planned since: what the last one held is still free.
    client.untrack("a")
    client.track("b")
    assert client.state(is_idle=False).held_bytes == {}
    assert client.state(is_idle=False) is client.state(is_idle=False)
    shared.write(facts(2), [key_of("b")], [3])
    assert client.state(is_idle=False).held_bytes == {"b": 48}


def test_a_state_that_was_read_during_a_write_is_read_again(tmp_path):
    path = tmp_path / "state"
    shared = SharedState.create(path)
    client = SchedulerClient(None, shared, EngineOptions(), total=9, block_bytes=16)
    client.track("a")
    shared.write(facts(1), [key_of("a")], [2])
    shared.write(facts(2), [key_of("a")], [3])
    with path.open("r+b", buffering=0) as file:
        # The second write goes to the first half, of which a byte is still to come here.
        file.seek(20)
        byte = file.read(1)
        file.seek(20)
        file.write(b"\xff")
        assert client.state(is_idle=False).held_bytes == {"a": 32}
        file.seek(20)
        file.write(byte)
    assert client.state(is_idle=False).held_bytes == {"a": 48}


def test_preemptions_have_the_names_of_requests_also_of_those_that_have_ended(tmp_path):
    shared, log = SharedState.create(tmp_path / "state"), PreemptionLog()
    client = SchedulerClient(None, shared, EngineOptions(), total=9, block_bytes=16)
    for name in ("victim", "urgent"):
        client.track(name)
    log.beneficiary = request(key_of("urgent")).tandem
    log.add(request(key_of("victim")), 5)
    log.add(request(key_of("of no client")), 6)
    log.add(request(key_of("victim")), 7)
    shared.write(facts(1), [], [], log.packed)
    client.untrack("urgent")
    found = client.state(is_idle=False).preempted
    assert found == (EnginePreemption(5, "victim", "urgent", 7), EnginePreemption(7, "victim", None, 7))
    shared.write(facts(2), [], [], log.packed)
    assert client.state(is_idle=False).preempted is found
