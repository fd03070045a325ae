"""`card eval generation`: Gen PPL, speed and repetition of decoding strategies, in one table and picture."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from card_megatron.commands.eval_options import add_model_options, add_nproc, at_least, bar, become_ranks, model_options
from card_megatron.config.errors import ConfigError

if TYPE_CHECKING:
    from card_megatron.decoding.model import OpenModel
    from card_megatron.decoding.text import Generation
    from card_megatron.evaluation.generation import Written

DESCRIPTION = """Continue prompts by several decoding strategies. Gen PPL is the perplexity that other models (--scorer,
Hugging Face folders) give the continuations behind their prompts, each in its own tokens; the text is tokenised anew.
distinct-n is the share of different n-grams of all generated tokens, repetition-4 the share of a text's 4-grams that
stood earlier in it: a text that loops has a low perplexity, and a high repetition."""
DEFAULT = [
    "ar",
    "confidence:K=16,tau=0.9,T=16",
    "confidence:K=16,tau=0.9,T=8",
    "confidence:K=32,tau=0.9,T=8",
    "verify:K=8",
]
DIFFUSION = ["denoise"]
"""The default where the model is one of masked diffusion: one token a pass."""


def run(arguments: Sequence[str]) -> None:
    options = parser().parse_args(list(arguments))
    from card_megatron.decoding.model import open_model
    from card_megatron.evaluation.generation import fit_prompts, read_prompts
    from card_megatron.evaluation.report import refuse_no_matplotlib
    from card_megatron.objectives import OBJECTIVES

    if options.output is not None and options.plot:
        refuse_no_matplotlib()
    if options.strategies:
        strategies_of(options, options.strategies)  # refuses bad ones before a model is loaded
    prompts = read_prompts(options.prompts, options.samples)
    for folder in options.scorer:
        if not (folder / "config.json").is_file():
            raise ConfigError(f"--scorer {folder} has no config.json: give a Hugging Face folder")
    become_ranks(options, "generation", arguments)
    with open_model(options.model, **model_options(options)) as model:
        causal = OBJECTIVES[model.objective].attention == "causal"
        strategies = strategies_of(options, options.strategies or (DEFAULT if causal else DIFFUSION))
        strategies = {name: strategy.fitting(model.objective) for name, strategy in strategies.items()}
        if model.speaks and model.objective == "arm" and set(strategies) != {"ar"}:
            print(f"{model.path} was trained as arm, which knows no [MASK]: strategies other than ar have no meaning")
        fitted, cut = fit_prompts(model, prompts, options.max_new_tokens)
        if cut and model.speaks:
            print(f"{cut} of {len(prompts)} prompts were too long for the model's positions and lost words on the left")
        written = [write(model, fitted, name, strategy) for name, strategy in strategies.items()]
        rows = judge(model, options.scorer, written)
        if model.speaks:
            report(options, model, rows, written, cut)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="card eval generation", description=DESCRIPTION)
    made.add_argument("model", type=Path, metavar="MODEL", help="run directory, checkpoint or exported folder")
    made.add_argument(
        "--prompts", type=Path, required=True, metavar="FILE.jsonl", help='a {"context": ...} or {"text": ...} a line'
    )
    made.add_argument(
        "--scorer", type=Path, nargs="+", action="extend", default=[], metavar="HF_FOLDER", help="models that judge"
    )
    made.add_argument(
        "--strategies",
        nargs="+",
        help="ar, confidence:K=…,tau=…,T=…,commit=…,min_fill=…, verify:K=…,adaptive=…; mdlm and bd3lm: "
        f"denoise:K=…,T=…,order=… (default: {' '.join(DEFAULT)}; or {' '.join(DIFFUSION)})",
    )
    made.add_argument("--samples", type=at_least(1), help="prompts, the first of the file (default: all)")
    made.add_argument("--max-new-tokens", type=at_least(1), default=128, help="longest continuation (default: 128)")
    made.add_argument("--batch-size", type=at_least(1), default=128, help="texts side by side (default: 128)")
    made.add_argument("--temperature", type=float, default=0.0, help="0 takes the best token (default: 0)")
    made.add_argument("--top-k", type=int, default=0, help="keep the k best tokens; 0 keeps all (default: 0)")
    made.add_argument("--top-p", type=float, default=1.0, help="keep the best up to this probability (default: 1)")
    made.add_argument("--seed", type=int, default=0, help="of the first prompt; the next has the next (default: 0)")
    made.add_argument(
        "--output", type=Path, metavar="DIR", help="write generation.json, .md, .png and samples.jsonl there"
    )
    made.add_argument("--plot", action=argparse.BooleanOptionalAction, default=True, help="also draw (default: yes)")
    add_nproc(made)
    add_model_options(made)
    return made


def strategies_of(options: argparse.Namespace, texts: list[str]) -> dict[str, Generation]:
    from card_megatron.decoding.sampling import SamplingParams
    from card_megatron.decoding.text import Generation
    from card_megatron.evaluation.generation import parse_strategy

    try:
        sampling = SamplingParams(options.temperature, options.top_k, options.top_p, seed=options.seed)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    base = Generation(max_new_tokens=options.max_new_tokens, batch_size=options.batch_size, sampling=sampling)
    return {text: parse_strategy(text, base) for text in texts}


def write(model: OpenModel, prompts: list[str], name: str, strategy: Generation) -> Written:
    """The texts of one strategy, after a short start that is not timed: a first pass makes room and packs weights."""
    from card_megatron.evaluation.generation import write_texts

    write_texts(
        model, prompts[: model.replicas], name, replace(strategy, max_new_tokens=min(4, strategy.max_new_tokens))
    )
    written = write_texts(model, prompts, name, strategy)
    if model.speaks:
        facts = written.facts
        print(f"{name}: {facts['tokens']:,} tokens in {facts['seconds']:.1f} s", flush=True)
    return written


def judge(model: OpenModel, folders: list[Path], written: list[Written]) -> list[dict[str, Any]]:
    """One row a strategy; judges are loaded one after the other, so that only one needs memory."""
    from card_megatron.evaluation.generation import gen_perplexity, judge_all, mean_perplexity
    from card_megatron.evaluation.judge import Judge
    from card_megatron.platform.ranks import gpu_of, ranks_from_environment

    rows = [{"strategy": one.strategy, **one.facts, "judges": {}} for one in written]
    for folder in folders:
        judging = Judge(folder, gpu=gpu_of(ranks_from_environment()))
        for row, one in zip(rows, written, strict=True):
            with bar(f"{folder.name} on {one.strategy}", shown=model.speaks, unit=" texts") as progress:
                row["judges"][str(folder)] = gen_perplexity(judge_all(model, judging, one, progress))
        del judging
    for row in rows:
        row["gen_perplexity"] = mean_perplexity(row["judges"])
    return rows


def report(
    options: argparse.Namespace, model: OpenModel, rows: list[dict[str, Any]], written: list[Written], cut: int
) -> None:
    from card_megatron.evaluation.generation import draw, results_table
    from card_megatron.evaluation.report import write_json, write_text

    table = results_table(rows)
    print(table, end="")
    folder = options.output
    if folder is None:
        return
    settings = {
        name: getattr(options, name) for name in ("max_new_tokens", "batch_size", "temperature", "top_k", "top_p")
    }
    settings |= {"seed": options.seed, "prompts": str(options.prompts), "samples": len(written[0].prompts)}
    write_json(
        folder / "generation.json",
        {
            "kind": "generation",
            "model": str(options.model),
            "model_path": str(model.path),
            "objective": model.objective,
            "settings": settings,
            "prompts_cut": cut,
            "results": rows,
        },
    )
    write_text(folder / "generation.md", table)
    lines = (
        json.dumps({"strategy": one.strategy, "prompt": prompt, "text": text}, ensure_ascii=False)
        for one in written
        for prompt, text in zip(one.prompts, one.texts, strict=True)
    )
    write_text(folder / "samples.jsonl", "".join(f"{line}\n" for line in lines))
    if options.plot and rows[0]["judges"]:
        draw(folder / "generation.png", rows, f"{model.path.name}: speed and Gen PPL")
    print(f"{folder}: generation.json, generation.md, samples.jsonl" + ", generation.png" * bool(options.plot))
