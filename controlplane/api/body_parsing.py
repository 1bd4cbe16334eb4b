"""Parses request bodies within `server.limits`: bounded structure first, then one validation error at most.

Validating a body costs time and memory for each value and for each error in it, so the structure is measured
on the bytes before anything is built from them, up to the first limit that is exceeded. A large body is
measured and parsed in a thread.
"""

import asyncio
from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import orjson
from pydantic import ValidationError

from controlplane.api.errors import Problem, invalid_body
from controlplane.api.memory_release import MemoryRelease
from controlplane.api.protocol.requests import Objectives
from controlplane.api.settings import BodyLimits
from controlplane.service.fair_slots import FairSlots

Body = TypeVar("Body", bound=Objectives)
Positions = npt.NDArray[np.intp]

# `[` and `{` differ in one bit, and so do `]` and `}`.
_CASE_BIT = 0x20
# A text is measured in parts, so that the arrays stay in the cache and the first limit ends it.
_PART_BYTES = 2**18
# Memory of a string, list or object without its characters, and of another value, in their container.
_STRING_BYTES, _VALUE_BYTES = 100, 40
# First bytes of the UTF-8 of characters that take four or two bytes in a string.
_FOUR_BYTES_FROM, _TWO_BYTES_FROM = 0xF0, 0xC4
_TEXTS = {
    "max_depth": "its lists and objects nest {found:,} deep or deeper",
    "max_members": "its objects have {found:,} or more members",
    "max_values": "it has {found:,} or more members and list items",
    "max_strings": "it has {found:,} or more strings, lists and objects",
    "max_name": "a member's name has {found:,} bytes",
}


@dataclass(frozen=True, slots=True)
class Structure:
    """Sizes of a JSON text; each field is compared with the limit of its name.

    `max_strings` counts strings, lists and objects, `max_values` also all other values.
    """

    max_depth: int
    max_members: int
    max_values: int
    max_strings: int
    max_name: int


_NOTHING = Structure(0, 0, 0, 0, 0)


def structure_of(body: bytes) -> Structure:
    """Measures a JSON text without parsing it.

    Of a text that is not valid JSON the figures mean nothing; the parser refuses it.
    """
    return [_NOTHING, *_structures(body)][-1]


def _structures(body: bytes) -> Iterator[Structure]:
    """The structure up to the end of each part of `body`, by operations that release the interpreter lock."""
    depth, found, is_inside, begin = 0, _NOTHING, False, 0
    last_quotes = np.empty(0, np.intp)
    while begin < len(body):
        part = _without_escapes(body, begin)
        if is_inside and b'"' not in part:
            begin += len(part)
            continue
        text = np.frombuffer(part, np.uint8)
        is_quote = text == ord('"')
        is_outside = _outside_strings(is_quote, is_inside=is_inside)
        is_inside = not is_outside[-1]
        folded = text | _CASE_BIT
        is_opening = (folded == ord("{")) & is_outside
        brackets = folded[is_opening | ((folded == ord("}")) & is_outside)]
        depths = depth + np.cumsum(np.where(brackets == ord("{"), 1, -1), dtype=np.int32)
        depth = int(depths[-1]) if len(depths) else depth
        colons = begin + np.flatnonzero((text == ord(":")) & is_outside)
        quotes = np.concatenate((last_quotes, begin + np.flatnonzero(is_quote)))
        last_quotes = quotes[-2:]
        found = Structure(
            max_depth=max(found.max_depth, int(depths.max(initial=0))),
            max_members=found.max_members + len(colons),
            # Every value but the first of its list or object follows a comma.
            max_values=found.max_values
            + int(np.count_nonzero((text == ord(",")) & is_outside))
            + int(np.count_nonzero(is_opening)),
            # The quotes that are not outside strings begin one.
            max_strings=found.max_strings + int(np.count_nonzero(is_opening | (is_quote & ~is_outside))),
            max_name=max(found.max_name, _longest_name(quotes, colons)),
        )
        yield found
        begin += len(part)


def _without_escapes(body: bytes, begin: int) -> bytes:
    """The part of `body` from `begin`, in which every quote begins or ends a string."""
    end = begin + _PART_BYTES
    part = body[begin:end]
    if b"\\" not in part:
        return part
    if (len(part) - len(part.rstrip(b"\\"))) % 2:
        # The last backslash belongs to the byte after it.
        part += body[end : end + 1]
    return part.replace(b"\\\\", b"__").replace(b'\\"', b"__")


