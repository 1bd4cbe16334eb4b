"""Runs the tests of clients on scripted engines with several Pythons, since no environment has all clients.

    python -m tests.clients.scripted_tests PYTHON [PYTHON ...]

Exit status 1 if a test fails with one Python, or is skipped with all of them.
"""

import argparse
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

from tests.clients.client_table import ROOT, environment_of

TESTS = (
    "tests/clients/test_litellm_proxy.py",
    "tests/clients/test_recipes.py",
    "tests/controlplane/api/test_rerank_clients.py",
    "tests/controlplane/api/test_tei_clients.py",
    "tests/controlplane/api/test_tool_clients.py",
)


def outcomes(report: str) -> Iterator[tuple[str, str]]:
    """Each test of a JUnit report, and whether it `passed`, `failed` or was `skipped`."""
    for case in ElementTree.fromstring(report).iter("testcase"):
        found = {child.tag for child in case}
        kind = "failed" if found & {"failure", "error"} else "skipped" if "skipped" in found else "passed"
        yield f"{case.get('classname')}.{case.get('name')}", kind


def complaints(reports: Sequence[str]) -> list[str]:
    """What is wrong with the tests of these reports, one for each Python."""
    tests: dict[str, set[str]] = defaultdict(set)
    for report in reports:
        for test, kind in outcomes(report):
            tests[test].add(kind)
    failed = [f"failed: {test}" for test, kinds in tests.items() if "failed" in kinds]
    skipped = [f"skipped with every Python: {test}" for test, kinds in tests.items() if kinds == {"skipped"}]
    return [*failed, *skipped] if tests else ["no test ran"]


def main(pythons: Sequence[str]) -> int:
    reports = []
    with tempfile.TemporaryDirectory() as folder:
        for python in pythons:
            sys.stdout.write(f"{python}\n")
            sys.stdout.flush()
            report = Path(folder) / "report.xml"
            command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *TESTS]
            # A failed test is in the report; without one, pytest itself has failed.
            subprocess.run(command, cwd=ROOT, env=environment_of(python), check=False)
            reports.append(report.read_text(encoding="utf-8"))
            report.unlink()
    found = complaints(reports)
    sys.stdout.writelines(f"{line}\n" for line in found)
    return int(bool(found))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pythons", nargs="+", metavar="PYTHON")
    raise SystemExit(main(parser.parse_args().pythons))
