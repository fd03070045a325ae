"""`card eval denoising`: the nll of text behind masks, by depth."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from card_megatron.commands.eval_options import (
    add_model_options,
    add_nproc,
    at_least,
    bar,
    become_ranks,
    model_options,
    named_paths,
)
from card_megatron.config.errors import ConfigError

DESCRIPTION = """How well causal models (card, arm) predict through [MASK]: the nll of the true token behind a clean
context and 0, 1, 2, ... masks, which is what decoding feeds when it drafts a block. Nothing is generated. Depth 0 is
the exact likelihood of the next token. A set is NAME=PATH, as in `card eval perplexity`; standard errors are
over windows."""


def run(arguments: Sequence[str]) -> None:
    options = parser().parse_args(list(arguments))
    from card_megatron.decoding.model import open_model
    from card_megatron.evaluation.denoising import measure, table_rows
    from card_megatron.evaluation.report import markdown_table, write_json, write_text
    from card_megatron.evaluation.texts import read_set

    if options.output is not None and options.output.suffix != ".json":
        raise ConfigError(f"--output {options.output} must end in .json; a table is written beside it")
    sets = [read_set(name, path, options.limit) for name, path in named_paths(options.data).items()]
    become_ranks(options, "denoising", arguments)
    results, speaks = [], False
    settings = {name: getattr(options, name) for name in ("depth", "samples", "window")}
    for path in options.models:
        with open_model(path, **model_options(options)) as model:
            speaks = model.speaks
            for texts in sets:
                with bar(f"{model.path.name} on {texts.name}", shown=speaks, unit=" windows") as progress:
                    found = measure(model, texts, **settings, progress=progress).record()
                results.append({"model": path, "model_path": str(model.path), "objective": model.objective, **found})
    if not speaks:
        return
    table = markdown_table(*table_rows(results), left=2)
    print(table, end="")
    if options.output is not None:
        write_json(options.output, {"kind": "denoising", "results": results})
        write_text(options.output.with_suffix(".md"), table)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="card eval denoising", description=DESCRIPTION)
    made.add_argument("models", nargs="+", metavar="MODEL", help="run directory, checkpoint or exported folder")
    made.add_argument("--data", nargs="+", action="extend", required=True, metavar="NAME=PATH", help="sets to score")
    made.add_argument("--depth", type=at_least(1), default=8, help="hidden tokens behind a context (default: 8)")
    made.add_argument("--samples", type=at_least(1), default=1000, help="windows of each set (default: 1000)")
    made.add_argument("--window", type=at_least(2), help="context and hidden tokens (default: all positions)")
    made.add_argument("--limit", type=at_least(1), help="documents of each set (default: all)")
    made.add_argument("--output", type=Path, metavar="OUT.json", help="write results here, and a table beside it")
    add_nproc(made)
    add_model_options(made)
    return made
