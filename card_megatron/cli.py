"""`card COMMAND`: one dict from command to function; nothing else."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from card_megatron.config.errors import CardError, RunStopped, TemporaryRefusal
from card_megatron.launchers import ranks_from_environment, tell_refusal
from card_megatron.version import __version__

COMMANDS = {
    "train": ("card_megatron.commands.train", "train a model"),
    "config": ("card_megatron.commands.config", "print a run's resolved configuration, its size and its steps"),
    "plan": ("card_megatron.commands.plan", "rank the layouts of a run by memory, speed and cost, before it runs"),
    "status": ("card_megatron.commands.status", "how a run stands: step, loss, time left, restarts, slow ranks"),
    "doctor": ("card_megatron.commands.doctor", "is this machine, or this cluster, fit for a run?"),
    "checkpoint": ("card_megatron.commands.checkpoint", "list, inspect or verify what a run has saved"),
    "convert": ("card_megatron.commands.convert", "to and from the inference format, a Hugging Face folder"),
    "generate": ("card_megatron.commands.generate", "continue prompts, several tokens a pass"),
    "eval": ("card_megatron.commands.evaluate", "tasks of the lm-evaluation-harness, perplexities, generated text"),
    "study": ("card_megatron.commands.study", "a grid of runs: train, evaluate and report it"),
    "launch": ("card_megatron.commands.launch", "train, data, convert or eval as a job of SLURM"),
    "data": ("card_megatron.commands.data", "make a corpus, a tokenizer, or .bin/.idx files"),
}
"""Command -> (module whose run(arguments) does it, what it does)."""


def usage() -> str:
    """What `card --help` prints."""
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {about}" for name, (_, about) in COMMANDS.items())
    return (
        f"card_megatron {__version__}: causal autoregressive diffusion (CARD) on Megatron-Core\n\n"
        f"usage: card COMMAND [options]\n\ncommands:\n{commands}\n\n"
        "`card COMMAND --help` lists a command's options; docs/configuration.md has every field of a run."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `card` and of `python -m card_megatron`."""
    command, *rest = [*(sys.argv[1:] if arguments is None else arguments)] or ["--help"]
    if command in ("-h", "--help", "help"):
        print(usage())
    elif command == "--version":
        print(__version__)
    elif command in COMMANDS:
        if command == "train":  # before torch is imported: a signal may come at any time after that
            from card_megatron.training import signals

            signals.install()
        try:
            importlib.import_module(COMMANDS[command][0]).run(rest)
            if command == "train":
                signals.ignore()
        except RunStopped as error:  # all ranks know: one says it
            tell_refusal(error)
            sys.exit(f"card {command}: {error}" if ranks_from_environment().rank == 0 else 1)
        except TemporaryRefusal as error:  # not told: the job's script may start it again
            sys.exit(f"card {command}: {error}")
        except CardError as error:
            tell_refusal(error)
            sys.exit(f"card {command}: {error}")
        except KeyboardInterrupt:
            sys.exit(f"card {command}: interrupted")
    else:
        sys.exit(f"card: unknown command {command!r}; choose from {', '.join(COMMANDS)}")


if __name__ == "__main__":
    main()
