"""Parsing of the configuration file and its error messages."""

import re
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from backends.testing.scripted import ScriptedGenerator
from controlplane.config import Config, ConfigError, load, parse
from controlplane.config.config_file import ConfigFile
from controlplane.config.loader import section_in
from controlplane.config.reconfigure import wanted_config
from controlplane.config.renamed_keys import REMOVED, RENAMED
from controlplane.core.clock import milliseconds
from controlplane.policy.engine.options import EngineOptions
from controlplane.service.gate.policies import policies_of

MODELS = {"chat": {"model": "some/model"}}
EMBEDDINGS = [{"model": "some/encoder"}]

CASES = [
    ({}, "models: missing"),
    ({"models": {}}, "no model is configured"),
    ({"models": {"chat": {"model": "m", "nmae": "x"}}}, "chat.nmae: unknown key; did you mean 'name'?"),
    ({"models": {"embeddings": [{"model": "m", "bach_tokens": 1}]}}, "did you mean 'batch_tokens'?"),
    ({"models": {"embeddings": [{"model": "m", "stall_ms": 0}]}}, "stall_ms=0"),
    ({"models": {"chat": {"model": "m", "stall_ms": 999}}}, "stall_ms=999"),
    ({"models": MODELS, "quota": {"llm": {"nominal": 1.2}}}, "quota.llm.nominal=1.2: should be less"),
    (
        {"models": {**MODELS, "embeddings": EMBEDDINGS}, "quota": {"llm": {"nominal": 0.95}}},
        "quota: shares must sum to at most 1",
    ),
    ({"models": MODELS, "quota": {"llm": {"nominal": 0.5, "min": 0.6}}}, "quota.llm: min=0.6: it is part of"),
    ({"models": MODELS, "quota": {"llm": {"nominal": 0.5, "min": 0.3, "lend": 0.3}}}, "lower lend"),
    ({"models": MODELS, "quota": {"policy": "elastic"}}, "quota.policy='elastic'"),
    ({"models": MODELS, "quota": {"forecast": {"quantile": 1}}}, "quota.forecast.quantile=1"),
    ({"models": MODELS, "quota": {"forecast": {"windw_ms": 1}}}, "did you mean 'window_ms'?"),
    ({"models": MODELS, "pool": {"kv_allocator": "magic"}}, "pool.kv_allocator='magic'"),
    ({"models": MODELS, "pool": {"memory": "3 parsecs"}}, "pool.memory='3 parsecs': should be a"),
    ({"models": MODELS, "pool": {"margin": 1}}, "pool.margin=1"),
    ({"models": MODELS, "scheduling": {"ordering": "lifo"}}, "choose one of edf, fcfs, least-slack"),
    ({"models": MODELS, "scheduling": {"ordering": "srmt"}}, "name it in scheduling.engine.ordering"),
    ({"models": MODELS, "scheduling": {"engine": {"ordering": "lifo"}}}, "choose one of apt, edf, fcfs"),
    ({"models": MODELS, "scheduling": {"engine": {"ordering": "tandem"}}}, "unknown; choose one of"),
    ({"models": MODELS, "scheduling": {"engine": {"speed": 1}}}, "'speed': unknown; known are ordering"),
    ({"models": MODELS, "scheduling": {"engine": {"urgency": "high"}}}, "urgency='high': a number is needed"),
    ({"models": MODELS, "scheduling": {"engine": {"urgency": 7}}}, "scheduling.engine: urgency=7"),
    ({"models": MODELS, "scheduling": {"engine": True}}, "scheduling.engine=True: should be `off`, or"),
    ({"models": {"embeddings": {"model": "m"}}}, "models.embeddings: should be a list: [a, b]"),
    ({"models": MODELS, "classes": ["a"]}, "classes=['a']: should be a mapping: {name: value}"),
    ({"models": MODELS, "server": {"admin_key_sha256": "secret"}}, 'key, 64 of 0-9 a-f: printf %s "$KEY" |'),
    ({"models": MODELS, "admission": {"policy": "x"}}, "choose one of fits-now, look-ahead"),
    ({"models": MODELS, "admission": {"explore": 0.5}}, "admission.explore=0.5"),
    ({"models": MODELS, "classes": {"a": {}}}, "exactly one class is the default, not 0"),
    ({"models": MODELS, "classes": {"a": {"default": True, "ttft_ms": -1}}}, "classes.a.ttft_ms=-1"),
    ({"models": MODELS, "tenants": {"t": {"api_keys_sha256": ["x"]}}}, "sha256.0: should be the hash"),
    ({"models": MODELS, "tenants": {"t": {"api_keys_sha256": ["0" * 64], "classes": []}}}, "classes=[]: "),
    ({"models": MODELS, "server": {"limits": {"max_body": "9" * 400}}}, "should be below 1 EiB"),
    ({"models": MODELS, "server": {"limits": {"max_body": 0}}}, "server.limits.max_body=0: should be"),
    ({"models": MODELS, "scheduling": {"priority_head_start_ms": 1e308}}, "start_ms=1e+308: should be less"),
    ({"models": MODELS, "admission": {"defer_threshold_ms": 1e308}}, "threshold_ms=1e+308: should be less"),
    ({"models": MODELS, "scheduling": {"engine": {"starvation_ms": -1}}}, "starvation_ms=-1: a time from 0"),
    ({"models": MODELS, "scheduling": {"engine": {"size_cutoff_window": 10**6}}}, "window=1000000: must"),
    ({"models": MODELS, "scheduling": {"engine": {"size_cutoff_window": 29}}}, "window=29: must be between"),
    ({"models": MODELS, "scheduling": {"engine": {"preempt_ratio": 1e308}}}, "of at most 1000000000"),
    ({"models": MODELS, "scheduling": {"engine": {"missed_decay": 2}}}, "missed_decay=2: a share"),
    ({"models": MODELS, "scheduling": {"engine": {"look_ahead": "nobody"}}}, "all, background or none"),
    (
        {"models": MODELS, "scheduling": {"engine": {"ordering": "srmt", "policy": "x"}}},
        "scheduling.engine: policy='x': unknown",
    ),
    ({"models": MODELS, "quota": {"critical_weight": 1e308}}, "critical_weight=1e+308: should be less"),
    ({"models": MODELS, "classes": {"a": {"default": True, "ttft_ms": 1e-9}}}, "classes.a.ttft_ms=1e-09"),
    (
        {"models": MODELS, "tenants": {"t": {"api_keys_sha256": ["0" * 64], "tokens_per_minute": 1e-300}}},
        "tokens_per_minute=1e-300: should be greater",
    ),
    *[
        (
            {"models": {"chat": {"model": "m", "engine": {"max_model_len": wrong}}}},
            f"models.chat: engine.max_model_len={wrong!r}: should be a whole number of at least 1",
        )
        for wrong in (-1, 0, "16k", 0.5, True, [1])
    ],
    (
        {"models": MODELS, "tenants": {"t": {"api_keys_sha256": ["0" * 64], "classes": ["gold"]}}},
        "tenants.t.classes='gold': no such class; choose from standard",
    ),
    (
        {"models": MODELS, "predictors": {"encoder": "minilm"}},
        "predictors.encoder='minilm': no such embedding model",
    ),
    ({"models": {"chat": {"model": "m", "engine": {"gpu_memory_utilization": 0.9}}}}, "remove it"),
    (
        {"models": {"chat": {"model": "m"}, "embeddings": [{"model": "m"}]}},
        "'m' names two models; give one of them another `name`",
    ),
    (["not", "a", "mapping"], "should be a mapping with keys out of models, server, pool"),
    (None, "should be a mapping with keys out of models"),
    ({"models": MODELS, "scheduling": None}, "scheduling=None: should be a mapping with keys out of ord"),
    ({"models": MODELS, "classes": {"a": 3}}, "classes.a=3: should be a mapping with keys out of"),
    ({"models": MODELS, "quota": {"nominal_weight": float("inf")}}, "quota.nominal_weight=inf"),
    (
        {"models": MODELS, "tenants": {name: {"api_keys_sha256": ["0" * 64]} for name in "ab"}},
        "also a key of tenants.a; a key belongs to one",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("content", "expected"), CASES)
def test_an_error_names_path_value_rule_and_remedy(content, expected):
    with pytest.raises(ConfigError) as caught:
        parse(content, source="file.yaml")
    assert expected in str(caught.value)
    assert str(caught.value).startswith("file.yaml: ")


def test_a_single_kind_may_own_the_whole_pool():
    """The default share of the other kind is unused then."""
    alone = parse({"models": {"embeddings": EMBEDDINGS}, "quota": {"embedding": {"nominal": 1.0}}})
    assert alone.quota.embedding.nominal == 1
    assert parse({"models": MODELS, "quota": {"llm": {"nominal": 1.0}}}).quota.llm.nominal == 1


def test_all_mistakes_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        parse({"models": MODELS, "pool": {"margin": 2}, "admission": {"max_waiting": -1}})
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize(
    "content",
    [
        {"models": MODELS, "pool": {"memory": "2 gigs"}},
        {"models": MODELS, "tenants": {"t": {"api_keys_sha256": ["x"]}}},
    ],
)
def test_one_mistake_is_reported_once(content):
    with pytest.raises(ConfigError) as caught:
        parse(content)
    assert len(str(caught.value).splitlines()) == 1


def _nested(path: str) -> dict[str, Any]:
    """A configuration with a value at the dotted `path`; models.embeddings is a list."""
    content: Any = 1
    for key in reversed(path.split(".")):
        content = {key: [{"model": "some/encoder", **content}] if key == "embeddings" else content}
    return content if "models" in content else {"models": MODELS, **content}


def _paths(section: Any, prefix: str = "") -> Iterator[str]:
    for field in fields(section):
        inner = section_in(field.type)
        yield f"{prefix}{field.name}"
        if inner is not None:
            yield from _paths(inner, f"{prefix}{field.name}.")


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_a_renamed_key_is_refused_with_its_new_name(old, new):
    with pytest.raises(ConfigError, match=rf"{old.rpartition('.')[2]}: renamed to .*; use {new}$"):
        parse(_nested(old))


@pytest.mark.parametrize(("old", "why"), REMOVED.items())
def test_a_removed_key_is_refused_with_the_remedy(old, why):
    with pytest.raises(ConfigError, match=rf"{old.rpartition('.')[2]}: removed; {re.escape(why)}$"):
        parse(_nested(old))


def test_renamed_keys_point_to_keys_that_exist():
    known = {*_paths(Config), *(f"scheduling.engine.{field.name}" for field in fields(EngineOptions))}
    assert set(RENAMED.values()) <= known
    assert not {*RENAMED, *REMOVED} & known


def test_a_renamed_key_is_found_inside_an_experiment():
    plan = {"systems": [{"tandem": {"scheduling": {"engine": {"decode_pace": 0.5}}}}]}
    with pytest.raises(ConfigError, match=r"^config: systems\.0\.tandem\.scheduling\.engine\.decode_pace: r"):
        parse(plan)


def test_a_key_given_twice_is_refused(tmp_path: Path):
    path = tmp_path / "twice.yaml"
    path.write_text("models:\n  chat: {model: a}\n  chat: {model: b}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="'chat' occurs twice"):
        load(path)


def test_yaml_merge_keys_work(tmp_path: Path):
    path = tmp_path / "merged.yaml"
    path.write_text(
        "models: {chat: {model: a}}\n"
        "classes:\n"
        "  first: &first {priority: 3, ttft_ms: 500, default: true}\n"
        "  second: {<<: *first, default: false}\n",
        encoding="utf-8",
    )
    second = load(path).classes["second"]
    assert (second.priority, second.ttft_ms, second.default) == (3, 500, False)


def test_api_key_in_place_of_its_hash_is_not_logged():
    keys = {"server": {"admin_key_sha256": "hush"}, "tenants": {"t": {"api_keys_sha256": "hush"}}}
    with pytest.raises(ConfigError) as caught:
        parse({"models": MODELS, **keys})
    assert "hush" not in str(caught.value)


KEYS = {"a": {"api_keys_sha256": ["0" * 64]}}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "box.example"])
def test_an_address_that_others_reach_needs_keys_or_an_explicit_opening(host: str):
    content = {"models": MODELS, "server": {"host": host}}
    with pytest.raises(ConfigError, match=rf"host='{host}': .*; configure tenants, or set server.open"):
        parse(content)
    assert parse(content | {"tenants": KEYS}).server.host == host
    assert parse(content | {"server": {"host": host, "open": True}}).server.open


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
def test_a_local_address_needs_no_keys(host: str):
    assert parse({"models": MODELS, "server": {"host": host}}).tenants == {}


