"""The fields that docs/decision-log.md describes are those of the rows that a server writes."""

import asyncio
import gzip
import re
from pathlib import Path

import orjson
import pytest

from backends.testing.scripted import ScriptedGenerator
from benchmark_control_plane.simulator.virtual_time import LoopTimers
from controlplane.core.clock import milliseconds
from controlplane.core.engine_reports import EngineStep
from controlplane.service.decision_log.segment_files import segments
from controlplane.service.ticket import Rejected
from tests.controlplane.service.scripted_bench import read

PAGE = Path(__file__).parents[4] / "docs" / "decision-log.md"
IN_EVERY_ROW = {"row", "at"}


async def every_field(b):
    """Requests that are met, preempted, late, rejected and repeated, an embedding, and steps."""
    await read(await b.ask("x" * 40, max_tokens=60))
    victim = asyncio.create_task(read(await b.ask(max_tokens=60, service_class="batch")))
    await b.generator.until_runs(2)
    await asyncio.sleep(1.0)
    await read(await b.ask(max_tokens=2, service_class="interactive"))
    await victim
    await read(await b.ask(max_tokens=8, ttft_ms=5_000, tpot_ms=10))
    b.service.gate.is_closed = True
    with pytest.raises(Rejected):
        await b.ask()
    b.service.gate.is_closed = False
    # A request that arrives at the time of the rejection repeats none.
    await asyncio.sleep(1.0)
    await read(await b.ask())
    await b.embed("one", "other")
    for decodes in range(1, 21):
        b.generator.on_step(EngineStep(0, decodes, 8 * decodes, milliseconds(10)))


@pytest.fixture
def rows(bench, tmp_path):
    """All rows of a log by kind."""
    generator = ScriptedGenerator(max_running=1, prefill_seconds=0.1, token_seconds=0.1)
    log = {"dir": str(tmp_path), "sample": 1}
    sections = {"admission": {"engine_queue": 0}, "decision_log": log}
    bench(every_field, generator=generator, ticks=LoopTimers(), **sections)
    found = {}
    for path in segments(tmp_path):
        for line in gzip.decompress(path.read_bytes()).splitlines():
            row = orjson.loads(line)
            found.setdefault(row["row"], []).append(row)
    return found


def fields_of(rows):
    return {name for row in rows for name in row}


def nested_fields(row):
    """The fields of a row and of all objects in it."""
    inner = (nested_fields(value) for value in row.values() if isinstance(value, dict))
    return row.keys() | set().union(*inner)


def table():
    """The rows of the table of `request` rows: the fields, and the text about them."""
    found = re.findall(r"^\| (`.*?`) \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return [(re.findall(r"`(.+?)`", fields), text) for fields, text in found]


def described(kind):
    """The fields in the paragraph about the rows of a kind, without what it has in parentheses."""
    page = PAGE.read_text(encoding="utf-8")
    (text,) = re.findall(rf"^`{kind}`,(.*?)\n\n", page, re.MULTILINE | re.DOTALL)
    paths = re.findall(r"`([a-z_.]+)`", re.sub(r"\([^()]*\)", "", text))
    return {name for path in paths for name in path.split(".")}


def test_the_table_of_requests_has_the_fields_of_their_rows(rows):
    documented = {name for fields, _ in table() for name in fields if "[]" not in name}
    assert documented == fields_of(rows["request"]) - IN_EVERY_ROW


def test_the_table_of_requests_has_the_fields_of_their_decisions(rows):
    (text,) = (text for fields, text in table() if fields == ["decisions"])
    decisions = [each for row in rows["request"] for each in row["decisions"]]
    assert set(re.findall(r"`([a-z_]+)`", text)) == fields_of(decisions)


def test_each_other_kind_of_row_has_the_fields_that_are_described(rows):
    assert rows.keys() == {"request", "sample", "steps", "config", "segment"}
    assert described("segment") == fields_of(rows["segment"]) - IN_EVERY_ROW
    assert described("config") == fields_of(rows["config"]) - IN_EVERY_ROW
    for kind in ("sample", "steps"):
        (*_, row) = rows[kind]
        models = row.get("passes", {}).keys()
        assert described(kind) == nested_fields(row) - models - IN_EVERY_ROW
