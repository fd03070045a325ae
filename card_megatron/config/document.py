"""docs/configuration.md, made from the dataclasses: `python -m card_megatron.config.document`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import typing
from collections.abc import Iterator
from typing import Any

from card_megatron.config import schema
from card_megatron.config.keys import describe_type, flatten
from card_megatron.config.presets import PRESETS

HEAD = """# Configuration

Made from `card_megatron/config/schema.py` by `make docs`; a test keeps it true.

A run is a tree of fields. A value comes from the first of these that gives one: `--section.key value` on the command
line, the YAML file of `--config`, the preset, the default below. An unknown key is an error. `card config …` prints the
resolved tree as YAML that `--config` reads back.
"""

MARKDOWN = str.maketrans({"|": r"\|", "*": r"\*"})
"""Signs that would end a table's cell or begin an emphasis."""


def document() -> str:
    """The whole page."""
    sections = "\n".join(_sections())
    return f"{HEAD}\n{sections}\n{_presets()}"


def field_docs(kind: type) -> dict[str, str]:
    """Field -> the docstring that stands below it."""
    body = ast.parse(inspect.getsource(kind)).body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            docs[field.target.id] = inspect.cleandoc(typing.cast(Any, text.value).value)
    return docs


def _sections() -> Iterator[str]:
    hints = typing.get_type_hints(schema.RunConfig)
    yield _table("The run itself", schema.RunConfig, prefix="")
    for name, kind in hints.items():
        if dataclasses.is_dataclass(kind):
            yield _table(f"`{name}`", typing.cast(type, kind), prefix=f"{name}.")


def _table(title: str, kind: type, prefix: str) -> str:
    hints, docs = typing.get_type_hints(kind), field_docs(kind)
    rows = [
        f"| `{prefix}{field.name}` | {describe_type(hints[field.name])} | `{_default(field)}` "
        f"| {docs[field.name].translate(MARKDOWN)} |"
        for field in dataclasses.fields(kind)
        if not dataclasses.is_dataclass(hints[field.name])
    ]
    about = inspect.cleandoc(kind.__doc__ or "")
    return "\n".join(
        [f"## {title}\n\n{about}\n", "| field | takes | default | meaning |", "|---|---|---|---|", *rows, ""]
    )


def _default(field: dataclasses.Field) -> str:
    return _as_yaml(field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default)


def _as_yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _presets() -> str:
    keys = sorted({key for preset in PRESETS.values() for key, _ in flatten(preset)})
    rows = []
    for key in keys:
        values = [dict(flatten(preset)).get(key, "") for preset in PRESETS.values()]
        rows.append(f"| `{key}` | " + " | ".join(map(_as_yaml, values)) + " |")
    names = " | ".join(PRESETS)
    text = (
        "## Presets\n\nWhat `preset` sets; empty is the default above. `card_megatron/config/presets.py` marks the\n"
        "values that are ours where the paper is silent.\n\n"
    )
    return text + "\n".join([f"| field | {names} |", "|---" * (len(PRESETS) + 1) + "|", *rows, ""])


if __name__ == "__main__":
    print(document(), end="")
