"""docs/configuration.md is made from the dataclasses, and every field has something to say there."""

from __future__ import annotations

import dataclasses
import re
import typing
from pathlib import Path

import pytest

from card_megatron.config import schema
from card_megatron.config.document import document, field_docs
from card_megatron.config.keys import leaf_types
from card_megatron.config.presets import PRESETS

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
KINDS = [kind for kind in vars(schema).values() if dataclasses.is_dataclass(kind)]


def test_the_page_is_what_the_dataclasses_say():
    assert PAGE.read_text() == document(), "run `make docs`"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_class_and_field_is_explained(kind):
    assert kind.__doc__ and not kind.__doc__.startswith(f"{kind.__name__}("), "a dataclass without its own docstring"
    docs = field_docs(kind)
    for field in dataclasses.fields(kind):
        assert docs.get(field.name, "").endswith("."), f"{kind.__name__}.{field.name} has no docstring, or half of one"


def test_every_section_is_of_a_class_that_explains_itself():
    sections = [hint for hint in typing.get_type_hints(schema.RunConfig).values() if dataclasses.is_dataclass(hint)]
    assert {schema.RunConfig, *sections} == set(KINDS)


def test_every_field_has_a_row_and_every_row_its_cells():
    page = document()
    for key in leaf_types():
        assert page.count(f"\n| `{key}` | ") in (1, 2), key  # the second: the table of presets
    for line in page.splitlines():
        if line.startswith("| "):
            cells = len(re.findall(r"(?<!\\)\|", line)) - 1
            assert cells in (4, len(PRESETS) + 1), line
