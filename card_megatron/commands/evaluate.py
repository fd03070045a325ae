"""`card eval`: tasks of the harness, unless the first word names another kind of evaluation."""

from __future__ import annotations

import importlib
import textwrap
from collections.abc import Sequence

TASKS = "card_megatron.commands.eval_tasks:run"
KINDS = {
    "perplexity": ("card_megatron.commands.eval_perplexity:run", "token, word and byte perplexity of texts"),
    "denoising": ("card_megatron.commands.eval_denoising:run", "nll of text behind masks, by depth"),
    "generation": ("card_megatron.commands.eval_generation:run", "Gen PPL, speed and repetition of decoders"),
    "compare": ("card_megatron.commands.eval_compare:run", "runs and evaluations in one table, and their curves"),
    "watch": ("card_megatron.commands.eval_watch:run", "a run's checkpoints as they appear"),
    "lm_eval": ("card_megatron.evaluation.lm_eval_main:main", "the harness's own command line, with the model `card`"),
}
"""Name -> (module:function that takes the arguments behind it, what it does)."""


def run(arguments: Sequence[str]) -> None:
    kind, *rest = [*arguments] or ["--help"]
    if kind in KINDS:
        call(KINDS[kind][0], rest)
        return
    try:
        call(TASKS, arguments or ["--help"])
    except SystemExit as end:
        if kind in ("-h", "--help") and not end.code:
            print("\nother evaluations: `card eval KIND --help`")
            print(textwrap.indent("\n".join(f"{name}: {about}" for name, (_, about) in KINDS.items()), "  "))
        raise


def call(target: str, arguments: Sequence[str]) -> None:
    module, _, function = target.partition(":")
    getattr(importlib.import_module(module), function)(list(arguments))
