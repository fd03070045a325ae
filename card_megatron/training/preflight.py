"""All that can be refused or resolved before any process group exists."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field, replace
from typing import Any

from card_megatron.config.checks import check
from card_megatron.config.errors import ConfigError
from card_megatron.config.machine_checks import refuse_machine
from card_megatron.config.remedies import INSTALL_ENGINE
from card_megatron.config.schema import RunConfig
from card_megatron.data.preprocess import refuse_unusable
from card_megatron.data.tokenizers import MockTokenizer, Tokenizer, load_tokenizer
from card_megatron.launchers import refuse_missing_gpus
from card_megatron.platform import Capabilities, Ranks, capabilities, install


@dataclass
class Plan:
    """A configuration that passed every check, with what it was resolved against."""

    config: RunConfig
    ranks: Ranks
    tokenizer: Tokenizer
    transformer_config: Any
    notes: list[str] = field(default_factory=list)
    """What could not be checked, for the log."""


def preflight(config: RunConfig, ranks: Ranks, *, with_data: bool = True) -> Plan:
    """Check a run against this machine, this many ranks and its files; raises ConfigError with every broken rule."""
    machine = capabilities()  # looked at before install(), which answers for CUDA
    refuse_missing_gpus(machine.cuda)
    refuse_machine(config, machine)  # before Megatron is imported: some of it crashes there
    _refuse_broken_engine(machine)
    install()
    from card_megatron.model.transformer_config import build_transformer_config

    config, tokenizer = resolve_vocabulary(config)
    check(
        config,
        world_size=ranks.world_size,
        cuda=machine.cuda,
        transformer_engine=machine.transformer_engine is not None,
    )
    assert tokenizer is not None, "check() demands a tokenizer or mock data"
    notes = refuse_unusable(config.data, tokenizer) if with_data else []
    return Plan(config, ranks, tokenizer, build_transformer_config(config), notes)


def _refuse_broken_engine(machine: Capabilities) -> None:
    """Raise where Transformer Engine is whole but does not load: built for another torch, CUDA or libc."""
    if not (machine.cuda and machine.transformer_engine):
        return
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"Transformer Engine {machine.transformer_engine} is installed but does not load ({error}): it was built "
            f"for another torch or CUDA; build it again: {INSTALL_ENGINE} --force-reinstall --no-deps --no-cache-dir"
        ) from error


def resolve_vocabulary(config: RunConfig) -> tuple[RunConfig, Tokenizer | None]:
    """The tokenizer, and the configuration with its vocabulary size; no tokenizer where none is configured."""
    if config.data.mock:
        return config, MockTokenizer(config.model.vocab_size) if config.model.vocab_size else None
    if config.data.tokenizer is None:
        return config, None
    tokenizer = load_tokenizer(config.data.tokenizer)
    vocab_size = config.model.vocab_size or tokenizer.vocab_size
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"model.vocab_size={vocab_size} is smaller than the {tokenizer.vocab_size} pieces of "
            f"{config.data.tokenizer}; raise it, or set it to null to take the tokenizer's"
        )
    return replace(config, model=replace(config.model, vocab_size=vocab_size)), tokenizer
