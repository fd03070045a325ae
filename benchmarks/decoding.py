"""Speed and quality of decoding strategies on a trained CARD model, beside one token a pass and beside transformers.

    python benchmarks/decoding.py --corpus train.jsonl --held-out valid.jsonl [--check]

The first run trains two models (resumable): a CARD model of bytes, which decodes (decoding_model.yaml: about an hour of
one core), and an ARM model of a 1,024-piece BPE (decoding_judge.yaml: 20 minutes), which judges the texts: mean nll per
byte of a continuation, given its prompt. Without --corpus the documentation that every Python ships is the corpus.

Strategies take turns in every round on the same prompts; ratios are medians over the rounds. `best` is the fastest
setting whose texts are at most 5% worse than those of `ar`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from card_megatron.checkpoint.source import open_source
from card_megatron.convert.to_hf import to_hf
from card_megatron.data import python_docs
from card_megatron.data.preprocess import write_documents
from card_megatron.data.tokenizers import encode, tokenizer_of
from card_megatron.decoding.model import OpenModel, open_model
from card_megatron.decoding.sampling import SamplingParams
from card_megatron.decoding.text import Generation, generate
from card_megatron.platform import capabilities

BARS = {"ar / transformers, batch 32": 1.3, "best / ar, batch 1": 1.3, "verify / ar, any batch": 0.95}
WORST_NLL = 1.05
"""How much worse than `ar`'s a text may be judged to count as good."""
SETTINGS = {
    "ar": Generation(strategy="ar"),
    "verify (adaptive)": Generation(strategy="verify", drafts=8),
    "verify K=2": Generation(strategy="verify", drafts=2, adaptive=False),
    "verify K=4": Generation(strategy="verify", drafts=4, adaptive=False),
    "verify K=8": Generation(strategy="verify", drafts=8, adaptive=False),
    "verify K=1 branches": Generation(strategy="verify", drafts=1, adaptive=False, branches=True),
    "verify K=2 branches": Generation(strategy="verify", drafts=2, adaptive=False, branches=True),
    "verify K=3 branches": Generation(strategy="verify", drafts=3, adaptive=False, branches=True),
    "confidence K=4 T=2 tau=0.9": Generation(strategy="confidence", block=4, max_passes=2, tau=0.9),
    "confidence K=4 T=3 tau=0.9": Generation(strategy="confidence", block=4, max_passes=3, tau=0.9),
    "confidence K=4 T=4 tau=0.5": Generation(strategy="confidence", block=4, max_passes=4, tau=0.5),
    "confidence K=8 T=8 tau=0.7": Generation(strategy="confidence", block=8, max_passes=8, tau=0.7),
    "confidence K=8 T=8 tau=0.9": Generation(strategy="confidence", block=8, max_passes=8, tau=0.9),
    "confidence K=8 T=6 tau=0.5": Generation(strategy="confidence", block=8, max_passes=6, tau=0.5),
    "confidence K=8 T=4 tau=0.9": Generation(strategy="confidence", block=8, max_passes=4, tau=0.9),
    "confidence K=16 T=16 tau=0.9": Generation(strategy="confidence", block=16, max_passes=16, tau=0.9),
    "confidence K=16 T=8 tau=0.9": Generation(strategy="confidence", block=16, max_passes=8, tau=0.9),
    "confidence K=32 T=8 tau=0.9": Generation(strategy="confidence", block=32, max_passes=8, tau=0.9),
    "confidence K=8 tau=0.9 prefix": Generation(strategy="confidence", block=8, max_passes=8, tau=0.9, commit="prefix"),
}
PROMPT_BYTES, CONTEXT = 120, 200


@dataclass
class Measured:
    """One strategy at one batch size."""

    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    tokens_per_pass: float = 0.0
    texts: list[str] = field(default_factory=list)
    nll: float = float("nan")


# ---------------------------------------------------------------- models


def card(*arguments: object, threads: int = 1) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    subprocess.run([sys.executable, "-m", "card_megatron", *map(str, arguments)], check=True, env=environment)


