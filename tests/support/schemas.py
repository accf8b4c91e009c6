"""Check a value against a schema, with the features that megapg's schemas use."""

from collections.abc import Mapping
from typing import Any

KINDS = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int}
KINDS |= {"number": float, "null": type(None)}
KNOWN = {"$schema", "title", "description", "$defs", "$ref", "type", "const", "enum", "minimum"}
KNOWN |= {"items", "required", "properties", "additionalProperties"}


def check_schema(
    value: object, whole: Mapping[str, Any], part: Mapping[str, Any] | None = None, where: str = "."
) -> None:
    """Check that the schema allows the value and all of its keys.

    A feature of JSON Schema that megapg's schemas do not use is an error.
    """
    schema = whole if part is None else part
    assert set(schema) <= KNOWN, where
    if (ref := schema.get("$ref")) is not None:
        check_schema(value, whole, whole["$defs"][ref.removeprefix("#/$defs/")], where)
        return
    if "const" in schema or "enum" in schema:
        assert value in schema.get("enum", [schema.get("const")]), where
        return
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    assert type(value) in [KINDS[each] for each in types], (where, value)
    if isinstance(value, int):
        assert value >= schema.get("minimum", value), where
    if isinstance(value, list):
        for number, each in enumerate(value):
            check_schema(each, whole, schema["items"], f"{where}[{number}]")
    if isinstance(value, dict) and ("properties" in schema or "additionalProperties" in schema):
        assert set(schema.get("required", ())) <= set(value), where
        for name, each in value.items():
            found = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
            assert found is not None, f"{where}.{name} is in no schema"
            check_schema(each, whole, found, f"{where}.{name}")