def test_the_command_line_cannot_open_a_server_without_keys(tmp_path: Path):
    (tmp_path / "my.yaml").write_text("models: {embeddings: [{model: m}]}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"my\.yaml with --host: server.host='0.0.0.0'"):
        ConfigFile(tmp_path / "my.yaml", {"host": "0.0.0.0"}).load()


@pytest.mark.parametrize("options", [{"open": True}, {"host": "127.0.0.1"}, {"host": "::", "open": True}])
def test_the_command_line_replaces_what_would_be_invalid_in_the_file(tmp_path: Path, options: dict[str, Any]):
    (tmp_path / "my.yaml").write_text(
        "models: {embeddings: [{model: m}]}\nserver: {host: 0.0.0.0, drain_ms: 5}\n", encoding="utf-8"
    )
    server = ConfigFile(tmp_path / "my.yaml", options).load().server
    assert {key: getattr(server, key) for key in options} == options
    assert server.drain_ms == 5


@pytest.mark.parametrize("text", ["[]", "models: {embeddings: [{model: m}]}\nserver: [8000]\n"])
def test_the_command_line_hides_no_section_of_another_type(tmp_path: Path, text: str):
    (tmp_path / "my.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="should be a mapping"):
        ConfigFile(tmp_path / "my.yaml", {"port": 9_000}).load()


WRONG = """\
models:
  chat: {model: m}
  embeddings:
    - model: e
      batch_tokns: 8

classes: &all
  standard: {default: true}
  batch:
    priority: high
quota: {llm: {}}
admission: {max_waiting: 2}
"""


def test_a_mistake_in_a_file_has_its_line(tmp_path: Path):
    file = tmp_path / "my.yaml"
    file.write_text(WRONG)
    for read in (partial(load, file), ConfigFile(file, {}).load):
        with pytest.raises(ConfigError) as caught:
            read()
        shown = [line.removeprefix(f"{file}, line ") for line in str(caught.value).splitlines()]
        assert sorted(int(line.partition(": ")[0]) for line in shown) == [5, 10, 11], shown
        assert shown[0].startswith(
            "5: models.embeddings.0.batch_tokns: unknown key; did you mean 'batch_tokens'"
        )
        assert "11: quota.llm.nominal: missing; add it" in shown
    with pytest.raises(ConfigError) as caught:
        ConfigFile(file, {"port": 1}).load()
    assert str(caught.value).startswith(f"{file} with --port: models.embeddings.0")


def test_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no\.yaml: No such file"):
        load(tmp_path / "no.yaml")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"models: [", "not YAML"),
        (b"models: '\xff'", "not UTF-8 at byte 9; save the file as UTF-8"),
        (b"? [a, b]\n: 1\n", "a key should be a plain name"),
        (b"? {a: b}\n: 1\n", "a key should be a plain name"),
        (b"models: 2001-13-45", "'2001-13-45' is not a valid timestamp; for a text, put it in quotes"),
        (b"models: 0x_", "'0x_' is not a valid int; for a text"),
        (b"models: !!bool maybe", "'maybe' is not a valid bool; for a text"),
        (b"models: " + b"[" * 3_000 + b"]" * 3_000, "nested too deeply"),
    ],
)
def test_unreadable_file_is_named(tmp_path: Path, content: bytes, message: str):
    broken = tmp_path / "broken.yaml"
    broken.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load(broken)


