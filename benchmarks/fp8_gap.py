"""What FP8 costs CARD: the same run in fp32 and with emulated FP8, and which tokens pay.

    python benchmarks/fp8_gap.py [--check] [--steps 300] [--corpus TEXT ...]

The tiny preset on one rank: every run has the same weights, samples and noise, and differs in the precision of its
linear layers alone. Two runs of anything drift apart, so there is a control: fp32 whose initial weights are nudged by
a thousandth of themselves. A gap is FP8's as far as it exceeds the control's.

Gaps are of the training loss (mean of the last sixth), and of the held-out loss of tokens by their weight under CARD:
a low weight is an ambiguous context. Last, how far a token's gradient is off after rounding (that of the fp32 model,
where it enters a linear layer). Text is that of Python's own documentation, or --corpus.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from card_megatron.config import load_config
from card_megatron.platform import Ranks, capabilities, install

EMULATED, EVERY_LAYER = "--precision.emulate=true", "--precision.first_last_layers_bf16=false"
CONTROL = "fp32, nudged"
RUNS: dict[str, list[str]] = {
    "fp32": [],
    CONTROL: [],
    "tensorwise (preset)": ["--precision=fp8_tensorwise", EMULATED],
    "tensorwise, every layer": ["--precision=fp8_tensorwise", EMULATED, EVERY_LAYER],
    "blockwise, every layer": ["--precision=fp8_blockwise", EMULATED, EVERY_LAYER],
}
WEIGHTS = {"w < 0.5": (0.0, 0.5), "0.5 to 0.9": (0.5, 0.9), "w > 0.9": (0.9, 2.0)}
BAR = 0.01
"""Most that FP8 may add to the loss in training and to that of each group of tokens, as a share of it."""


def write_data(folder: Path, corpus: list[str]) -> list[str]:
    """Tokenizer and data; the options that name them."""
    from card_megatron.data.preprocess import build_indexed
    from card_megatron.data.python_docs import python_documents
    from card_megatron.data.tokenizer_training import train_sentencepiece
    from card_megatron.data.tokenizers import load_tokenizer

    texts = [Path(path).read_text("utf-8") for path in corpus]
    documents = [part for text in texts for part in text.split("\n\n") if part.strip()] or python_documents()
    tokenizer = load_tokenizer(train_sentencepiece(documents, folder / "tokenizer.model", vocab_size=1024))
    build_indexed(documents, tokenizer, folder / "text")
    return [f"--data.train=[{folder}/text]", f"--data.tokenizer={folder}/tokenizer.model", "--data.split=97,3,0"]


def nudge(state: Any) -> None:
    """Every initial weight by a thousandth of itself, up or down."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in state.model[0].parameters():
            parameter.mul_(1 + 1e-3 * torch.randn(parameter.shape, generator=generator))


def train(folder: Path, data: list[str], steps: int, name: str) -> tuple[Any, list[float]]:
    """A trained state, and the loss of every step."""
    from card_megatron.training.metrics import read_report
    from card_megatron.training.preflight import preflight
    from card_megatron.training.state import build_state
    from card_megatron.training.step import train_step

    fixed = [f"--train.train_iters={steps}", f"--run_dir={folder}", "--data.num_workers=0", *data, *RUNS[name]]
    config, _ = load_config(["--preset=tiny", *fixed])
    state = build_state(preflight(config, Ranks()))
    if name == CONTROL:
        nudge(state)
    losses = []
    for _ in range(steps):
        report = train_step(state).report.tolist()
        losses.append(read_report(report, config.objective.normalize)["loss"])
    return state, losses


def held_out(state: Any, samples: int = 128, rows: int = 8) -> list[dict[str, torch.Tensor]]:
    """The first held-out samples with their noise, the same for every run."""
    from card_megatron.data.datasets import ObjectiveDataset

    (clean,) = state.datasets.validation.values()
    noised = ObjectiveDataset(clean, state.objective, state.config.seed, "validation/text")
    every = [noised[index] for index in range(min(samples, len(clean)))]
    names = ("tokens", "labels", "weights", "supervised")
    return [
        {name: torch.stack([torch.as_tensor(sample[name]) for sample in every[first : first + rows]]) for name in names}
        for first in range(0, len(every), rows)
    ]


def loss_by_weight(state: Any) -> dict[str, float]:
    """Mean negative log-likelihood of held-out tokens, in groups by weight."""
    from card_megatron.model import unwrap

    (model,) = unwrap(state.model)
    nll, weights = [], []
    with torch.no_grad():
        for batch in held_out(state):
            counts = batch["supervised"] != 0
            nll.append(model(batch["tokens"], None, None, labels=batch["labels"])[counts])
            weights.append(batch["weights"][counts])
    every_nll, every_weight = torch.cat(nll), torch.cat(weights)
    groups = {name: (every_weight >= low) & (every_weight < high) for name, (low, high) in WEIGHTS.items()}
    return {name: float(every_nll[inside].mean()) for name, inside in groups.items()}


