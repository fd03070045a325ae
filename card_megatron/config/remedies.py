"""How to install what is missing: card_megatron is on no package index, so its extras come from the checkout."""

from __future__ import annotations

INSTALL_ENGINE = "pip install --no-build-isolation 'transformer-engine[core_cu13,pytorch]==2.11.0'"
"""docs/installation.md says what it takes."""
