"""Dotted names of all fields, and the nearest one to a name that does not exist."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import typing
from collections.abc import Iterator
from typing import Any

from card_megatron.config.errors import ConfigError
from card_megatron.config.schema import RunConfig

ALIASES = {"precision": "precision.preset", "precision.dtype": "precision.preset"}
"""Other names of a field: short for a section's main one, or what an older version called it."""


def walk(kind: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, type) of every leaf field."""
    hints = typing.get_type_hints(kind)
    for spec in dataclasses.fields(kind):
        name, hint = prefix + spec.name, hints[spec.name]
        if dataclasses.is_dataclass(hint):
            yield from walk(typing.cast(type, hint), name + ".")
        else:
            yield name, hint


@functools.cache
def leaf_types() -> dict[str, Any]:
    """Dotted name -> type, of all leaf fields of a run."""
    return dict(walk(RunConfig))


def is_section(key: str) -> bool:
    """True for the name of a group of fields, such as `model`."""
    return any(leaf.startswith(key + ".") for leaf in leaf_types())


def is_known(key: str) -> bool:
    """True for a field, a section, and anything below a field that is itself a dict."""
    leaves = leaf_types()
    if key in leaves or is_section(key):
        return True
    parents = (key.rsplit(".", depth)[0] for depth in range(1, key.count(".") + 1))
    return any(typing.get_origin(leaves.get(parent)) is dict for parent in parents)


def refuse_unknown(key: str, also: typing.Iterable[str] = ()) -> None:
    """Raise, with the nearest known key, unless the key exists; `also` holds keys outside the tree."""
    if is_known(key) or key in also:
        return
    candidates = [*leaf_types(), *(name for name in also if not is_section(name))]
    section, _, last = key.rpartition(".")
    # a right name in a wrong section is nearer to what was meant than a similar spelling
    close = [name for name in candidates if name.rpartition(".")[2] == last and section]
    hint = f"; did you mean {close[0]}?" if close else suggestion(key, candidates)
    hint = hint or "; `card config --help` lists all keys"
    raise ConfigError(f"unknown config key {key}{hint}")


def suggestion(name: str, known: typing.Iterable[str]) -> str:
    """'; did you mean X?' where one of the known names is near."""
    close = difflib.get_close_matches(name, [*known], n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of a nested dict, stopping at fields that are dicts themselves; aliases by their field."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and key not in leaf_types():
            yield from flatten(value, key + ".")
        else:
            yield key if value is None else ALIASES.get(key, key), value


def nest(fields: dict[str, Any]) -> dict[str, Any]:
    """The tree of dotted keys: what flatten() undoes."""
    tree: dict[str, Any] = {}
    for key, value in fields.items():
        *sections, name = key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return tree


def describe_type(hint: Any) -> str:
    """What a field takes, in words."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return "one of " + ", ".join(map(str, arguments))
    if origin is typing.Union:
        inner = [describe_type(argument) for argument in arguments if argument is not type(None)]
        return f"{' or '.join(inner)}, or null"
    if origin is list:
        return f"a list of {_plural(arguments[0])}"
    if origin is dict:
        return f"a mapping of names to {_plural(arguments[1])}"
    return {int: "an integer", float: "a number", bool: "true or false", str: "text", Any: "anything"}[hint]


def _plural(hint: Any) -> str:
    if typing.get_origin(hint) is list:
        return f"lists of {_plural(typing.get_args(hint)[0])}"
    return {int: "integers", str: "texts", Any: "values"}[hint]
