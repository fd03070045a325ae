"""`card eval MODEL --tasks ...`: tasks of the lm-evaluation-harness, on one rank or many."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from card_megatron.commands.eval_options import add_model_options, at_least, model_options
from card_megatron.config.errors import ConfigError
from card_megatron.config.load import rank_count
from card_megatron.platform import ranks_from_environment

DESCRIPTION = """Evaluate a checkpoint (in any layout) or an exported folder on tasks of the lm-evaluation-harness.
Scores do not depend on the number of ranks. Ranks beyond tensor x pipeline are replicas, which share the requests.
The group card_paper has the paper's tasks and shots."""
LAYOUT = """files of --data DIR, one JSON object a line:
  arc/ARC-{Challenge,Easy}-test.jsonl, few-shot examples from arc/ARC-*-validation.jsonl
  commonsense_qa/validation.jsonl, hellaswag/hellaswag_val.jsonl, piqa/validation_with_labels.jsonl,
  winogrande/validation.jsonl, few-shot examples from train.jsonl beside them
  mmlu_redux/mmlu_redux.jsonl, few-shot examples from mmlu_redux/dev.jsonl
  sciq/test.jsonl, few-shot examples from sciq/validation.jsonl; lambada/lambada_test.jsonl
Without a file of examples, they are other documents. Fields are the hub's; see evaluation/tasks.py."""


def run(arguments: Sequence[str]) -> None:
    options = parser().parse_args(list(arguments))
    gen_kwargs = pairs(options.gen_kwargs)
    ranks = ranks_from_environment()
    if options.nproc > 1 and ranks.world_size == 1:
        from card_megatron.commands.train import start_local_ranks

        start_local_ranks(options.nproc, arguments, command="eval")
    from card_megatron.decoding.model import open_model
    from card_megatron.evaluation.lm_eval_main import import_harness

    import_harness()  # before a model is loaded in vain, and before tqdm is imported
    from card_megatron.evaluation.runner import evaluate_tasks, table

    with open_model(options.model, **model_options(options)) as model:
        results = evaluate_tasks(
            model,
            [name for name in options.tasks.split(",") if name],
            data=options.data,
            num_fewshot=options.num_fewshot,
            limit=options.limit,
            output=options.output,
            gen_kwargs=gen_kwargs,
            settings={
                name: getattr(options, name)
                for name in ("max_length", "batch_tokens", "strategy", "K", "tau", "steps", "seed", "mc_samples")
            },
            opened={name: value for name, value in model_options(options).items() if name in ("ema", "dtype")},
        )
    if results is not None:
        print(table(results), end="")
        print(f"\n{results['requests']:,} requests in {results['seconds']:,.1f} s")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="card eval",
        description=DESCRIPTION,
        epilog=LAYOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="run directory, checkpoint or exported folder")
    parser.add_argument("--tasks", required=True, metavar="TASK,...", help="names, or the group card_paper")
    parser.add_argument("--data", type=Path, metavar="DIR", help="local files instead of the hub: see below")
    parser.add_argument("--num-fewshot", type=at_least(0), help="examples of every task (default: each task's own)")
    parser.add_argument("--limit", type=at_least(1), help="documents of each task (default: all)")
    parser.add_argument(
        "--output", type=Path, metavar="OUT.json", help="write results here; a killed evaluation goes on where it was"
    )
    parser.add_argument("--nproc", type=rank_count, default=1, help="start this many ranks on this machine")
    parser.add_argument("--max-length", type=at_least(1), help="inputs of a pass (default: all the model's positions)")
    parser.add_argument("--batch-tokens", type=at_least(1), default=8192, help="tokens of a pass (default: 8192)")
    parser.add_argument(
        "--samples",
        dest="mc_samples",
        type=at_least(2),
        default=32,
        help="mdlm, bd3lm: noise samples of each request, whose likelihood is a bound (default: 32)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of noise and sampled text (default: 0)")
    add_model_options(parser)
    text = parser.add_argument_group("generated text")
    text.add_argument(
        "--strategy",
        choices=["ar", "confidence", "verify", "denoise"],
        help="default: verify; ar for arm; denoise for mdlm and bd3lm",
    )
    text.add_argument("--K", type=at_least(0), help="tokens of a block, or drafts")
    text.add_argument("--steps", type=at_least(1), help="denoise: passes for each block (default: one for each token)")
    text.add_argument("--tau", type=float, default=0.9, help="confidence that fills a slot (default: 0.9)")
    text.add_argument(
        "--gen-kwargs", metavar="NAME=VALUE,...", help="such as temperature=0.8,top_p=0.95,do_sample=true"
    )
    return parser


def pairs(text: str | None) -> dict[str, Any] | None:
    """NAME=VALUE,... with numbers, true and false as such."""
    import yaml

    if text is None:
        return None
    found = {}
    for entry in text.split(","):
        name, equals, value = entry.partition("=")
        if not name or not equals:
            raise ConfigError(f"--gen-kwargs {entry!r} is not NAME=VALUE")
        found[name] = yaml.safe_load(value)
    return found
