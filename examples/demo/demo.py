"""The main job from text to a trained, exported model that generates, on one CPU, with nothing to download.

    make demo        or        python examples/demo/demo.py --folder runs/demo

Each stage is a function below; a later stage finds what an earlier one left in the folder.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from card_megatron.config import load_config
from card_megatron.data import ngrams, python_docs
from card_megatron.data.build import build
from card_megatron.data.preprocess import write_documents
from card_megatron.data.shards import ReadOptions
from card_megatron.data.tokenizer_training import train_sentencepiece
from card_megatron.data.tokenizers import encode, load_tokenizer
from card_megatron.platform import Ranks, capabilities, install

PROMPT = "The following example shows how"
QUESTIONS = 100
EXAMPLE = Path(__file__).parent.parent / "configs" / "card_tiny.yaml"
console = Console(highlight=False)


@dataclass
class Demo:
    """Where the demo works, and what its stages found out."""

    folder: Path
    steps: int
    vocab_size: int
    summary: dict[str, Any]

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def exported(self) -> Path:
        return self.folder / "hf"

    @property
    def tokenizer(self) -> Path:
        return self.data / "tokenizer.model"


def make_corpus(demo: Demo) -> str:
    """Collect the documentation that every Python ships"""
    train, held_out = python_docs.train_and_validation(python_docs.python_documents())
    write_documents(demo.data / "train.jsonl", train)
    write_documents(demo.data / "valid.jsonl", held_out)
    return f"{len(train)} documents to train on, {len(held_out)} held out"


def make_tokenizer(demo: Demo) -> str:
    """Train a SentencePiece tokenizer with a [MASK] token"""
    train, _ = python_docs.train_and_validation(python_docs.python_documents())
    train_sentencepiece(train, demo.tokenizer, demo.vocab_size)
    tokenizer = load_tokenizer(demo.tokenizer)
    return f"{tokenizer.vocab_size} pieces, [MASK] is {tokenizer.mask}"


def make_tokens(demo: Demo) -> str:
    """Tokenise the corpus into Megatron's .bin/.idx"""
    train, held_out = (
        build([str(demo.data / f"{name}.jsonl")], demo.data / name, str(demo.tokenizer), ReadOptions(), restart=True)
        for name in ("train", "valid")
    )
    return f"{train['tokens']:,} tokens to train on, {held_out['tokens']:,} held out"


def train_model(demo: Demo) -> str:
    """Train a tiny CARD model on Megatron-Core"""
    from card_megatron.training.run import train_run

    shutil.rmtree(demo.folder / "run", ignore_errors=True)  # a run that has checkpoints would be continued
    config, _ = load_config(
        [
            f"--config={EXAMPLE}",
            f"--run_dir={demo.folder / 'run'}",
            f"--data.tokenizer={demo.tokenizer}",
            f"--data.train=[{demo.data / 'train'}]",
            f"--data.validation.python_docs=[{demo.data / 'valid'}]",
            f"--train.train_iters={demo.steps}",
        ]
    )
    demo.summary = train_run(config, Ranks())
    return f"{demo.summary['consumed_tokens']:,} tokens in {demo.summary['seconds']:.0f} s"


def export_model(demo: Demo) -> str:
    """Export it as a plain Hugging Face folder, compared with transformers"""
    from card_megatron.checkpoint.source import open_source
    from card_megatron.convert.to_hf import to_hf

    source = open_source(demo.folder / "run")
    exported = to_hf(
        source, demo.exported, load_tokenizer(demo.tokenizer), force=demo.exported.exists(), say=lambda text: None
    )
    return str(exported.comparison)


def load_in_transformers(demo: Demo) -> str:
    """Load the folder in plain transformers, and decode several tokens a pass there"""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = str(demo.exported)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    plain = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    ours = model.generate(
        **inputs, max_new_tokens=40, custom_generate=folder, trust_remote_code=True, strategy="verify"
    )
    same = "the same text" if plain.tolist() == ours.tolist() else "another text"
    return f"{type(model).__name__}.generate and our lossless decoding: {same}"


def generate_text(demo: Demo) -> str:
    """Generate, lossless, with the Megatron checkpoint"""
    from card_megatron.decoding.model import open_model
    from card_megatron.decoding.sampling import SamplingParams
    from card_megatron.decoding.text import Generation, generate

    with open_model(demo.folder / "run") as model:
        options = Generation(drafts=4, adaptive=False, max_new_tokens=60, sampling=SamplingParams(0.7, seed=1))
        (made,), stats = generate(model, [PROMPT], options)
    console.print(f"    {PROMPT + made.text!r}", soft_wrap=True, markup=False)
    return f"{stats.tokens_produced} tokens in {stats.passes} passes: {stats.tokens_per_pass:.2f} a pass"


