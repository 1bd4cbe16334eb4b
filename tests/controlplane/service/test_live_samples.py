"""What a sample of the live feed counts and scores, against the gate and against Prometheus."""

import asyncio

import pytest

from controlplane.service.prediction.length_training import calibration_readings
from tests.controlplane.service.scripted_bench import read
from tests.controlplane.service.test_live_feed import records


def test_requests_of_a_removed_class_are_in_no_class(bench):
    async def scenario(b):
        reading = [
            asyncio.create_task(read(await b.ask(max_tokens=60, service_class=name)))
            for name in ("batch", "interactive")
        ]
        await asyncio.sleep(1)
        classes = {"batch": None, "bulk": {}}
        await b.service.reconfiguration.change({"classes": classes}, source="test")
        b.service.live.sample()
        (sample,) = records(b.service, "sample")
        shown = {name: (one["waiting"], one["running"]) for name, one in sample["classes"].items()}
        assert shown.pop("interactive") == (0, 1)
        assert "batch" not in shown and set(shown.values()) == {(0, 0)}
        llm = sample["owners"]["llm"]
        assert llm["held_by_class"].keys() == {"interactive"}
        assert 0 < llm["held_by_class"]["interactive"] < llm["held_bytes"]
        await asyncio.gather(*reading)

    bench(scenario)


def test_the_calibration_is_that_of_prometheus(bench):
    async def scenario(b):
        for _ in range(3):
            await read(await b.ask(max_tokens=4, service_class="interactive"))
        b.service.live.sample()
        (sample,) = records(b.service, "sample")
        status, m = b.service.status, b.service.status.metrics
        found = status.dispatcher.ttft.readings(m) | calibration_readings(status.lengths, m)
        for kind, coverage, error in (
            ("ttft", m.ttft_coverage, m.ttft_error),
            ("length", m.length_coverage, m.length_error),
        ):
            expected = [pytest.approx(found[metric], abs=1e-4) for metric in (coverage, error)]
            shown = sample["calibration"][kind]
            assert [shown["coverage"], shown["error"]] == expected
            assert shown["coverage"].keys() == {"interactive"}

    bench(scenario)