def _outside_strings(is_quote: npt.NDArray[np.bool_], *, is_inside: bool) -> npt.NDArray[np.bool_]:
    """Whether each byte is outside strings (a closing quote is); `is_inside`: the first byte is within one.

    The parity of the quotes up to each byte is found for 64 bytes at a time, in six steps (Langdale and
    Lemire, "Parsing Gigabytes of JSON per Second", section 3.1.1).
    """
    packed = np.packbits(is_quote, bitorder="little")
    words = np.zeros(-(-len(packed) // 8), "<u8")
    words.view(np.uint8)[: len(packed)] = packed
    for bits in (1, 2, 4, 8, 16, 32):
        words ^= words << np.uint64(bits)
    is_odd = np.bitwise_xor.accumulate(words >> np.uint64(63))
    # All bits of a word are inverted if the quotes before it are odd: 0 - 1 has all bits.
    words[1:] ^= np.uint64(0) - is_odd[:-1]
    if not is_inside:
        words = ~words
    return np.unpackbits(words.view(np.uint8), count=len(is_quote), bitorder="little").view(np.bool_)


def _longest_name(quotes: Positions, colons: Positions) -> int:
    """Bytes between the last two quotes before each colon."""
    closing = np.searchsorted(quotes, colons) - 1
    closing = closing[closing >= 1]
    return int((quotes[closing] - quotes[closing - 1] - 1).max(initial=0))


def check_structure(
    body: bytes, limits: BodyLimits, *, what: str = "the body", has_token_ids: bool = False
) -> None:
    """Raises Problem (400) naming the limit that the body, or another JSON text, exceeds.

    A text that may not have token ids has no more values than `max_strings`. A short text with few brackets
    and colons is within the limits whatever it contains.
    """
    is_short = len(body) <= min(limits.inline_body, limits.max_values, limits.max_strings)
    if (
        is_short
        and body.count(b"[") + body.count(b"{") <= limits.max_depth
        and body.count(b":") <= limits.max_members
    ):
        return
    is_bounded_by_strings = not has_token_ids and limits.max_strings < limits.max_values
    values_key = "max_strings" if is_bounded_by_strings else "max_values"
    most_values = getattr(limits, values_key)
    for found in _structures(body):
        for name, text in _TEXTS.items():
            key = values_key if name == "max_values" else name
            value, limit = getattr(found, name), getattr(limits, key)
            if value > limit:
                where = "" if key == name else " where no token ids are taken"
                rule = f"{text.format(found=value)}, and server.limits.{key} is {limit:,}{where}"
                raise _too_complex(what, rule)
        # `max_values` counts an empty list or object twice.
        others = max(0, found.max_values - 2 * found.max_strings)
        if found.max_strings / limits.max_strings + others / most_values > 1:
            rule = (
                f"it has {found.max_strings:,} or more strings, lists and objects and {others:,} or more "
                f"other values; {limits.max_strings:,} of the former (server.limits.max_strings) leave room "
                f"for none of the {most_values:,} others ({values_key}), and half of them for half"
            )
            raise _too_complex(what, rule)


def _too_complex(what: str, rule: str) -> Problem:
    message = f"{what} is too complex: {rule}; send less or raise the limit"
    return Problem(400, message, code="body_too_complex")


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
    check_structure(body, limits, has_token_ids=model.takes_token_ids)
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise invalid_body(error, model) from None


def object_bytes(body: bytes, enough: int = 0) -> int:
    """Upper estimate of the memory of what is parsed from a valid JSON text; a rough one up to `enough`."""
    characters = _character_bytes(body) * len(body)
    # Every value but the first follows a comma or an opening bracket, every name is before a colon.
    most = 1 + sum(map(body.count, (b",", b":", b"[", b"{")))
    rough = characters + (_STRING_BYTES + _VALUE_BYTES) * most
    if rough <= enough:
        return rough
    found = structure_of(body)
    return characters + _STRING_BYTES * found.max_strings + _VALUE_BYTES * found.max_values


def _character_bytes(body: bytes) -> int:
    """The most bytes that a character takes in a string of this JSON text (PEP 393)."""
    if b"\\ud" in body or b"\\uD" in body:
        return 4
    escaped = 2 if b"\\u" in body else 1
    if body.isascii():
        return escaped
    first = int(np.frombuffer(body, np.uint8).max())
    return 4 if first >= _FOUR_BYTES_FROM else 2 if first >= _TWO_BYTES_FROM else escaped


def _parsed(body: bytes, model: type[Body], limits: BodyLimits) -> tuple[Body, int]:
    return parse_body(body, model, limits), object_bytes(body, limits.inline_body)


class BodyParser:
    """Parses bodies up to the limit `inline_body` on the event loop and larger ones in a thread.

    One at a time: parsing holds the interpreter lock, and the loop competes with one thread, not with many.
    """

    def __init__(self, release: MemoryRelease) -> None:
        """`release` is scheduled after each large body."""
        self._slot = FairSlots(1)
        self._release = release

    async def parse(
        self, body: bytes, model: type[Body], limits: BodyLimits, *, tenant: str
    ) -> tuple[Body, int]:
        """Validates a body of `tenant`; also returns the memory that it takes. Raises Problem (400)."""
        if len(body) <= limits.inline_body:
            return _parsed(body, model, limits)
        work = partial(asyncio.to_thread, _parsed, body, model, limits)
        try:
            return await self._slot.run(tenant, work)
        finally:
            self._release.schedule()
