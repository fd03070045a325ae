"""Which machine this is: the CPU platform for Megatron-Core, capabilities, process groups."""

from card_megatron.platform.capabilities import Capabilities, capabilities
from card_megatron.platform.cpu import install
from card_megatron.platform.groups import join_model_parallel, model_parallel
from card_megatron.platform.ranks import Ranks, init_process_group, ranks_from_environment

__all__ = [
    "Capabilities",
    "Ranks",
    "capabilities",
    "init_process_group",
    "install",
    "join_model_parallel",
    "model_parallel",
    "ranks_from_environment",
]
