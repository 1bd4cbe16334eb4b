"""The configuration as plain values without secrets, for records that leave the machine."""

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import TypeAdapter

from controlplane.config.root import Config

_SECRET = re.compile("token|key|secret|passw|credential", re.IGNORECASE)
# Not in _SECRET: a number under `batch_tokens` is none.
_NUMBER = re.compile("secret|passw|credential", re.IGNORECASE)
# Of 64 bits, signed or not.
_LEAST, _MOST = -(2**63), 2**64 - 1
_URL = re.compile(r"(\w+://)(?:[^\s/]*@)?([^\s?#]*)[?#]?\S*")
_REMOVED = "removed"


def redacted_values(config: Config, rename_tenant: Callable[[str], str]) -> dict[str, Any]:
    """What a YAML file of this configuration would hold, defaults left out; `parse` accepts it.

    Key digests are left out, those of tenants are replaced by digests of no key, tenants get other names, and
    a text under a key that names a secret (such as `hf_token` of an engine), at any depth, is removed. URLs
    lose user, password and query. An integer beyond 64 bits, which not every writer of JSON takes, is a text.
    """
    found: dict[str, Any] = TypeAdapter(Config).dump_python(config, mode="json", exclude_defaults=True)
    if config.scheduling.engine is None:
        found.setdefault("scheduling", {})["engine"] = "off"
    for key in ("admin_key_sha256", "metrics_key_sha256", "router_key_sha256"):
        found.get("server", {}).pop(key, None)
    tenants = found.pop("tenants", {})
    found = _without_secrets(found)
    if tenants:
        found["tenants"] = {
            (name := rename_tenant(given)): {
                **section,
                "api_keys_sha256": [hashlib.sha256(b"no key of " + name.encode()).hexdigest()],
            }
            for given, section in tenants.items()
        }
    return found


def _without_secrets(value: Any, path: str = "") -> Any:
    """The value at the keys of `path`."""
    if isinstance(value, Mapping):
        return {key: _without_secrets(inner, f"{path}.{key}") for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_secrets(inner, path) for inner in value]
    if isinstance(value, str):
        return _REMOVED if _SECRET.search(path) else _URL.sub(r"\1\2", value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and _NUMBER.search(path.rpartition(".")[2]):
        return _REMOVED
    return str(value) if isinstance(value, int) and not _LEAST <= value <= _MOST else value
