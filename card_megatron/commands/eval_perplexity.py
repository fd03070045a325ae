"""`card eval perplexity`: checkpoints and exported folders on sets of documents, in one table."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from card_megatron.decoding.model import OpenModel
    from card_megatron.evaluation.texts import TextSet

DESCRIPTION = """Token, word and byte perplexity of models on sets of documents. A set is NAME=PATH: a document a line
of .jsonl ("text"), a sentence a line of .tokens, a row of .parquet ("text"), or a whole file of any other ending. A
document's first token is predicted from end-of-document; a window slides over the rest. Words are what white space
separates, bytes are those of the text itself: both compare models of different tokenizers. Standard errors are over
documents. mdlm and bd3lm have no exact likelihood: theirs is a bound (ELBO, <=) by --samples noise samples of each
window, whose own standard error stands beside it. With --output a killed evaluation goes on where it was."""
PRESET = """a list of sets below --data-dir; paper: the eight domains of the paper, as wikitext/wiki.test.raw,
openwebtext/validation.jsonl, ag_news/test.jsonl, lm1b/1b_benchmark.test.tokens, ptb/ptb.test.txt, arxiv/test.jsonl,
pubmed/test.jsonl, lambada/lambada_test.jsonl; those that are missing are named"""


def run(arguments: Sequence[str]) -> None:
    options = parser().parse_args(list(arguments))
    sets, missing = read_sets(options)
    become_ranks(options, "perplexity", arguments)
    results = measure_all(options, sets, missing)
    if results is not None:
        print(results_table(results, missing), end="")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="card eval perplexity", description=DESCRIPTION)
    made.add_argument("models", nargs="+", metavar="MODEL", help="run directory, checkpoint or exported folder")
    made.add_argument("--data", nargs="+", action="extend", default=[], metavar="NAME=PATH", help="sets to score")
    made.add_argument("--preset", choices=["paper"], help=PRESET)
    made.add_argument("--data-dir", type=Path, help="folder of a --preset")
    made.add_argument("--window", type=at_least(1), help="inputs of a pass (default: all positions of the model)")
    made.add_argument("--stride", type=at_least(1), help="tokens that a window adds (default: half of the window)")
    made.add_argument(
        "--samples", type=at_least(2), default=8, help="mdlm, bd3lm: noise samples of each window (default: 8)"
    )
    made.add_argument("--seed", type=int, default=0, help="mdlm, bd3lm: of the noise (default: 0)")
    made.add_argument("--limit", type=at_least(1), help="documents of each set (default: all)")
    made.add_argument("--output", type=Path, metavar="OUT.json", help="write results here, and a table beside it")
    add_nproc(made)
    add_model_options(made)
    return made


def read_sets(options: argparse.Namespace) -> tuple[list[TextSet], dict[str, Path]]:
    """The sets that were asked for, and those of a preset that are not there."""
    from card_megatron.evaluation.texts import read_set

    paths, missing = set_paths(options)
    return [read_set(name, path, options.limit) for name, path in paths.items()], missing


def set_paths(options: argparse.Namespace) -> tuple[dict[str, Path], dict[str, Path]]:
    """Where they are."""
    from card_megatron.evaluation.texts import preset_paths

    paths = named_paths(options.data)
    missing: dict[str, Path] = {}
    if options.preset is not None:
        if options.data_dir is None:
            raise ConfigError(f"--preset {options.preset} needs --data-dir, the folder of its sets")
        there, missing = preset_paths(options.preset, options.data_dir)
        paths = there | paths
    if not paths:
        raise ConfigError("no set is given; --data NAME=PATH names one, --preset paper --data-dir DIR the paper's")
    return paths, {name: path for name, path in missing.items() if name not in paths}


def measure_all(
    options: argparse.Namespace, sets: list[TextSet], missing: dict[str, Path]
) -> list[dict[str, Any]] | None:
    """Every model on every set; on the rank that speaks. Results are on disk as soon as they are there."""
    from card_megatron.decoding.model import open_model

    known = read_known(options.output)  # by every rank, before any of them writes
    results: list[dict[str, Any]] = []
    speaks = False
    for path in options.models:
        with open_model(path, **model_options(options)) as model:
            speaks = model.speaks
            note_long_window(model, options.window)
            for texts in sets:
                key = identity(options, model, texts)
                done = next((result for result in known if result["key"] == key), None)
                if done is None:
                    done = {"objective": model.objective, "key": key, **score(options, model, texts)}
                else:
                    known.remove(done)
                results.append({"model": path, **done, "model_path": str(model.path)})
                if speaks and options.output is not None:
                    write(options.output, results, known, missing)
    if speaks and options.output is not None:
        write(options.output, results, [], missing)
    return results if speaks else None


def score(options: argparse.Namespace, model: OpenModel, texts: TextSet) -> dict[str, Any]:
    from card_megatron.evaluation.perplexity import measure

    with bar(f"{model.path.name} on {texts.name}", shown=model.speaks) as progress:
        settings = {name: getattr(options, name) for name in ("window", "stride", "samples", "seed")}
        return measure(model, texts, **settings, progress=progress).record()


def identity(options: argparse.Namespace, model: OpenModel, texts: TextSet) -> dict[str, Any]:
    """What a result depends on: one that is known is not computed again."""
    from card_megatron.evaluation.bound import has_bound
    from card_megatron.evaluation.perplexity import choose_window

    window, stride = choose_window(model, options.window, options.stride)
    files = [file.stat().st_mtime_ns for file in sorted(model.path.iterdir()) if file.is_file()]
    return {
        "model": str(model.path.resolve()),
        "files": [len(files), max(files, default=0)],
        "set": texts.name,
        "texts": texts.fingerprint(),
        "window": [window, stride],
        **({"noise": [options.samples, options.seed]} if has_bound(model) else {}),
        "weights": [options.ema, options.dtype, options.tokenizer],
    }


def note_long_window(model: OpenModel, window: int | None) -> None:
    """A model may have more positions than it was trained on: beyond them its perplexity is another thing."""
    from card_megatron.checkpoint.source import open_source
    from card_megatron.decoding.model import is_hf_folder

    if not model.speaks or is_hf_folder(model.path):
        return
    trained, used = open_source(model.path).config.data.sequence_length, window or model.backend.max_positions
    if used > trained:
        print(
            f"{model.path}: a window of {used} is longer than the {trained} tokens that it was trained on; "
            f"--window {trained} stays within them"
        )


def read_known(output: Path | None) -> list[dict[str, Any]]:
    """Results of an earlier start of the same evaluation."""
    if output is None or not output.is_file():
        return []
    try:
        found = json.loads(output.read_text("utf-8"))
        return found["results"] if found.get("kind") == "perplexity" else _refuse(output)
    except (ValueError, KeyError, AttributeError):
        return _refuse(output)


def _refuse(output: Path) -> Any:
    raise ConfigError(f"--output {output} is there and holds no perplexities; choose another name, or remove it")


def write(output: Path, results: list[dict[str, Any]], earlier: list[dict[str, Any]], missing: dict[str, Path]) -> None:
    """`earlier` results are those of a killed evaluation that this one has not come to yet."""
    from card_megatron.evaluation.report import write_json, write_text

    content = {
        "kind": "perplexity",
        "results": [*results, *earlier],
        "missing": {n: str(p) for n, p in missing.items()},
    }
    write_json(output, content)
    write_text(output.with_suffix(".md"), results_table(results, missing))


def results_table(results: list[dict[str, Any]], missing: dict[str, Path]) -> str:
    from card_megatron.evaluation.perplexity import table_rows
    from card_megatron.evaluation.report import markdown_table

    header, rows = table_rows(results)
    notes = "".join(f"missing: {name} ({path})\n" for name, path in missing.items())
    return markdown_table(header, rows, left=3) + (f"\n{notes}" if notes else "")