def evaluate_model(demo: Demo) -> str:
    """Score held-out text and a small multiple-choice task, exact in one pass"""
    from card_megatron.decoding.model import open_model
    from card_megatron.evaluation.scorer import Scorer

    # which of four words came next? the true one, and three that stood elsewhere
    lines = (demo.data / "valid.jsonl").read_text(encoding="utf-8").splitlines()
    words = [word for line in lines for word in json.loads(line)["text"].split()]
    with open_model(demo.exported) as model:
        pairs = []
        for place in range(200, min(len(words) - 1, 200 + 40 * QUESTIONS), 40):
            context = encode(model.tokenizer, " ".join(words[place - 30 : place]))
            endings = [words[place], *(words[(place * 7 + 13 * n) % len(words)] for n in (1, 2, 3))]
            pairs += [(context, encode(model.tokenizer, " " + ending)) for ending in endings]
        scores = Scorer(model).score(pairs)
    per_token = [score.logprob / len(ending) for score, (_, ending) in zip(scores, pairs, strict=True)]
    questions = [per_token[first : first + 4] for first in range(0, len(per_token), 4)]
    right = sum(max(answers) == answers[0] for answers in questions)
    return f"{right} of {len(questions)} questions right (chance: {len(questions) / 4:.0f})"


STAGES: list[Callable[[Demo], str]] = [
    *(make_corpus, make_tokenizer, make_tokens, train_model),
    *(export_model, load_in_transformers, generate_text, evaluate_model),
]
"""In order."""


def report(demo: Demo) -> None:
    """Before and after, beside what token counts alone can do; and where everything is."""
    train, held_out = (ngrams.all_tokens(str(demo.data / name)) for name in ("train", "valid"))
    vocab_size = load_tokenizer(demo.tokenizer).vocab_size
    before = demo.summary["validation_before"]["python_docs"]
    after = demo.summary["validation_after"]["python_docs"]
    table = Table(title="Held-out text", title_justify="left")
    for column in ("model", "perplexity of clean text", "CARD loss (noised)"):
        table.add_column(column, justify="left" if column == "model" else "right")
    table.add_row("unigram counts", f"{math.exp(ngrams.unigram_nll(train, held_out, vocab_size)):.1f}", "")
    table.add_row("bigram counts", f"{math.exp(ngrams.bigram_nll(train, held_out, vocab_size)):.1f}", "")
    table.add_row("CARD before", f"{before['clean_perplexity']:.1f}", f"{before['loss']:.4f}")
    table.add_row("CARD after", f"{after['clean_perplexity']:.1f}", f"{after['loss']:.4f}")
    console.print()
    console.print(table)
    places = {
        "corpus, tokenizer, .bin/.idx": demo.data,
        "resolved configuration": demo.folder / "run" / "config.yaml",
        "metrics": demo.folder / "run" / "metrics.jsonl",
        "TensorBoard": demo.folder / "run" / "tensorboard",
        "weights (any layout loads them)": demo.summary["checkpoint"],
        "exported model, with its card": demo.exported / "README.md",
    }
    for what, place in places.items():
        console.print(f"{what:<34}{place}", soft_wrap=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/demo"), help="where to work (default: runs/demo)")
    parser.add_argument("--steps", type=int, default=2000, help="training steps of 1,024 tokens (default: 2000)")
    parser.add_argument("--vocab-size", type=int, default=2048, help="size of the tokenizer (default: 2048)")
    options = parser.parse_args()
    machine = capabilities()
    install()
    console.print(f"CARD on Megatron-Core, on {machine.device} with {machine.cpu_cores} cores, in {options.folder}")
    demo = Demo(options.folder, options.steps, options.vocab_size, summary={})
    started = time.perf_counter()
    for number, stage in enumerate(STAGES, start=1):
        console.print(f"[bold]{number}/{len(STAGES)} {stage.__doc__}[/bold]")
        console.print(f"    {stage(demo)}")
    report(demo)
    seconds = time.perf_counter() - started
    console.print(f"\nDone in {seconds:.0f} s.")
    (demo.folder / "demo.json").write_text(json.dumps({**demo.summary, "demo_seconds": seconds}, indent=2) + "\n")


if __name__ == "__main__":
    main()
