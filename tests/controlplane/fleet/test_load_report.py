"""Load reports survive the wire, stay small, and are refused with a reason if they are wrong."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.fleet.load_report import (
    MAX_REPORT_BYTES,
    InvalidReport,
    LoadReport,
    ModelLoad,
    OwnerLoad,
    dated,
    parse_report,
    require_small,
)
from controlplane.fleet.prefix_digest import PrefixDigest

REPORT = LoadReport(
    epoch="5f1c",
    number=7,
    age=0.0125,
    models={"chat": ModelLoad("llm", 33.5e-6, 131_072), "embed": ModelLoad("embedding", 4e-6, 1_024)},
    owners={
        "llm": OwnerLoad({"interactive": 0.0412, "batch": 1.5}, 0.031, 2**33),
        "embedding": OwnerLoad({"interactive": 0.01, "batch": 0.01}, 0.0, 2**28),
    },
    utilisation=0.625,
    attainment={"interactive": 0.987},
)
# The longest names that the YAML of an operator is likely to have, at the largest figures.
LARGE = LoadReport(
    epoch="0123456789abcdef",
    number=10**9,
    age=99_999.0,
    models={
        f"organisation/model-with-a-name-{at}": ModelLoad("embedding" if at else "llm", 0.012345678, 10**6)
        for at in range(4)
    },
    owners={
        owner: OwnerLoad({f"service-class-{at}": 99_999.9 for at in range(5)}, 99_999.9, 10**12)
        for owner in ("llm", "embedding")
    },
    utilisation=99.999,
    attainment={f"service-class-{at}": 0.999 for at in range(5)},
)


def test_a_report_is_read_as_it_was_written() -> None:
    assert parse_report(REPORT.to_text()) == REPORT


def test_the_largest_report_is_within_its_limit_and_in_ascii() -> None:
    text = dated(LARGE.body(), LARGE.age)
    assert len(text.encode("ascii")) <= MAX_REPORT_BYTES
    assert parse_report(text) == LARGE


def test_names_that_make_a_report_too_large_are_refused_with_the_reason() -> None:
    classes = [f"service-class-{at}" for at in range(5)]
    require_small({name: model.owner for name, model in LARGE.models.items()}, classes)
    with pytest.raises(ValueError, match=r"9 models and 5 classes may have .* bytes.*shorten the names"):
        require_small({f"{'name' * 20}-{at}": "llm" for at in range(9)}, classes)


def test_names_that_are_not_ascii_are_escaped() -> None:
    report = replace(REPORT, models={"größe": ModelLoad("llm", 1e-6, 1)})
    assert report.to_text().isascii()
    assert parse_report(report.to_text()) == report


def test_served_tokens_and_prefixes_are_parts_of_the_whole_report() -> None:
    digests = {"chat": PrefixDigest.of([1, 2, 3], 16), "small": PrefixDigest.of([4], 32)}
    whole = replace(REPORT, served_tokens={"team-a": 5_000}, prefixes=digests)
    assert parse_report(whole.to_text()) == whole


def test_a_class_that_the_box_does_not_know_waits_as_long_as_the_last() -> None:
    assert REPORT.intercept("chat", "interactive") == 0.0412
    assert REPORT.intercept("chat", "other") == 1.5
    # A request that names none has the default class.
    assert parse_report(REPORT.to_text()).intercept("chat", "") == 0.0412
    with pytest.raises(KeyError):
        REPORT.intercept("elsewhere", "batch")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"epoch": 5}, "lacks epoch, number"),
        ({"age_ms": -1}, "age_ms=-1: send a number from 0 to 1e18"),
        ({"use": 10**400}, "use=1000"),
        ({"models": {"chat": ["llm", 1]}}, r"models.chat: send \[owner, microseconds per token"),
        ({"models": {"chat": ["tpu", 1, 1]}}, "models.chat: owner 'tpu' is not in owners"),
        ({"owners": {"llm": 3}}, "owners.llm: send ttft_ms by class"),
        ({"owners": {"llm": {"ttft_ms": {"a": "x"}, "ahead_ms": 0, "free": 1}}}, "owners.llm.ttft_ms.a=x"),
        ({"met": {"a": True}}, "met.a=True"),
        ({"served": [1]}, "served: send an object of numbers"),
        ({"prefixes": [1]}, "prefixes: send an object of digests by model"),
        (
            {"prefixes": {"a": {"block_tokens": 0, "bits": ""}}},
            "prefixes.a: send an object with block_tokens",
        ),
        ({"prefixes": {"a": {"block_tokens": 16, "bits": "AAA"}}}, "prefixes.a: bits: .*; send base64"),
        ({"prefixes": {"a": {"block_tokens": 16, "bits": "AAAA"}}}, "bits: 3 bytes; send a power of two"),
    ],
)
def test_a_wrong_report_is_refused_with_its_value(changed: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidReport, match=message):
        parse_report(json.dumps({**json.loads(REPORT.to_text()), **changed}))


@given(st.text() | st.binary())
def test_any_text_is_a_report_or_refused(text: str | bytes) -> None:
    with pytest.raises(InvalidReport):
        parse_report(text)


def test_a_text_of_any_size_is_refused_at_once() -> None:
    with pytest.raises(InvalidReport, match="the most is 1000000"):
        parse_report("[" * 1_000_001)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), unique=True, max_size=300))
def test_a_digest_has_every_block_that_it_was_made_of(blocks: list[int]) -> None:
    digest = PrefixDigest.from_json(PrefixDigest.of(blocks, 16).to_json())
    assert digest.cached_tokens(blocks) == 16 * len(blocks)


def test_few_other_blocks_are_in_a_digest() -> None:
    digest = PrefixDigest.of([hash((at,)) for at in range(20_000)], 16)
    wrong = sum(digest.cached_tokens([hash((at, at))]) > 0 for at in range(20_000))
    assert len(digest.bits) <= 65_536
    assert wrong < 600


def test_the_leading_blocks_count() -> None:
    known = [hash((at,)) for at in range(8)]
    digest = PrefixDigest.of(known[:4], 16)
    assert digest.cached_tokens(known) == 64
    assert digest.cached_tokens([]) == 0
