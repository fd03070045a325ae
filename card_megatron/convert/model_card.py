"""README.md of an exported folder: what the model is, where it comes from, how to use it."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from card_megatron.checkpoint.source import Source
from card_megatron.config.keys import flatten
from card_megatron.config.schema import RunConfig
from card_megatron.convert.verify import Comparison
from card_megatron.data.indexed import read_manifest
from card_megatron.version import __version__

OBJECTIVES = {
    "card": (
        "**CARD** (causal autoregressive diffusion): every token was predicted from a causal prefix whose tail was "
        "partly replaced by `[MASK]`, and weighted by how corrupted that prefix was. The model is an ordinary "
        "autoregressive model on clean text, and it can also fill several `[MASK]`s in one pass."
    ),
    "arm": "**ARM**: plain next-token prediction.",
}


def model_card(source: Source, config: dict[str, Any], name: str, *, ema: bool, comparison: Comparison | None) -> str:
    """Markdown with the front matter that model hubs read."""
    run = source.config
    parts = [
        _front_matter(),
        f"# {name}",
        f"A `{config['architectures'][0]}` of {config['num_hidden_layers']} layers, width {config['hidden_size']} and "
        f"a vocabulary of {config['vocab_size']}, trained with card_megatron on Megatron-Core; exported by "
        f"card_megatron {__version__}{' from the moving average of its weights' if ema else ''}.",
        "## Objective",
        *_objective(source),
        "## Training",
        _training(source),
        "## Data",
        _data(run),
        "## Evaluation",
        _evaluation(source, ema=ema),
        "## Generate",
        _generate(config),
        "## Serve with vLLM as its own drafter",
        _vllm(config, name),
        "## Conversion",
        _conversion(comparison),
        "## Configuration of the run",
        "```yaml\n" + yaml.safe_dump(_shown(run), sort_keys=False, width=110) + "```",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front_matter() -> str:
    fields = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["card_megatron", "megatron-core"],
    }
    return "---\n" + yaml.safe_dump(fields, sort_keys=False) + "---"


def _objective(source: Source) -> list[str]:
    if source.manifest is None or source.manifest.step == 0:
        return ["Unknown here: the weights were converted from another program's."]
    objective = source.config.objective
    ours, defaults = vars(objective), vars(RunConfig().objective)
    changed = [f"`{name}={value}`" for name, value in ours.items() if value != defaults[name] and name != "name"]
    about = OBJECTIVES.get(objective.name, f"`{objective.name}`")
    return [about, f"Other than the default: {', '.join(changed)}."] if changed else [about]


def _training(source: Source) -> str:
    manifest, run = source.manifest, source.config
    if manifest is None:
        return "Trained with Megatron-LM; its arguments were read from the checkpoint."
    if manifest.step == 0:
        return "None by card_megatron."
    tokens = manifest.consumed_samples * run.data.sequence_length
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    return (
        f"{manifest.step:,} steps, {manifest.consumed_samples:,} sequences of {run.data.sequence_length} tokens "
        f"({tokens:,} tokens), peak learning rate {run.optimizer.lr:g}, {run.precision.preset}. "
        f"Saved {manifest.created} on {manifest.layout.get('world_size', 1)} rank(s); {versions}."
    )


def _data(run: RunConfig) -> str:
    if run.data.mock:
        return "Mock data: random tokens. The weights mean nothing."
    if not run.data.train:
        return "Unknown."
    lines = []
    for entry in run.data.train:
        prefix = entry.split()[-1]
        manifest = read_manifest(prefix) if Path(f"{prefix}.json").is_file() else None
        if manifest is None:
            lines.append(f"- `{Path(prefix).name}` (no manifest at hand)")
            continue
        inputs = ", ".join(f"`{Path(item['path']).name}`" for item in manifest.get("inputs", []))
        lines.append(
            f"- `{Path(prefix).name}`: {manifest['documents']:,} documents, {manifest['tokens']:,} tokens"
            f"{f' from {inputs}' if inputs else ''}; tokenizer {manifest['tokenizer']['kind']}, "
            f"sha256 `{manifest['tokenizer']['sha256'][:16]}`"
        )
    return "\n".join(lines)


def _evaluation(source: Source, *, ema: bool) -> str:
    """The validation that the run itself recorded at this step."""
    records = source.path.parent.parent / "metrics.jsonl"
    if source.manifest is None or source.path.parent.name != "checkpoints" or not records.is_file():
        return "None known."
    found = None
    for line in records.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):  # the last line of a run that is alive, or was killed
            record = json.loads(line)
            if "validation" in record and record["step"] == source.manifest.step:
                found = record["validation"]
    if not found:
        return "None known."
    rows = ["| set | perplexity of clean text (exact) | loss under noise |", "|---|---|---|"]
    for name, metrics in found.items():
        clean = metrics.get("clean_perplexity")
        rows.append(f"| {name} | {'' if clean is None else format(clean, '.3f')} | {metrics['loss']:.4f} |")
    averaged = "the averaged" if source.config.ema.validate else "the trained"
    same = "" if source.config.ema.validate == ema else ", **not the weights of this export**"
    return "\n".join([*rows, "", f"By the run itself, on its own validation sets, with {averaged} weights{same}."])


def _generate(config: dict[str, Any]) -> str:
    several = (
        "\n\nSeveral tokens a pass, by the code in `custom_generate/` (read it first: `trust_remote_code` runs it). "
        "`verify` gives exactly the text above; `confidence` is the paper's, faster and not the same.\n\n"
        "```python\n"
        "model.generate(**inputs, max_new_tokens=50, custom_generate=folder, trust_remote_code=True,\n"
        '               strategy="verify")  # or strategy="confidence", block_size=16, tau=0.9, max_passes=16\n'
        "```"
    )
    return (
        "```python\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'folder = "."  # this folder\n'
        "tokenizer = AutoTokenizer.from_pretrained(folder)\n"
        "model = AutoModelForCausalLM.from_pretrained(folder)\n"
        'inputs = tokenizer("Once upon a time", return_tensors="pt")\n'
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))\n"
        "```" + (several if "mask_token_id" in config else "")
    )


def _vllm(config: dict[str, Any], name: str) -> str:
    if "mask_token_id" not in config:
        return "Not possible: the model has no `[MASK]`."
    return (
        "The drafter's input of vLLM's parallel drafting, `[last token, MASK, MASK, ...]`, is the one that CARD is "
        "trained on, and `config.json` names the mask as `mask_token_id` and `pard_token`. "
        "**Untested: this command has not been run yet.**\n\n"
        "```\n"
        f"vllm serve {name} --speculative-config "
        f'\'{{"model": "{name}", "method": "draft_model", "num_speculative_tokens": 8, "parallel_drafting": true}}\'\n'
        "```"
    )


def _conversion(comparison: Comparison | None) -> str:
    if comparison is None:
        return "Not compared with the Megatron model (`--no-verify`)."
    return f"Compared with the Megatron model in fp32: {comparison}."


def _shown(run: RunConfig) -> dict[str, Any]:
    """Fields that are not at their default, as a tree; paths of the machine that trained it stay out."""
    defaults = dict(flatten(_tree(RunConfig())))
    private = (
        *("run_dir", "checkpoint.", "logging.", "guard."),
        *("data.train", "data.validation", "data.test", "data.tokenizer", "data.path_to_cache"),
    )
    shown: dict[str, Any] = {}
    for key, value in flatten(_tree(run)):
        if value != defaults.get(key) and not key.startswith(private):
            *sections, last = key.split(".")
            place = shown
            for section in sections:
                place = place.setdefault(section, {})
            place[last] = value
    return shown


def _tree(run: RunConfig) -> dict[str, Any]:
    return asdict(run)