def test_changes_to_yaml_safe_loader_have_no_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    read = yaml.SafeLoader.yaml_constructors
    monkeypatch.setitem(read, "tag:yaml.org,2002:timestamp", read["tag:yaml.org,2002:str"])
    config = tmp_path / "dated.yaml"
    config.write_text("models: 2001-13-45")
    with pytest.raises(ConfigError, match="is not a valid timestamp"):
        load(config)


@pytest.mark.parametrize("name", ["dev", "colocated"])
def test_shipped_configurations_are_valid(name):
    config = load(Path("configs") / f"{name}.yaml")
    assert config.service_classes()["interactive"].slo.ttft == milliseconds(1000)
    assert config.default_class() == "standard"


def test_sizes_are_read_in_decimal_and_binary_units():
    assert parse({"models": MODELS, "pool": {"memory": "1.5GiB"}}).pool.memory == 3 * 2**29
    assert parse({"models": MODELS, "pool": {"memory": "2GB"}}).pool.memory == 2 * 10**9
    assert parse({"models": MODELS, "pool": {"memory": 1024}}).pool.memory == 1024
    assert parse({"models": MODELS}).pool.memory == "auto"


@pytest.mark.parametrize("said", ["off", False])
def test_engine_off_keeps_vllms_scheduler(said):
    config = parse({"models": MODELS, "scheduling": {"engine": said}})
    assert config.engine_options() is None
    assert wanted_config(config, {"admission": {"max_waiting": 5}})[0].engine_options() is None
    own, plain = ScriptedGenerator(has_tandem_scheduler=True), ScriptedGenerator()
    assert [policies_of(config, [one]).engine_queue for one in (own, plain)] == [64, 64]


