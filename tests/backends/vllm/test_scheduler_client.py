"""The state that the server's client of Tandem's scheduler reads."""

from backends.vllm.plugin.shared_state import SharedState, key_of
from backends.vllm.scheduler_client import SchedulerClient
from controlplane.policy.engine.options import EngineOptions
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
