"""`card config`: what a run is, before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from card_megatron.config.checks import check
from card_megatron.config.derived import (
    data_parallel_size,
    padded_vocab_size,
    parameter_count,
    pipeline_layout,
    total_samples,
    total_steps,
)
from card_megatron.config.load import config_parser, dump_yaml, load_config, rank_count
from card_megatron.config.machine_checks import refuse_machine
from card_megatron.config.schema import RunConfig
from card_megatron.data.tokenizers import BYTES
from card_megatron.platform import Capabilities, capabilities, install, ranks_from_environment
from card_megatron.platform.kernels import kernels_line, resolve_kernels
from card_megatron.platform.ranks import Ranks
from card_megatron.training.preflight import preflight, resolve_vocabulary

DESCRIPTION = """Print the resolved configuration of a run as YAML that --config reads back, with its parameter count,
global batch and tokens per step as comments. The run is checked as `card train` would check it."""

ELSEWHERE = {
    name: Capabilities(
        device=device,
        gpus=8,
        transformer_engine="2.11.0",
        apex=None,
        nccl=None,
        mpi4py=None,
        cpu_cores=1,
        compute_capability=compute,
        cuda_version=(12, 9),
    )
    for name, device, compute in (
        ("h100-80gb", "NVIDIA H100 80GB HBM3", (9, 0)),
        ("h200-141gb", "NVIDIA H200", (9, 0)),
        ("a100-80gb", "NVIDIA A100-SXM4-80GB", (8, 0)),
    )
}
"""Machines that a laptop can check a run for: card plan's GPUs, with the libraries of constraints.txt."""


def run(arguments: Sequence[str]) -> None:
    parser = config_parser("card config", DESCRIPTION)
    parser.add_argument("--nproc", type=rank_count, help="Ranks of the run; none is this process's number.")
    parser.add_argument("--gpu", choices=list(ELSEWHERE), help="Check for nodes of this GPU, not for this machine.")
    config, options = load_config(arguments, parser)
    world_size = options.nproc or ranks_from_environment().world_size
    lines = []
    if options.gpu is not None:
        config, tokenizer = (config, None) if tokenizer_is_elsewhere(config) else resolve_vocabulary(config)
        if tokenizer is None:
            lines.append(f"tokenizer: {config.data.tokenizer} is not here; its size and its [MASK] were not checked")
        lines.append(f"checked for {ELSEWHERE[options.gpu].device} with Transformer Engine, which is not this machine")
        check_without_tokenizer(config, world_size, ELSEWHERE[options.gpu])
    elif tokenizer_is_elsewhere(config):
        lines.append(f"tokenizer: {config.data.tokenizer} is not here; its size and its [MASK] were not checked")
        check_without_tokenizer(config, world_size, capabilities())
    else:
        config = preflight(config, Ranks(world_size=world_size), with_data=False).config
    print(dump_yaml(config), end="")
    print("\n".join(f"# {line}" for line in [*describe(config, world_size, ELSEWHERE.get(options.gpu)), *lines]))


def tokenizer_is_elsewhere(config: RunConfig) -> bool:
    """True on a laptop that looks at a cluster's run: the vocabulary is known without its tokenizer's file."""
    tokenizer = config.data.tokenizer
    here = tokenizer == BYTES or Path(tokenizer or "").exists()
    return bool(tokenizer and config.model.vocab_size and not config.data.mock and not here)


def check_without_tokenizer(config: RunConfig, world_size: int, machine: Capabilities) -> None:
    """All of preflight() that needs no tokenizer."""
    refuse_machine(config, machine)
    install()
    from card_megatron.model.transformer_config import build_transformer_config

    check(config, world_size=world_size, cuda=machine.cuda, transformer_engine=machine.transformer_engine is not None)
    build_transformer_config(config)


def describe(config: RunConfig, world_size: int, machine: Capabilities | None = None) -> list[str]:
    """The numbers that follow from a configuration."""
    train, parallel = config.train, config.parallel
    replicas = data_parallel_size(parallel, world_size)
    batch_tokens = train.global_batch_size * config.data.sequence_length
    micro_batches = train.global_batch_size // (train.micro_batch_size * replicas)
    layout = pipeline_layout(config.model, parallel)
    lines = [
        f"parameters: {parameter_count(config.model):,}",
        f"vocabulary: {config.model.vocab_size:,}, padded to {padded_vocab_size(config.model):,}",
        f"global batch: {train.global_batch_size:,} samples = {micro_batches} micro-batches "
        f"x {train.micro_batch_size} x {replicas} data-parallel",
        f"tokens per step: {batch_tokens:,}",
        f"run: {total_steps(config):,} steps, {total_samples(config):,} samples, "
        f"{total_samples(config) * config.data.sequence_length:,} tokens",
        f"ranks: {world_size} = tensor {parallel.tensor_model_parallel_size} x pipeline "
        f"{parallel.pipeline_model_parallel_size} x context {parallel.context_parallel_size} x data {replicas}",
    ]
    if layout is not None:
        lines.append(f"pipeline layout: {layout}")
    lines += found_here(config, machine or capabilities())
    return lines


def found_here(config: RunConfig, machine: Capabilities) -> list[str]:
    """Accelerators and libraries of a machine, and the kernels that the run would take there."""
    versions = {
        "Transformer Engine": machine.transformer_engine,
        "apex": machine.apex,
        "flash-attn": machine.flash_attention,
        "NCCL": machine.nccl,
    }
    found = ", ".join(f"{name} {version or 'none'}" for name, version in versions.items())
    devices = f"{machine.gpus} x {machine.device}" if machine.cuda else "no GPU"
    return [f"machine: {devices}; {found}", kernels_line(resolve_kernels(config, machine))]