def make_models(folder: Path, corpus: Path | None, held_out: Path | None) -> tuple[Path, Path, Path]:
    """(decoder, its export, judge); whatever is there already is used."""
    data = folder / "data"
    if corpus is None or held_out is None:
        corpus, held_out = data / "train.jsonl", data / "valid.jsonl"
        if not corpus.is_file():
            for path, documents in zip(
                (corpus, held_out), python_docs.train_and_validation(python_docs.python_documents()), strict=True
            ):
                write_documents(path, documents)
    bpe = data / "tokenizer.model"
    if not bpe.is_file():
        card("data", "tokenizer", "train", corpus, "--output", bpe, "--vocab-size", 1024, "--sample-lines", 200_000)
    runs = {"card_bytes": ("bytes", "_bytes", "decoding_model"), "arm": (bpe, "", "decoding_judge")}
    for name, (tokenizer, suffix, config) in runs.items():
        for source, split in ((corpus, "train"), (held_out, "valid")):
            if not (data / f"{split}{suffix}.idx").is_file():
                card("data", "build", source, "--output", data / f"{split}{suffix}", "--tokenizer", tokenizer)
        if not (folder / name / "summary.json").is_file():
            card(
                *("train", "--config", Path(__file__).parent / f"{config}.yaml", "--run_dir", folder / name),
                *("--data.tokenizer", tokenizer),
                *("--data.train", f"[{data / f'train{suffix}'}]"),
                *("--data.validation.held_out", f"[{data / f'valid{suffix}'}]"),
            )
    exported = folder / "card_bytes_hf"
    if not exported.exists():
        trained = open_source(folder / "card_bytes")
        to_hf(trained, exported, tokenizer_of(trained.config))
    return folder / "card_bytes", exported, folder / "arm"


