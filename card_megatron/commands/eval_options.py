"""What the commands of `card eval` share: how a model is opened, NAME=PATH, a bar with the time that is left."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from card_megatron.config.errors import ConfigError


def add_model_options(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("model")
    where.add_argument("--tensor", type=int, default=1, help="ranks that share each matrix (default: 1)")
    where.add_argument("--pipeline", type=int, default=1, help="ranks that share the layers (default: 1)")
    where.add_argument("--ema", action="store_true", help="the averaged weights")
    where.add_argument("--dtype", choices=["fp32", "bf16"], help="of the computation; none: fp32 on a CPU")
    where.add_argument("--tokenizer", help="where the tokenizer is, if not where the run had it")


def model_options(options: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of open_model()."""
    return {name: getattr(options, name) for name in ("tensor", "pipeline", "ema", "dtype", "tokenizer")}


def add_nproc(parser: argparse.ArgumentParser) -> None:
    from card_megatron.config.load import rank_count

    parser.add_argument("--nproc", type=rank_count, default=1, help="start this many ranks on this machine")


def become_ranks(options: argparse.Namespace, kind: str, arguments: Sequence[str]) -> None:
    """With --nproc, and not under a launcher already: start the ranks, and not return."""
    from card_megatron.commands.train import start_local_ranks
    from card_megatron.platform import ranks_from_environment

    if options.nproc > 1 and ranks_from_environment().world_size == 1:
        start_local_ranks(options.nproc, [kind, *arguments], command="eval")


def named_paths(entries: Sequence[str], option: str = "--data") -> dict[str, Path]:
    """NAME=PATH entries; a path alone is named by its file."""
    found: dict[str, Path] = {}
    for entry in entries:
        name, equals, path = entry.partition("=")
        name, path = (name, path) if equals else (Path(entry).name.partition(".")[0], entry)
        if not name or not path:
            raise ConfigError(f"{option} {entry!r} is not NAME=PATH, such as wikitext=wiki.test.raw")
        if name in found:
            raise ConfigError(f"{option} names {name} twice: {found[name]} and {path}; give each a name of its own")
        found[name] = Path(path)
    return found


def at_least(least: int) -> Callable[[str], int]:
    def whole_number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return whole_number


@contextlib.contextmanager
def bar(what: str, *, shown: bool, unit: str = "B") -> Iterator[Callable[[int, int], None]]:
    """A bar with the time that is left, on a terminal: told (done, total). It goes when it is done."""
    from tqdm import tqdm

    with tqdm(desc=what, unit=unit, unit_scale=True, disable=None if shown else True, leave=False) as progress:

        def told(done: int, total: int) -> None:
            progress.total = total
            progress.update(done - progress.n)

        yield told
