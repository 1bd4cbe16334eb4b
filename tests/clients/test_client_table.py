"""What the table of docs/clients.md says of continuous integration, and tests that several Pythons share."""

from importlib.metadata import version

import pytest

from tests.clients.client_table import CLIENTS, ROOT, Row, table_of
from tests.clients.scripted_tests import TESTS, complaints

IN_CI = [client for client in CLIENTS if client.ci_tests]


@pytest.mark.parametrize("client", IN_CI, ids=lambda client: client.name)
def test_continuous_integration_has_the_client_and_runs_its_tests(client):
    assert all(version(package) for package in client.packages)
    assert "mark.slow" not in (ROOT / client.ci_tests).read_text(encoding="utf-8")


def test_the_table_says_which_clients_continuous_integration_has():
    other = next(client for client in CLIENTS if not client.ci_tests)
    table = table_of([Row(IN_CI[0], "1", {}), Row(other, "2", {})]).splitlines()
    assert [line.rpartition("| ")[2] for line in table[2:4]] == ["yes |", "— |"]


def test_the_shared_tests_exist():
    assert all((ROOT / file).is_file() for file in TESTS)


def report(**kinds: str) -> str:
    children = {"passed": "", "failed": "<failure/>", "broken": "<error/>", "skipped": "<skipped/>"}
    cases = [
        f'<testcase classname="m" name="{name}">{children[kind]}</testcase>' for name, kind in kinds.items()
    ]
    return f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>"


def test_a_test_has_to_pass_with_one_python_and_to_fail_with_none():
    reports = [
        report(both="passed", either="skipped", neither="skipped", bad="failed", worse="passed"),
        report(both="passed", either="passed", neither="skipped", bad="passed", worse="broken"),
    ]
    assert complaints(reports) == ["failed: m.bad", "failed: m.worse", "skipped with every Python: m.neither"]
    assert complaints([report()]) == ["no test ran"]