@pytest.mark.parametrize("said", [{}, {"engine": {}}, {"engine": None}])
def test_the_engine_policy_is_the_default(said):
    assert parse({"models": MODELS, "scheduling": said}).engine_options().ordering == "srmt"


def test_an_engine_without_a_scheduler_of_its_own_is_ordered_by_the_gate():
    config = parse({"models": MODELS})
    own, plain = ScriptedGenerator(has_tandem_scheduler=True), ScriptedGenerator()
    assert [policies_of(config, [one]).engine_queue for one in (own, plain)] == [1_000, 64]
    assert policies_of(config, [plain]).engine_options is None
    stated = parse({"models": MODELS, "admission": {"engine_queue": 3}})
    assert [policies_of(stated, [one]).engine_queue for one in (own, plain)] == [3, 3]


def test_engine_options_default_to_those_of_the_gate():
    scheduling = {"ordering": "least-slack", "default_deadline_ms": 7_000, "engine": {}}
    config = parse({"models": MODELS, "scheduling": scheduling, "admission": {"policy": "fits-now"}})
    options = config.engine_options()
    assert (options.ordering, options.default_deadline_ms) == ("least-slack", 7_000)
    assert options.policy == "fits-now"
    scheduling["engine"] = {"ordering": "srmt", "default_deadline_ms": 1, "preempt_ratio": 2}
    other = parse({"models": MODELS, "scheduling": scheduling})
    options = other.engine_options()
    assert (options.ordering, options.default_deadline_ms, options.preempt_ratio) == ("srmt", 1, 2)
