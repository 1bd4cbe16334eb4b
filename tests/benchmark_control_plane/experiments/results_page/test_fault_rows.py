"""Rows of the results page about faults and hostile requests."""

from typing import Any

from benchmark_control_plane.experiments.results_page.fault_rows import fault_table, hostile_input, soak


def trial(**changes: Any) -> dict[str, Any]:
    after = {"held_bytes": 0.0, "open_requests": 0.0, "peak_growth_mb": 12.4, "growth_mb": -3.0}
    return {
        "row": "worker killed", "run": 0, "failures": [], "exit_status": None, "sent": 100, "lost": 0,
        "endings": {"done": 90, "429": 10}, "not_ready_s": 0.5, "back_s": 4.0, "health_ms": 30.0,
        "health_port_ms": 20.0, "other_chat_ms": 400.0, "after": after, **changes,
    }  # fmt: skip


def test_a_fault_states_requests_waits_and_memory():
    slow = trial(run=1, slow=["/health on its own port waited 120 ms"], health_port_ms=120.0)
    text = fault_table({"trials": [trial(slow=[]), slow]}, "source")
    row = next(line for line in text.splitlines() if line.startswith("| worker killed |"))
    assert row.split(" | ")[1:] == ["12.4", "-3", "0.5 s", "4 s", "120 ms", "30 ms", "400 ms |"]
    words = " ".join(text.split())
    assert "2 runs of each fault" in words
    assert "In 1 of 2 runs `/health` waited longer than 100 ms on its own port" in words
    assert "more than 300 MB; in 0 another claim did not hold" in words
    assert "Lost requests: 0 of 200. Memory still held after: none." in words
    assert "ended as done 180, 429 20. (source.)" in words


def test_lost_requests_and_memory_that_stays_held_are_named_with_their_fault():
    held = trial()["after"] | {"held_bytes": 4_096.0}
    text = fault_table(
        {"trials": [trial(slow=[], lost=3, after=held), trial(slow=[], row="other")]}, "source"
    )
    words = " ".join(text.split())
    assert "Lost requests: 3 of 200 (worker killed 3)." in words
    assert "Memory still held after: worker killed 4,096 bytes." in words


def test_an_ended_server_has_no_times():
    ended = trial(
        after=dict.fromkeys(trial()["after"]), exit_status=0, not_ready_s=None, back_s=None, sent=0, slow=[]
    )
    text = fault_table({"trials": [ended]}, "source")
    assert "| worker killed |" not in text and "Without load: worker killed." in text


def test_hostile_requests_name_the_costliest():
    costs = {"health_port_wait_ms": 10.0, "health_wait_ms": 20.0, "peak_growth_mb": 5.0, "growth_mb": 1.0}
    attacks = [
        {"name": "harmless", "run": 0, "reply_s": 9.0, "not_held": ["refusal"], **costs},
        {"name": "4.7 MB key", "run": 0, "reply_s": 0.02, "not_held": [], **costs},
        {"name": "66 MiB header", "run": 0, "reply_s": 0.2, "not_held": ["refusal"], **costs},
    ]
    rows = dict(hostile_input({"senders": 10, "attacks": attacks}))
    head = "10 senders of each of 2 hostile requests"
    assert "most 0.2 s (66 MiB header)" in rows[f"{head}: time from the last byte to the reply, sent alone"]
    assert rows[f"{head}: attacks that broke a limit"] == "refusal: 1, of 2 attacks"
    assert (
        dict(hostile_input({"senders": 10, "attacks": attacks[1:2]}))[
            "10 senders of each of 1 hostile requests: attacks that broke a limit"
        ]
        == "none, of 1 attacks"
    )


def test_a_soak_states_what_each_process_keeps():
    content = {
        "minutes": 60.0, "rate": 6.3, "endings": {"done": 900, "left": 100}, "lost": 0, "open_requests": 0.0,
        "slopes_mb_per_hour": {"server": 3.3, "worker": -1.0},
        "kept_mb": {"server": [810.1, 818.0, 821.5], "worker": [708.0, 690.0]},
    }  # fmt: skip
    ((name, text),) = soak(content)
    assert name.startswith("60 minutes at 6.3 requests/s")
    assert "server +3.3 MB/h (810 MB in the first minutes, 822 in the last)" in text
    assert "worker -1.0 MB/h (708 MB in the first minutes, 690 in the last)" in text
    assert "0 of 1,000 requests lost, 0 open at the end" in text
