"""Which requests the log calls repetitions of a rejected one."""

from dataclasses import replace

import pytest

from controlplane.service.decision_log.reader import read_log
from controlplane.service.ticket import Rejected
from tests.controlplane.service.scripted_bench import read


def test_only_a_like_request_that_arrives_after_a_rejection_repeats_it(bench, tmp_path):
    async def scenario(b):
        gate = b.service.gate
        # As the two prompts of one body.
        rejected, sibling = [await b.job(text) for text in ("a", "b")]
        gate.is_closed = True
        with pytest.raises(Rejected):
            await gate.generate(rejected)
        gate.is_closed = False
        await read(await gate.generate(sibling))
        await b.embed("c", name="test")
        of_another = await b.job("a")
        of_another = replace(of_another, request=replace(of_another.request, tenant="other"))
        await read(await gate.generate(of_another))
        await read(await b.ask("a"))
        await read(await b.ask("a"))

    bench(scenario, decision_log={"dir": str(tmp_path)})
    rows = read_log(tmp_path).requests
    assert {row["id"].rpartition("-")[0] for row in rows} == {"test"}
    assert [row.get("retry_of") for row in rows] == [None, None, None, None, rows[0]["id"], None]
