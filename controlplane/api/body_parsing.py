"""Parses request bodies within `server.limits`: bounded structure first, then one validation error at most.

Validating a body costs time and memory for each value and for each error in it, so the structure is measured
on the bytes before anything is built from them. A large body is measured and parsed in a thread.
"""

import asyncio
from codecs import BOM_UTF8
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import orjson
from pydantic import BaseModel, ValidationError

from controlplane.api.errors import Problem, invalid_body
from controlplane.api.memory_release import MemoryRelease
from controlplane.api.settings import BodyLimits
from controlplane.service.fair_slots import FairSlots

Body = TypeVar("Body", bound=BaseModel)
Positions = npt.NDArray[np.intp]

# `[` and `{` differ in one bit, and so do `]` and `}`.
_CASE_BIT = 0x20
_TEXTS = {
    "max_depth": "its lists and objects nest {found:,} deep",
    "max_members": "its objects have {found:,} members",
    "max_values": "it has {found:,} members and list items",
    "max_name": "a member's name has {found:,} bytes",
}


@dataclass(frozen=True, slots=True)
class Structure:
    """Sizes of a JSON text; each field is compared with the limit of its name."""

    max_depth: int
    max_members: int
    max_values: int
    max_name: int


def structure_of(body: bytes) -> Structure:
    """Measures a JSON text without parsing it: whole-array operations, which release the interpreter lock.

    Of a text that is not valid JSON the figures mean nothing; the parser refuses it.
    """
    if b"\\" in body:
        # The escapes that matter: afterwards every quote begins or ends a string.
        body = body.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    text = np.frombuffer(body, np.uint8)
    is_quote = text == ord('"')
    is_outside = ~np.logical_xor.accumulate(is_quote)
    colons = np.flatnonzero((text == ord(":")) & is_outside)
    commas = int(np.count_nonzero((text == ord(",")) & is_outside))
    folded = text | _CASE_BIT
    brackets = folded[((folded == ord("{")) | (folded == ord("}"))) & is_outside]
    is_opening = brackets == ord("{")
    # In small integers: a body may consist of brackets.
    steps = is_opening.view(np.int8) * np.int8(2) - np.int8(1)
    return Structure(
        max_depth=int(np.cumsum(steps, dtype=np.int32).max(initial=0)),
        max_members=len(colons),
        # Every value but the first of its list or object follows a comma.
        max_values=commas + int(np.count_nonzero(is_opening)),
        max_name=_longest_name(np.flatnonzero(is_quote), colons),
    )


def _longest_name(quotes: Positions, colons: Positions) -> int:
    """Bytes between the last two quotes before each colon."""
    closing = np.searchsorted(quotes, colons) - 1
    closing = closing[closing >= 1]
    return int((quotes[closing] - quotes[closing - 1] - 1).max(initial=0))


def check_structure(body: bytes, limits: BodyLimits) -> None:
    """Raises Problem (400) naming the limit that the body exceeds.

    A short text with few brackets and colons is within the limits whatever it contains.
    """
    is_short = len(body) <= min(limits.inline_body, limits.max_values)
    if len(body) <= limits.max_name or (
        is_short
        and body.count(b"[") + body.count(b"{") <= limits.max_depth
        and body.count(b":") <= limits.max_members
    ):
        return
    found = structure_of(body)
    for field in fields(found):
        value, limit = getattr(found, field.name), getattr(limits, field.name)
        if value > limit:
            cause = _TEXTS[field.name].format(found=value)
            raise Problem(
                400,
                f"the body is too complex: {cause}, and server.limits.{field.name} is {limit:,}; "
                "send less or raise the limit",
                code="body_too_complex",
            )


def parse_json(body: bytes, limits: BodyLimits) -> Any:
    """A body without a model. Raises Problem (400)."""
    check_structure(body, limits)
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Problem(400, f"the body is not valid JSON: {error}", code="invalid_json") from None


def parse_body(body: bytes, model: type[Body], limits: BodyLimits) -> Body:
    """Validates a body. Raises Problem (400) for its first fault."""
    body = body.removeprefix(BOM_UTF8)
    check_structure(body, limits)
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise invalid_body(error, model) from None


class BodyParser:
    """Parses bodies up to the limit `inline_body` on the event loop and larger ones in a thread.

    One at a time: parsing holds the interpreter lock, and the loop competes with one thread, not with many.
    """

    def __init__(self) -> None:
        self._slot = FairSlots(1)
        self._release = MemoryRelease()

    async def parse(self, body: bytes, model: type[Body], limits: BodyLimits, *, tenant: str) -> Body:
        """Validates a body of `tenant`. Raises Problem (400)."""
        if len(body) <= limits.inline_body:
            return parse_body(body, model, limits)
        work = partial(asyncio.to_thread, parse_body, body, model, limits)
        try:
            return await self._slot.run(tenant, work)
        finally:
            self._release.schedule()
