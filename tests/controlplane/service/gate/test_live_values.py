"""A key that counts as live changes something that the server reads while it runs."""

from dataclasses import replace
from typing import Any

import pytest

from backends.testing.scripted import ScriptedGenerator
from controlplane.api.settings import settings_of
from controlplane.config import Config, parse
from controlplane.config.documents import document_of, flattened, merged
from controlplane.config.live_keys import LIVE
from controlplane.service.gate.policies import policies_of, terms_of

PLAIN = parse(
    {
        "models": {"chat": {"model": "m"}},
        "classes": {"gold": {"default": True}},
        "tenants": {"web": {"api_keys_sha256": ["a" * 64]}},
    }
)
# Sections and free mappings have tests of their own.
KEYS = [key for key in LIVE if key.startswith(("server.", "admission."))]
OTHER: dict[str, Any] = {
    "admission.policy": "fits-now",
    "admission.tpot_guard": False,
    "admission.explore": 0.05,
    "admission.engine_queue": 7,
    "server.overload_status": 503,
    "server.admin_key_sha256": "b" * 64,
    "server.metrics_key_sha256": "b" * 64,
    "server.router_key_sha256": "b" * 64,
    "server.limits.max_body": 7,
    "server.limits.max_values": 7,
}
# Read from the configuration in force when they are needed: at the drain, by `Intake.set_terms`, and by the
# rule of the whole configuration that an address of other machines needs keys.
READ_DIRECTLY = {
    "server.open",
    "server.drain_ms",
    "server.vllm_metric_names",
    "server.limits.tokenizer_threads",
    "server.limits.grammar_processes",
    "server.limits.max_images",
    "server.limits.max_image_bytes",
    "server.limits.max_image_pixels",
}


def read(config: Config) -> object:
    """What the server derives from a configuration."""
    policies = policies_of(config, [ScriptedGenerator(has_tandem_scheduler=True)])
    admission = policies.admission
    plain = replace(policies, admission=None, ordering=None, engine_options=None)  # type: ignore[arg-type]
    settings = settings_of(config, context_tokens=100)
    return plain, admission, settings, terms_of(config)


def nested(path: str, value: object) -> dict[str, Any]:
    key, _, rest = path.partition(".")
    return {key: nested(rest, value) if rest else value}


@pytest.mark.parametrize("key", KEYS)
def test_a_live_key_reaches_what_the_server_reads(key):
    document = document_of(PLAIN)
    present = dict(flattened(document))[key]
    value = OTHER[key] if key in OTHER else present + 1
    assert value != present
    changed = parse(merged(document, nested(key, value)))
    assert key in READ_DIRECTLY or read(changed) != read(PLAIN)


@pytest.mark.parametrize(
    "part",
    [
        {"classes": {"gold": {"ttft_ms": 5}}},
        {"tenants": {"web": {"weight": 2}}},
        {"tenants": {"web": {"classes": ["gold"]}}},
        {"tenants": {"web": {"requests_per_minute": 2}}},
        {"log": {"access": False}},
    ],
    ids=str,
)
def test_so_do_classes_tenants_and_the_access_log(part):
    assert read(parse(merged(document_of(PLAIN), part))) != read(PLAIN)
