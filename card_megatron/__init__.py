"""CARD (causal autoregressive diffusion) pretraining on unmodified Megatron-Core.

Importing this package starts nothing and patches nothing: the entry points choose the platform.
"""

from card_megatron.version import __version__

__all__ = ["__version__"]