def read_prompts(held_out: Path, count: int) -> list[str]:
    """Stretches of held-out text of different lengths, from all over it."""
    texts = [json.loads(line)["text"] for line in held_out.read_text(encoding="utf-8").splitlines()]
    prompts: list[str] = []
    for number in range(count):
        text, start = texts[number % len(texts)], 997 * (1 + number // len(texts))
        piece = text[start % max(1, len(text) - CONTEXT) :][: 20 + 41 * number % PROMPT_BYTES]
        prompts.append(piece.encode()[:CONTEXT].decode(errors="ignore") or "The")
    return prompts


# ---------------------------------------------------------------- what is measured


def run_ours(model: OpenModel, prompts: list[str], setting: Generation) -> tuple[list[str], Any]:
    made, stats = generate(model, prompts, setting)
    return [one.text for one in made], stats


def run_transformers(model: Any, tokenizer: Any, prompts: list[str], setting: Generation) -> None:
    """transformers' own generate, a batch at a time, its prompts padded on the left as it wants them."""
    for start in range(0, len(prompts), setting.batch_size):
        batch = tokenizer(prompts[start : start + setting.batch_size], return_tensors="pt", padding=True)
        sampled = dict(do_sample=True, temperature=setting.sampling.temperature, top_k=0)
        with torch.inference_mode():
            model.generate(
                **batch,
                max_new_tokens=setting.max_new_tokens,
                eos_token_id=None,
                suppress_tokens=None,  # its filter would cost time that ours does not
                pad_token_id=0,
                **(sampled if setting.sampling.temperature else dict(do_sample=False)),
            )


def measure(
    model: OpenModel, theirs: Callable[[list[str], Generation], None], prompts: list[str], options: Any, batch: int
) -> dict[str, Measured]:
    """All settings at one batch size."""
    from dataclasses import replace

    results = {name: Measured() for name in (*SETTINGS, "transformers")}
    sampling = SamplingParams(temperature=options.temperature)
    common: dict[str, Any] = dict(batch_size=batch, max_new_tokens=options.new_tokens, sampling=sampling)
    for number in range(options.rounds + 1):  # the first warms up
        for name, setting in SETTINGS.items():
            started = time.perf_counter()
            texts, stats = run_ours(model, prompts, replace(setting, **common))
            seconds = time.perf_counter() - started
            if number:
                results[name].seconds.append(seconds)
            results[name].tokens, results[name].tokens_per_pass = stats.tokens_produced, stats.tokens_per_pass
            results[name].texts = texts
        started = time.perf_counter()
        theirs(prompts, replace(SETTINGS["ar"], **common))
        if number:
            results["transformers"].seconds.append(time.perf_counter() - started)
    results["transformers"].tokens = len(prompts) * options.new_tokens
    return results


def judge(judge_path: Path, prompts: list[str], measured: list[Measured]) -> None:
    """Mean nll per byte of each strategy's texts under the ARM model."""
    from card_megatron.evaluation.scorer import Scorer

    with open_model(judge_path) as model:
        scorer = Scorer(model)
        for result in measured:
            pairs, sizes = [], []
            for prompt, text in zip(prompts, result.texts, strict=True):
                context = encode(model.tokenizer, prompt) or [model.tokenizer.eod]
                continuation = encode(model.tokenizer, text)
                if continuation:
                    pairs.append((context, continuation))
                    sizes.append(len(text.encode()))
            scores = scorer.score(pairs)
            result.nll = -sum(score.logprob for score in scores) / sum(sizes)


def lossless(paths: dict[str, Path], prompts: list[str], new_tokens: int) -> dict[str, tuple[int, int, int]]:
    """Backend and batch size -> (texts, those where greedy verify differs from ar, of them without a near tie)."""
    found = {}
    for backend, path in paths.items():
        with open_model(path) as model:
            for batch in (1, 32):
                made = [
                    generate(model, prompts, Generation(strategy=name, max_new_tokens=new_tokens, batch_size=batch))[0]
                    for name in ("ar", "verify")
                ]
                differ = [
                    one.result.near_ties + other.result.near_ties
                    for one, other in zip(*made, strict=True)
                    if one.result.tokens != other.result.tokens
                ]
                found[f"{backend}, batch {batch}"] = (len(prompts), len(differ), sum(not ties for ties in differ))
    return found


def pass_milliseconds(
    model: OpenModel, widths: tuple[int, ...] = (1, 2, 5, 9, 17), passes: int = 200
) -> dict[int, float]:
    """Median time of a pass of one text by the tokens that it forwards: what drafts cost, without what they gain."""
    model.backend.reserve(1, 256)
    found = {}
    for width in widths:
        tokens, seconds = np.ones((1, width), dtype=np.int64), []
        for _ in range(passes):
            started = time.perf_counter()
            model.backend.forward(tokens, np.array([200]), 0, None)
            seconds.append(time.perf_counter() - started)
        found[width] = 1e3 * statistics.median(seconds)
    return found


# ---------------------------------------------------------------- what is said


def median_ratio(one: list[float], other: list[float]) -> float:
    """Of speeds: how many times faster `one` was, round by round."""
    return statistics.median(b / a for a, b in zip(one, other, strict=True))


def draw(path: Path, everything: dict[int, dict[str, Measured]]) -> None:
    """Quality against speed, a line of points for each batch size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 6))
    for batch, results in everything.items():
        ar = results["ar"]
        names = [name for name in SETTINGS if name in results]
        xs = [median_ratio(results[name].seconds, ar.seconds) for name in names]
        ys = [results[name].nll for name in names]
        points = axes.scatter(xs, ys, label=f"batch {batch}")
        if batch == min(everything):
            for name, x, y in zip(names, xs, ys, strict=True):
                axes.annotate(name, (x, y), fontsize=7, xytext=(4, 3), textcoords="offset points")
            axes.axhline(ar.nll, color=points.get_facecolor()[0], linewidth=0.5)
    axes.set(xlabel="speed / ar", ylabel="nll per byte of the text under the ARM judge (lower is better)")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a figure misses its bar")
    parser.add_argument("--folder", type=Path, default=Path("build/decoding_benchmark"), help="models and the picture")
    parser.add_argument("--corpus", type=Path, help="JSON lines to train on")
    parser.add_argument("--held-out", type=Path, help="JSON lines to take prompts from")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128], help="batch sizes")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens of each text (default: 128)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds (default: 3)")
    parser.add_argument("--proof-prompts", type=int, default=200, help="prompts of the lossless proof (default: 200)")
    parser.add_argument("--passes-only", action="store_true", help="only time passes by their width")
    options = parser.parse_args()
    machine, console = capabilities(), Console()
    decoder, exported, judge_path = make_models(options.folder, options.corpus, options.held_out)
    with open_model(exported) as model:
        times = pass_milliseconds(model)
    said = ", ".join(f"{width}: {time:.2f} ms ({time / times[1]:.2f} x)" for width, time in times.items())
    console.print(f"a pass of one text, by the tokens that it forwards: {said}")
    if options.passes_only:
        return
    held_out = options.held_out or options.folder / "data" / "valid.jsonl"
    proof = lossless({"Megatron": decoder, "transformers": exported}, read_prompts(held_out, options.proof_prompts), 64)
    everything: dict[int, dict[str, Measured]] = {}
    with open_model(exported) as model:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        theirs = AutoModelForCausalLM.from_pretrained(exported).eval()
        fast = AutoTokenizer.from_pretrained(exported, padding_side="left")
        fast.pad_token = fast.pad_token or fast.eos_token
        for batch in options.batches:
            prompts = read_prompts(held_out, max(8, 2 * batch))
            everything[batch] = measure(
                model, lambda given, setting: run_transformers(theirs, fast, given, setting), prompts, options, batch
            )
    for batch, results in everything.items():
        judge(judge_path, read_prompts(held_out, max(8, 2 * batch)), [results[name] for name in SETTINGS])
    picture = options.folder / f"quality_speed_{'greedy' if not options.temperature else options.temperature}.png"
    draw(picture, everything)
    misses = report(console, machine, options, everything, proof)
    console.print(f"quality against speed: {picture}")
    if options.check and misses:
        sys.exit(1)


def report(
    console: Console, machine: Any, options: Any, everything: dict[int, dict[str, Measured]], proof: Any
) -> bool:
    """The tables and the bars; True if one was missed."""
    how = "greedy" if not options.temperature else f"temperature {options.temperature}"
    table = Table(title=f"{how}, {options.new_tokens} bytes a text, fp32, {machine.device}, {machine.cpu_cores} cores")
    for column in ("batch", "strategy", "tokens/s", "/ ar", "/ transformers", "tokens per pass", "nll per byte"):
        table.add_column(column, justify="left" if column == "strategy" else "right")
    figures: dict[str, float] = {"verify / ar, any batch": float("inf")}
    for batch, results in everything.items():
        ar, theirs = results["ar"], results["transformers"]
        for name, result in results.items():
            rate = result.tokens / statistics.median(result.seconds)
            ratio, other = median_ratio(result.seconds, ar.seconds), median_ratio(result.seconds, theirs.seconds)
            shown = "" if name == "transformers" else f"{result.tokens_per_pass:.2f}"
            nll = "" if name == "transformers" else f"{result.nll:.4f}"
            table.add_row(str(batch), name, f"{rate:,.0f}", f"{ratio:.2f}", f"{other:.2f}", shown, nll)
        table.add_section()
        good = {
            name: median_ratio(results[name].seconds, ar.seconds)
            for name in SETTINGS
            if name != "ar" and results[name].nll <= WORST_NLL * ar.nll
        }
        best = max(good, key=lambda name: good[name])
        if batch == 1:
            figures["best / ar, batch 1"] = good[best]
            console.print(
                f"best at batch 1: {best}, {results[best].tokens_per_pass:.2f} tokens per pass, "
                f"nll {results[best].nll:.4f} beside {ar.nll:.4f}"
            )
        if batch == 32:
            figures["ar / transformers, batch 32"] = median_ratio(ar.seconds, theirs.seconds)
        adaptive = median_ratio(results["verify (adaptive)"].seconds, ar.seconds)
        figures["verify / ar, any batch"] = min(figures["verify / ar, any batch"], adaptive)
    console.print("greedy verify = greedy ar (64 tokens each):")
    for where, (texts, differ, unexplained) in proof.items():
        console.print(
            f"  {where}: {texts - differ} of {texts} the same; {differ} differ, {unexplained} without a near tie"
        )
    console.print(table)
    misses = any(unexplained for _, _, unexplained in proof.values())
    for name, bar in BARS.items():
        if name in figures:
            console.print(f"{name}: {figures[name]:.2f} (bar: at least {bar})")
            misses |= figures[name] < bar
    return misses


if __name__ == "__main__":
    main()
