"""The pages docs/configuration.md and docs/metrics.md agree with the code, and every entry is described."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from controlplane.config.reference_pages import (
    _LABELS,
    configuration_markdown,
    descriptions,
    metrics_markdown,
    sections,
)
from controlplane.config.root import Config
from controlplane.metrics import Metrics


@dataclass
class Undescribed:
    key: int = 0


REMEDY = "run `python -m controlplane.config.reference_pages` and commit the pages"


@pytest.mark.parametrize(
    ("page", "text"), [("configuration", configuration_markdown()), ("metrics", metrics_markdown())]
)
def test_the_committed_page_is_what_the_code_says(page: str, text: str):
    assert Path("docs", f"{page}.md").read_text(encoding="utf-8") == text, REMEDY


@pytest.mark.parametrize("section", dict.fromkeys([Config, *(one for _, one in sections(Config, ""))]))
def test_every_key_is_described(section):
    for name, text in descriptions(section).items():
        assert re.fullmatch(r"[A-Z`].{10,}\.", text), f"{section.__name__}.{name}: {text!r}"


def test_a_key_without_a_description_is_an_error():
    with pytest.raises(KeyError, match="key"):
        descriptions(Undescribed)


def test_every_series_is_described():
    described = Metrics().described
    assert len({series.name for series in described}) == len(described)
    for series in described:
        assert re.fullmatch(r"[A-Z0-9].{10,}\.", series.text), series
    assert {label for series in described for label in series.labels} == _LABELS.keys()
