"""Answers carry a load report that a timer has made, and state its age."""

import asyncio
import logging
from itertools import pairwise

import pytest

from controlplane.fleet.load_report import parse_report
from controlplane.service.gate.load_reporter import LoadReporter


@pytest.fixture
def made(monkeypatch):
    """Collects the numbers of the reports that are made."""
    numbers, report = [], LoadReporter.report

    def counted(reporter):
        found = report(reporter)
        numbers.append(found.number)
        return found

    monkeypatch.setattr(LoadReporter, "report", counted)
    return numbers


def test_no_answer_waits_for_a_report_to_be_made_while_routers_ask(bench, made):
    async def scenario(b):
        reporter, texts = b.service.load_reporter, []
        reporter.text()
        for _ in range(40):
            await asyncio.sleep(0.203)
            before = len(made)
            texts.append(reporter.text())
            assert reporter.whole(has_tenants=True, has_prefixes=True)
            assert len(made) == before
        reports = [parse_report(text) for text in texts]
        assert all(later.number - earlier.number >= 4 for earlier, later in pairwise(reports))
        assert max(report.age for report in reports) <= 0.05

    bench(scenario)


def test_reports_are_made_only_while_routers_ask(bench, made):
    async def scenario(b):
        reporter = b.service.load_reporter
        assert reporter.utilisation() == 0.0
        await asyncio.sleep(10)
        assert len(made) == 1
        reporter.text()
        await asyncio.sleep(10)
        # A second of 50 ms each, after the one for the answer.
        assert len(made) == pytest.approx(1 + 1 + 20, abs=1)
        assert parse_report(reporter.text()).age == 0.0

    bench(scenario)


def test_a_report_that_is_not_renewed_in_time_is_replaced_before_the_answer(bench, made):
    async def scenario(b):
        reporter = b.service.load_reporter
        reporter.text()
        reporter._timer.cancel()
        await asyncio.sleep(0.24)
        assert parse_report(reporter.text()).age == pytest.approx(0.24)
        await asyncio.sleep(0.02)
        assert parse_report(reporter.text()).age == 0.0
        assert len(made) == 2

    bench(scenario)


def test_a_report_that_cannot_be_made_is_logged_and_the_timer_tries_again(bench, monkeypatch, caplog):
    async def scenario(b):
        reporter, report = b.service.load_reporter, LoadReporter.report
        first = parse_report(reporter.text()).number

        def broken(reporter):
            raise RuntimeError("no report")

        with monkeypatch.context() as patched, caplog.at_level(logging.ERROR):
            patched.setattr(LoadReporter, "report", broken)
            await asyncio.sleep(0.1)
            # The timer has tried twice.
            assert caplog.text.count("no load report can be made: no report") == 1
            assert parse_report(reporter.text()).number == first
            await asyncio.sleep(0.2)
            with pytest.raises(RuntimeError, match="no report"):
                reporter.text()
        assert LoadReporter.report is report
        assert parse_report(reporter.text()).number == first + 1
        await asyncio.sleep(0.06)
        assert parse_report(reporter.text()).number == first + 2

    bench(scenario)


def test_a_service_that_stops_sets_no_timer(bench, made):
    async def scenario(b):
        reporter = b.service.load_reporter
        reporter.text()
        await b.service.stop()
        await asyncio.sleep(1)
        assert len(made) == 1
        reporter.text()
        assert reporter._timer is None or reporter._timer.cancelled()

    bench(scenario)
