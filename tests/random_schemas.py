"""Random JSON schemas of nested objects, lists, unions, references and bounds, by seed."""

from __future__ import annotations

import random
from typing import Any

_WORDS = ("name", "kind", "size", "at", "of", "next", "left", "tag", "größe", "a b", 'q"q')
_PATTERNS = ("^[a-c]{2,4}$", "^\\d{4}-\\d\\d$", "^(x|yy)*z$", "^[^\\s]{1,5}$")
_FORMATS = ("date", "date-time", "uuid", "ipv4", "email")
_DEEPEST = 3


def random_schema(seed: int) -> dict[str, Any]:
    """An object schema, closed, with what it refers to."""
    chance = random.Random(seed)
    shared = {f"part{i}": _leaf(chance) for i in range(2)}
    return {**_object(chance, 0), "$defs": shared}


def _any(chance: random.Random, depth: int) -> dict[str, Any]:
    if depth >= _DEEPEST:
        return _leaf(chance)
    kinds = (_object, _list, _tuple, _union)
    if chance.random() < 0.5:
        return chance.choice(kinds)(chance, depth)
    if chance.random() < 0.2:
        return {"$ref": f"#/$defs/part{chance.randrange(2)}"}
    return _leaf(chance)


def _leaf(chance: random.Random) -> dict[str, Any]:
    low, more = chance.randrange(-50, 50), chance.randrange(1, 9)
    enum = chance.sample([1, 2.5, "a", "b c", None, True, ["x"]], 3)
    leaves: tuple[dict[str, Any], ...] = (
        {"enum": enum},
        {"const": chance.choice(["<|im_end|>", 7, "é\n", False])},
        {"type": "integer", "minimum": low, "maximum": low + more * 100},
        {"type": "number", "exclusiveMinimum": 0, "maximum": chance.choice([1, 2.5])},
        {"type": "string", "pattern": chance.choice(_PATTERNS)},
        {"type": "string", "format": chance.choice(_FORMATS)},
        {"type": "string", "minLength": more // 3, "maxLength": more},
        {"type": [chance.choice(["boolean", "integer"]), "null"]},
    )
    return chance.choice(leaves)


def _object(chance: random.Random, depth: int) -> dict[str, Any]:
    names = chance.sample(_WORDS, chance.randrange(1, 5))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _any(chance, depth + 1) for name in names},
        "required": [name for name in names if chance.random() < 0.6],
        "additionalProperties": False,
    }
    if chance.random() < 0.2:
        schema["additionalProperties"] = {"type": "integer"}
    return schema


def _list(chance: random.Random, depth: int) -> dict[str, Any]:
    low = chance.randrange(3)
    return {
        "type": "array",
        "items": _any(chance, depth + 1),
        "minItems": low,
        "maxItems": low + chance.randrange(1, 4),
    }


def _tuple(chance: random.Random, depth: int) -> dict[str, Any]:
    parts = [_any(chance, depth + 1) for _ in range(chance.randrange(1, 4))]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}


def _union(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(chance, depth + 1) for _ in range(chance.randrange(2, 4))]}
