"""Requests that schemathesis derives from /openapi.json get only answers that it describes, and no 500."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from hashlib import sha256

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import CheckFunction, load_all_checks
from schemathesis.core.result import Ok

from tests.controlplane.api.example_bodies import api_key
from tests.controlplane.api.test_http_protocol import hosted

KEY, ADMIN_KEY = "tenant-key", "admin-key"
EXAMPLES = 12
# It would end the service for the operations after it.
LEFT_OUT = {("/admin/drain", "post")}
CHECKED = (
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)


def checks() -> list[CheckFunction]:
    load_all_checks()
    return schemathesis.checks.CHECKS.get_by_names(CHECKED)


def operations(url: str, mode: GenerationMode) -> Iterator[schemathesis.APIOperation]:
    config = schemathesis.Config.from_dict({"generation": {"mode": mode.value}})
    for found in schemathesis.openapi.from_url(f"{url}/openapi.json", config=config).get_all_operations():
        operation = found.ok() if isinstance(found, Ok) else pytest.fail(str(found.err()))
        # Without a body every request is valid.
        has_invalid = mode is GenerationMode.POSITIVE or operation.body
        if has_invalid and (operation.path, operation.method) not in LEFT_OUT:
            yield operation


def explore(url: str, mode: GenerationMode) -> Counter[int]:
    """Sends examples of every operation; returns how often each status came."""
    seen: Counter[int] = Counter()
    for operation in operations(url, mode):
        exploring(operation, mode, url, seen)()
    return seen


def exploring(operation, mode: GenerationMode, url: str, seen: Counter[int]) -> Callable[[], None]:
    key = ADMIN_KEY if operation.path.startswith("/admin") else KEY

    @settings(max_examples=EXAMPLES, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: schemathesis.Case) -> None:
        answer = case.call(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=20)
        seen[answer.status_code] += 1
        assert answer.status_code != 500, answer.text
        case.validate_response(answer, checks=checks())

    return send


# `make fuzz` selects it by this mark and draws new examples, but no more of them: a run takes minutes.
@pytest.mark.hypothesis
@pytest.mark.long
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
async def test_every_answer_is_described(mode: GenerationMode):
    async with hosted((api_key(KEY),), admin_key_sha256=sha256(ADMIN_KEY.encode()).hexdigest()) as host:
        seen = await asyncio.to_thread(explore, "http://{}:{}".format(*host.address), mode)
    assert seen.keys() & {200, 400} and 500 not in seen, seen
