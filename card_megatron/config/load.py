"""From a YAML file, a preset and `--section.key value` to a RunConfig: defaults < preset < file < command line."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Optional

import yaml
from jsonargparse import ArgumentParser, Namespace, set_parsing_settings

from card_megatron.config.errors import ConfigError
from card_megatron.config.keys import describe_type, flatten, leaf_types, refuse_unknown
from card_megatron.config.presets import PRESETS
from card_megatron.config.schema import RunConfig

set_parsing_settings(docstring_parse_attribute_docstrings=True)


def config_parser(prog: str, description: str) -> ArgumentParser:
    """A parser whose options are the fields of RunConfig, with their docstrings as help."""
    parser = ArgumentParser(
        prog=prog,
        description=description,
        exit_on_error=False,
        default_env=False,
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--config", action="config", help="YAML file with any of the fields below.")
    parser.add_class_arguments(RunConfig, None)
    return parser


def load_config(arguments: Sequence[str], parser: Optional[ArgumentParser] = None) -> tuple[RunConfig, Namespace]:
    """Parse a command line; returns the run and everything parsed (for options that a command added)."""
    parser = parser or config_parser("card", "A run's configuration.")
    arguments = [_as_yaml(key, value) for key, value in _pairs(arguments)]
    own_options = _own_options(parser)
    _refuse_unknown_options(arguments, own_options)
    file_fields = _read_files(arguments)
    for key in file_fields:
        refuse_unknown(key)
    preset = _option(arguments, "preset") or file_fields.get("preset")
    if preset is not None:
        if preset not in PRESETS:
            raise ConfigError(f"preset={preset} is unknown; choose from {', '.join(PRESETS)}")
        parser.set_defaults(dict(flatten(PRESETS[preset])))
    try:
        parsed = parser.parse_args(list(arguments))
    except (argparse.ArgumentError, SystemExit, ValueError, TypeError) as error:
        if isinstance(error, SystemExit) and not error.code:
            raise
        raise ConfigError(_readable(error)) from error
    return _instantiate(parser, parsed), parsed


def dump_yaml(config: RunConfig) -> str:
    """The resolved tree, as a file that `--config` reads back."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, width=110)


def _instantiate(parser: ArgumentParser, parsed: Namespace) -> RunConfig:
    built = parser.instantiate(parsed)
    return RunConfig(**{field.name: built[field.name] for field in dataclasses.fields(RunConfig)})


def _own_options(parser: ArgumentParser) -> set[str]:
    """Options of the command itself, such as --nproc, that are not fields of the run."""
    return {
        option.removeprefix("--")
        for action in parser._actions
        for option in action.option_strings
        if option.startswith("--")
    }


def _pairs(arguments: Sequence[str]) -> Iterator[tuple[str, Optional[str]]]:
    """(option, value) of a command line in either spelling; a value of None where none follows."""
    position = 0
    while position < len(arguments):
        option, equals, value = arguments[position].partition("=")
        position += 1
        if not option.startswith("--") or equals:
            yield option, value if equals else None
        elif position < len(arguments) and not arguments[position].startswith("--"):
            yield option, arguments[position]
            position += 1
        else:
            yield option, None


def _as_yaml(option: str, value: Optional[str]) -> str:
    """One word `--key=value`, where `inf` is a number and a lone word is a list of one if the field is a list."""
    if value is None:
        return option
    hint = leaf_types().get(option.removeprefix("--"))
    if hint is float and value in ("inf", "+inf"):
        value = ".inf"
    elif typing.get_origin(hint) is list and not value.startswith("["):
        value = json.dumps([value])
    return f"{option}={value}"


def _refuse_unknown_options(arguments: Sequence[str], own_options: set[str]) -> None:
    for argument in arguments:
        if not argument.startswith("-"):
            raise ConfigError(f"{argument!r} belongs to no option; fields are given as --section.key value")
        if argument.startswith("--"):
            refuse_unknown(argument[2:].partition("=")[0], also=own_options)


def _option(arguments: Sequence[str], name: str) -> Optional[str]:
    """The last value given to --name."""
    values = [argument.partition("=")[2] for argument in arguments if argument.startswith(f"--{name}=")]
    return values[-1] if values else None


def _read_files(arguments: Sequence[str]) -> dict[str, Any]:
    """The dotted fields of the --config file, so that unknown ones are named before anything is parsed."""
    path = _option(arguments, "config")
    if path is None:
        return {}
    if not Path(path).is_file():
        raise ConfigError(f"--config {path}: no such file; examples/configs/ has ready ones")
    try:
        tree = yaml.safe_load(Path(path).read_text()) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path} is not valid YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"--config {path} holds a {type(tree).__name__}; it must map section names to fields")
    fields = dict(flatten(tree))
    for key, value in fields.items():
        if value == "inf" and leaf_types().get(key) is float:
            raise ConfigError(f"--config {path}: {key}: inf is a word in YAML; write .inf")
    return fields


def _readable(error: BaseException) -> str:
    """Value and rule, without jsonargparse's vocabulary of parsers, unions and subtypes."""
    text = " ".join((error.message if isinstance(error, argparse.ArgumentError) else str(error)).split())
    key = re.search(r'key "([\w.]+)"', text)
    value = re.search(r"Given value: (.+?)(?= Given value type|$)", text) or re.search(r"Got value: (.+?)(?= - |$)", text)
    if key and value and key[1] in leaf_types():
        return f"{key[1]}={value[1]} is not {describe_type(leaf_types()[key[1]])}"
    return text
