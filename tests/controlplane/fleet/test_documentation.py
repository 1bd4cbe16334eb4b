"""The examples in docs/fleet.md."""

import re
from pathlib import Path

from controlplane.fleet.load_report import parse_report
from controlplane.fleet.router import ChosenBox

PAGE = Path("docs/fleet.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_program_runs() -> None:
    names: dict[str, object] = {}
    exec(block("python"), names)
    assert isinstance(names["choice"], ChosenBox)
    # Without a report of the other box nothing says that it has room.
    assert names["second"] == 3.0


def test_the_report_is_one() -> None:
    report = parse_report(block("json"))
    assert report.intercept("chat", "batch") == 1.53
    assert report.models["embed"].owner == "embedding"
