"""A layout into a user's YAML file: its values change, everything else stays as it was written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import yaml

from card_megatron.config.errors import ConfigError


def edited(text: str, changes: dict[str, Any]) -> str:
    """A YAML document with `section.key` set to new values; comments, order and line ends stay."""
    try:
        for key, value in changes.items():
            section, name = key.split(".")
            text = _set(text, section, name, _scalar(value))
        yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{', '.join(changes)} cannot be set in this file; write the section in block style, one field a line"
        ) from error
    return text


def _set(text: str, section: str, name: str, value: str) -> str:
    root = yaml.compose(text, yaml.SafeLoader)
    sections = {key.value: node for key, node in root.value} if root is not None else {}
    line = "\r\n" if "\r\n" in text else "\n"
    if f"{section}.{name}" in sections:  # a dotted key, without a section
        old = sections[f"{section}.{name}"]
        return text[: old.start_mark.index] + value + text[old.end_mark.index :]
    if isinstance(root, yaml.MappingNode) and root.flow_style and section not in sections:
        raise ConfigError(
            f"{section}.{name} has no place in braces; write the section in block style, one field a line"
        )
    if section not in sections:
        return f"{text}{'' if text.endswith(line) or not text else line}{section}:{line}  {name}: {value}{line}"
    node = sections[section]
    if not isinstance(node, yaml.MappingNode) or not node.value:
        raise ConfigError(f"the section {section} holds no fields; write one below it, such as {name}: {value}")
    for key, old in node.value:
        if key.value == name:
            return text[: old.start_mark.index] + value + text[old.end_mark.index :]
    if node.flow_style:
        end = node.end_mark.index - 1
        return f"{text[:end].rstrip()}, {name}: {value}{text[end:]}"
    first = node.value[0][0].start_mark
    start = first.index - first.column
    return f"{text[:start]}{' ' * first.column}{name}: {value}{line}{text[start:]}"


def _scalar(value: Any) -> str:
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else str(value)


def read_file(path: Path) -> str:
    """The text with its own line ends."""
    with path.open(encoding="utf-8", newline="") as file:
        return file.read()


def replace_file(path: Path, text: str) -> None:
    """The whole new file or the whole old one, whatever happens in between; links and permissions stay."""
    path = path.resolve()
    descriptor, unfinished = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(unfinished).chmod(path.stat().st_mode)
        Path(unfinished).replace(path)
    except BaseException:
        Path(unfinished).unlink(missing_ok=True)
        raise
