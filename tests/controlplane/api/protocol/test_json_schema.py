"""Detection of JSON schemas that no output can satisfy."""

import pytest

from controlplane.api.protocol.json_schema import endless_reference

ITSELF = {"$ref": "#/$defs/n"}
TEXT = {"type": "string"}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "#", "type": "object"},
        {"$defs": {"n": ITSELF}, **ITSELF},
        {"$defs": {"n": {"$ref": "#/$defs/m"}, "m": ITSELF}, "type": "object", "properties": {"a": ITSELF}},
        {"$defs": {"n": {"allOf": [TEXT, ITSELF]}}, "type": "array", "items": ITSELF},
        {"$defs": {"n": {"anyOf": [ITSELF, {"oneOf": [ITSELF]}]}}, **ITSELF},
        {"$defs": {"a/b": {"$ref": "#/$defs/a~1b"}}, "$ref": "#/$defs/a~1b"},
        {"$defs": {"a b": {"$ref": "#/$defs/a%20b"}}, "$ref": "#/$defs/a%20b"},
        {"anyOf": [{"$ref": "#/anyOf/0"}, TEXT]},
    ],
)
def test_cyclic_reference_is_named(schema):
    assert endless_reference(schema).startswith("#")


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object", "properties": {"child": {"$ref": "#"}}},
        {"$defs": {"n": {"type": "array", "items": ITSELF}}, **ITSELF},
        {"anyOf": [{"$ref": "#"}, TEXT]},
        {"oneOf": [{"$ref": "#"}, True]},
        {"$defs": {"n": {"$ref": "#/$defs/m"}, "m": TEXT}, **ITSELF},
        {"properties": {"$ref": TEXT, "allOf": TEXT}},
        {"anyOf": [], "allOf": []},
        {"const": {"$ref": "#"}},
        # Dangling references: the engine reports them.
        {"$ref": "#/$defs/none"},
        {"$ref": "#/$defs/none/0/x", "$defs": {"none": [1]}},
        {"$ref": "#/$defs/n/" + "9" * 5_000, "$defs": {"n": [TEXT]}},
        {"$ref": "https://example.com/schema.json"},
        {"$ref": "#anchor"},
        {"$ref": 7},
        {"allOf": "x", "anyOf": 3, "enum": [{"$ref": "#/enum/1"}]},
    ],
)
def test_terminating_schema_is_accepted(schema):
    assert endless_reference(schema) is None


def test_deep_schema_is_accepted():
    deep: dict = {"$ref": "#"}
    for _ in range(100_000):
        deep = {"items": deep}
    assert endless_reference(deep) is None
