"""The typed tree of a run: fields that explain themselves, presets, loading, checks that name the remedy."""

from card_megatron.config.checks import check
from card_megatron.config.errors import ConfigError
from card_megatron.config.load import config_parser, dump_yaml, load_config
from card_megatron.config.schema import RunConfig

__all__ = ["ConfigError", "RunConfig", "check", "config_parser", "dump_yaml", "load_config"]