def gradient_errors(state: Any) -> dict[str, dict[str, float]]:
    """Median relative error of a token's gradient after rounding, by recipe and group of weights."""
    from card_megatron.model import unwrap
    from card_megatron.model.fp8_emulation import BLOCK, E4M3, E5M2, Recipe

    (model,) = unwrap(state.model)
    recipes = {"tensorwise E5M2": Recipe(E5M2), "tensorwise E4M3": Recipe(E4M3), "blockwise E4M3": Recipe(E4M3, BLOCK)}
    errors: dict[str, list[torch.Tensor]] = {name: [] for name in recipes}
    weights: list[torch.Tensor] = []
    batch: dict[str, torch.Tensor] = {}

    def measure(module, grad_input, grad_output) -> None:
        gradient = grad_output[0].flatten(0, 1)  # [S, B, N] -> tokens
        norm = gradient.norm(dim=1)
        weights.append(torch.where(norm > 0, batch["weights"].t().flatten(), -1.0))
        for name, recipe in recipes.items():
            rounded = recipe.along_rows(gradient, recipe.gradient, None)
            errors[name].append((rounded - gradient).norm(dim=1) / norm.clamp(min=1e-30))

    layers = model.decoder.layers
    linears = [module for layer in layers for module in (layer.self_attention.linear_qkv, layer.mlp.linear_fc2)]
    hooks = [linear.register_full_backward_hook(measure) for linear in linears]
    for batch in held_out(state)[:4]:
        nll = model(batch["tokens"], None, None, labels=batch["labels"])
        (nll * batch["weights"]).sum().div(batch["supervised"].sum()).backward()
    for hook in hooks:
        hook.remove()
    every_weight = torch.cat(weights)
    return {
        recipe: {
            name: float(torch.cat(values)[(every_weight >= low) & (every_weight < high)].median())
            for name, (low, high) in WEIGHTS.items()
        }
        for recipe, values in errors.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help=f"exit with 1 if a loss is more than {100 * BAR:g}%% above fp32"
    )
    parser.add_argument("--steps", type=int, default=300, help="steps of every run (default: 300)")
    parser.add_argument("--corpus", nargs="*", default=[], help="text files; documents are split at empty lines")
    options = parser.parse_args()
    machine = capabilities()
    install()
    from megatron.core import parallel_state

    console = Console(width=130)
    losses: dict[str, list[float]] = {}
    by_weight: dict[str, dict[str, float]] = {}
    errors: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        data = write_data(Path(folder), options.corpus)
        for name in RUNS:
            started = time.perf_counter()
            state, losses[name] = train(Path(folder) / "run", data, options.steps, name)
            by_weight[name] = loss_by_weight(state)
            errors = errors or gradient_errors(state)  # of the first run: fp32
            parallel_state.destroy_model_parallel()
            console.print(f"{name}: {options.steps} steps in {time.perf_counter() - started:.0f} s")

    last = {name: statistics.mean(values[-max(1, options.steps // 6) :]) for name, values in losses.items()}
    worst = {
        name: max(abs(a - b) / b for a, b in zip(values, losses["fp32"], strict=True))
        for name, values in losses.items()
    }
    title = f"tiny, {options.steps} steps, emulated FP8 in fp32, {machine.device}, {machine.cpu_cores} cores"
    table = Table(title=title)
    for column in ("linear layers", "training loss", "gap", "worst step", *(f"held out, {name}" for name in WEIGHTS)):
        table.add_column(column, justify="left" if column == "linear layers" else "right")
    gaps: list[float] = []
    for name in RUNS:
        shares = [by_weight[name][group] / by_weight["fp32"][group] - 1 for group in WEIGHTS]
        gaps += [last[name] / last["fp32"] - 1, *shares]
        cells = [f"{by_weight[name][g]:.4f} ({s:+.2%})" for g, s in zip(WEIGHTS, shares, strict=True)]
        table.add_row(name, f"{last[name]:.4f}", f"{gaps[-1 - len(shares)]:+.2%}", f"{worst[name]:.2%}", *cells)
    rounding = Table(title="a token's gradient after rounding: median relative error")
    for column in ("rounding", *WEIGHTS):
        rounding.add_column(column, justify="left" if column == "rounding" else "right")
    for recipe, groups in errors.items():
        rounding.add_row(recipe, *(f"{value:.2%}" for value in groups.values()))
    console.print(rounding)
    console.print(table)
    if options.check and not all(gap <= BAR for gap in gaps):  # a NaN is no pass
        sys.exit(1)


if __name__ == "__main__":
    main()
