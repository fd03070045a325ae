"""From a YAML file, a preset and `--section.key value` to a RunConfig: defaults < preset < file < command line."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Optional

import yaml
from jsonargparse import ArgumentParser, Namespace, set_parsing_settings

from card_megatron.config.errors import ConfigError
from card_megatron.config.keys import ALIASES, describe_type, flatten, is_section, leaf_types, nest, refuse_unknown
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
    for action in parser._actions:
        if is_section(action.dest):
            action.help = argparse.SUPPRESS  # jsonargparse's --model FILE: --config does that for all sections
    return parser


def load_config(arguments: Sequence[str], parser: Optional[ArgumentParser] = None) -> tuple[RunConfig, Namespace]:
    """Parse a command line; returns the run and everything parsed (for options that a command added)."""
    parser = parser or config_parser("card", "A run's configuration.")
    arguments = [_as_yaml(key, value) for key, value in option_pairs(arguments)]
    _refuse_unknown_options(arguments, _own_options(parser))
    # files first, wherever they were given: jsonargparse lets the later one win
    arguments.sort(key=lambda argument: not argument.startswith("--config="))
    file_fields: dict[str, Any] = {}
    for number, path in enumerate(_values(arguments, "config")):
        tree, fields = _read_file(path)
        file_fields |= fields
        if nest(fields) != tree:  # it has aliases, which jsonargparse does not know: it gets the contents instead
            arguments[number] = f"--config={yaml.safe_dump(nest(fields), default_flow_style=True, width=math.inf)}"
    preset = [file_fields.get("preset"), *_values(arguments, "preset")][-1]
    if preset not in (None, "null"):
        if preset not in list(PRESETS):
            raise ConfigError(f"preset={preset} is unknown; choose from {', '.join(PRESETS)}")
        parser.set_defaults(dict(flatten(PRESETS[preset])))
    try:
        parsed = parser.parse_args(list(arguments))
    except (argparse.ArgumentError, SystemExit, ValueError, TypeError) as error:
        if isinstance(error, SystemExit) and not error.code:
            raise
        raise ConfigError(_readable(error)) from error
    return _instantiate(parser, parsed), parsed


def rank_count(value: str | int) -> int:
    """The type of --nproc; jsonargparse also asks it about a value that is an integer already."""
    if not str(value).isdecimal() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"{value!r} is not a number of ranks; give 1 or more")
    return int(value)


def dump_yaml(config: RunConfig) -> str:
    """The resolved tree, as a file that `--config` reads back."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, width=110)


def config_from_tree(tree: dict[str, Any]) -> RunConfig:
    """A RunConfig from what `dataclasses.asdict` made of one; fields that it does not have yet take their default."""
    fields = dict(flatten(tree))
    for key in fields:
        refuse_unknown(key)
    hints = typing.get_type_hints(RunConfig)
    return RunConfig(
        **{name: hints[name](**value) if is_section(name) else value for name, value in nest(fields).items()},
    )


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


def options_of(fields: dict[str, Any]) -> list[str]:
    """{section.key: value} as options of a command line: what load_config() reads."""
    return [f"--{key}={_option_text(value)}" for key, value in fields.items()]


def _option_text(value: Any) -> str:
    if isinstance(value, (list, dict)) or value is None or isinstance(value, bool):
        return json.dumps(value)  # which is YAML too
    return str(value)


def option_pairs(arguments: Sequence[str]) -> Iterator[tuple[str, Optional[str]]]:
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
    key = option.removeprefix("--")
    option = f"--{ALIASES.get(key, key)}" if option.startswith("--") else option
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
            key = argument[2:].partition("=")[0]
            refuse_unknown(key, also=own_options)
            if is_section(key):
                raise ConfigError(f"--{key} is a section; give its fields, such as --{_field_of(key)} value")


def _values(arguments: Sequence[str], name: str) -> list[str]:
    """All values given to --name."""
    return [argument.partition("=")[2] for argument in arguments if argument.startswith(f"--{name}=")]


def _field_of(section: str) -> str:
    return next(leaf for leaf in leaf_types() if leaf.startswith(section + "."))


class StrictLoader(yaml.SafeLoader):
    """Refuses a key that is given twice, of which YAML would silently keep the last."""

    def construct_mapping(self, node, deep=False):
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _read_file(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A --config file's tree and dotted fields; says plainly what jsonargparse would take silently or garble."""
    if not Path(path).is_file():
        raise ConfigError(f"--config {path}: no such file; examples/configs/ has ready ones")
    try:
        tree = yaml.load(Path(path).read_text(encoding="utf-8"), StrictLoader)
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"--config {path} is not valid YAML: {error}") from error
    if not isinstance(tree, dict) or not tree:
        held = f"a {type(tree).__name__}" if tree else "nothing"
        raise ConfigError(f"--config {path} holds {held}; it must map section names to fields")
    fields: dict[str, Any] = {}
    for key, value in flatten(tree):
        refuse_unknown(key)
        if key in fields:
            raise ConfigError(f"--config {path}: {key} is given twice, under two of its names")
        fields[key] = value
        hint = leaf_types().get(key)
        if is_section(key):
            held = "null" if value is None else value
            raise ConfigError(f"--config {path}: {key}={held} is a section; give its fields, such as {_field_of(key)}")
        if value is None and type(None) not in typing.get_args(hint):
            raise ConfigError(f"--config {path}: {key}=null is not {describe_type(hint)}")
        if value == "inf" and hint is float:
            raise ConfigError(f"--config {path}: {key}: inf is a word in YAML; write .inf")
    return tree, fields


def _readable(error: BaseException) -> str:
    """Value and rule, without jsonargparse's vocabulary of parsers, unions and subtypes."""
    text = " ".join((error.message if isinstance(error, argparse.ArgumentError) else str(error)).split())
    key = re.search(r'key "([\w.]+)"', text)
    value = re.search(r"Given value:(.*?)(?= Given value type|$)", text) or re.search(r"Got value:(.*?)(?= - |$)", text)
    if key and value and key[1] in leaf_types():
        return f"{key[1]}={value[1].strip()} is not {describe_type(leaf_types()[key[1]])}"
    return text.removeprefix(f'Parser key "{key[1]}": ') if key else text
