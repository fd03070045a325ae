"""`card generate`: continue prompts with a checkpoint or an exported folder."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from card_megatron.config.errors import ConfigError
from card_megatron.decoding.diffusion import ORDERS
from card_megatron.decoding.text import STRATEGIES, Continuation, Generation, generate, text_of

DESCRIPTION = """Continue prompts. MODEL is a run directory, a checkpoint or an exported folder. Under torchrun the
ranks share the model (--tensor, --pipeline); ranks beyond that are replicas that share the prompts. Without a prompt
the model begins a text of its own."""
PALETTE = ("cyan", "magenta", "yellow", "green", "blue", "red")


def run(arguments: Sequence[str]) -> None:
    options = parser().parse_args(list(arguments))
    prompts = read_prompts(options)
    generation = how(options)
    if options.output is not None:
        refuse_unwritable(options.output)
    if options.picture is not None:
        if options.picture.suffix != ".svg":
            raise ConfigError(f"--picture={options.picture} does not end in .svg, which is what is drawn")
        if options.output is not None:
            raise ConfigError("--picture draws the texts that are shown; --output shows none: leave one of them out")
        options.show = True
    if options.stream and (len(prompts) > 1 or options.show or options.output):
        raise ConfigError("--stream shows one text as it grows; give one prompt, without --show and --output")
    from card_megatron.decoding.model import open_model

    with open_model(
        options.model,
        tensor=options.tensor,
        pipeline=options.pipeline,
        ema=options.ema,
        dtype=options.dtype,
        tokenizer=options.tokenizer,
    ) as model:
        if options.stream and model.speaks:
            print(prompts[0], end="", flush=True)
        texts, stats = generate(model, prompts, generation, say_now if options.stream and model.speaks else None)
        if not model.speaks:
            return
        if options.stream:
            print()
        elif options.output is not None:
            write_lines(options.output, texts)
        else:
            show(texts, model.tokenizer, coloured=options.show, picture=options.picture)
        if options.stats:
            print_stats(texts, stats)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="card generate", description=DESCRIPTION, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    made.add_argument("model", type=Path, help="run directory, checkpoint or exported folder")
    made.add_argument("prompts", nargs="*", help="texts to continue")
    made.add_argument("--prompts-file", type=Path, help='more prompts: a text a line, or .jsonl with a field "text"')
    made.add_argument("--output", type=Path, help="write .jsonl here instead of showing texts")
    made.add_argument("--max-new-tokens", type=int, default=128, help="longest continuation")
    made.add_argument("--stop", action="append", default=[], help="end at this string (may be given again)")
    made.add_argument("--batch-size", type=int, default=32, help="texts that grow side by side")
    strategy = made.add_argument_group("strategy")
    strategy.add_argument(
        "--strategy",
        choices=STRATEGIES,
        help="verify gives exactly ar's text; denoise is that of mdlm and bd3lm; none: verify, or denoise for these",
    )
    strategy.add_argument(
        "--block",
        type=int,
        help="confidence: tokens of a block (K), none: 16; denoise: tokens decided together before the next, none: the "
        "whole continuation for mdlm, the model's own blocks for bd3lm",
    )
    strategy.add_argument("--steps", type=int, help="denoise: passes for each block; none: one for each token")
    strategy.add_argument(
        "--order",
        choices=ORDERS,
        help="denoise: tokens that a pass decides; none: random where they are sampled, confidence where greedy",
    )
    strategy.add_argument(
        "--tau", type=float, default=0.9, help="confidence: fill slots whose top probability exceeds it"
    )
    strategy.add_argument("--max-passes", type=int, default=16, help="confidence: passes of a block (T_max)")
    strategy.add_argument(
        "--commit", choices=["block", "prefix"], default="block", help="confidence: when a block moves on"
    )
    strategy.add_argument(
        "--min-fill", type=int, choices=[0, 1], default=1, help="confidence: slots that a pass fills at least"
    )
    strategy.add_argument("--drafts", type=int, default=8, help="verify: most tokens drafted in a pass (K)")
    strategy.add_argument("--fixed-drafts", action="store_true", help="verify: always draft as many")
    strategy.add_argument("--branches", action="store_true", help="verify, fixed: draft behind every draft too")
    sampling = made.add_argument_group("sampling")
    sampling.add_argument("--temperature", type=float, default=0.0, help="0 takes the best token")
    sampling.add_argument("--top-k", type=int, default=0, help="keep the k best tokens; 0 keeps all")
    sampling.add_argument("--top-p", type=float, default=1.0, help="keep the best tokens up to this probability")
    sampling.add_argument("--min-p", type=float, default=0.0, help="keep tokens this likely relative to the best")
    sampling.add_argument("--repetition-penalty", type=float, default=1.0, help="above 1 avoids what is there already")
    sampling.add_argument("--seed", type=int, default=0, help="of the first prompt; the next has the next")
    where = made.add_argument_group("model")
    where.add_argument("--tensor", type=int, default=1, help="ranks that share each matrix")
    where.add_argument("--pipeline", type=int, default=1, help="ranks that share the layers")
    where.add_argument("--ema", action="store_true", help="the averaged weights")
    where.add_argument("--dtype", choices=["fp32", "bf16"], help="of the computation; none: fp32 on a CPU")
    where.add_argument("--tokenizer", help="where the tokenizer is, if not where the run had it")
    shown = made.add_argument_group("what is shown")
    shown.add_argument("--stream", action="store_true", help="show the text as it grows")
    shown.add_argument("--show", action="store_true", help="colour tokens by the pass that filled them")
    shown.add_argument("--picture", type=Path, metavar="FILE.svg", help="as --show, and also drawn into this file")
    shown.add_argument("--stats", action="store_true", help="tokens per pass, accept lengths, tokens/s")
    return made


def how(options: argparse.Namespace) -> Generation:
    from card_megatron.decoding.sampling import SamplingParams

    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
    try:
        sampling = SamplingParams(**{name: getattr(options, name) for name in names})
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if options.max_new_tokens < 1 or options.batch_size < 1:
        raise ConfigError(
            f"--max-new-tokens {options.max_new_tokens} and --batch-size {options.batch_size} must be at least 1"
        )
    if "" in options.stop:
        raise ConfigError("--stop '' would end every text at once; give a string")
    same = ("strategy", "block", "steps", "order", "tau", "max_passes", "commit", "min_fill", "drafts", "branches")
    generation = Generation(
        **{name: getattr(options, name) for name in (*same, "max_new_tokens", "batch_size")},
        adaptive=not options.fixed_drafts,
        stop=tuple(options.stop),
        sampling=sampling,
    )
    if options.strategy is not None:  # else the model chooses it, and whose numbers these are
        generation.build()  # refuses bad numbers before a model is loaded
    return generation


def read_prompts(options: argparse.Namespace) -> list[str]:
    prompts = list(options.prompts)
    if options.prompts_file is not None:
        try:
            lines = options.prompts_file.read_text(encoding="utf-8").split("\n")  # a text may hold other line ends
            lines = lines[:-1] if not lines[-1] else lines
            if options.prompts_file.suffix == ".jsonl":
                lines = [json.loads(line)["text"] for line in lines if line.strip()]
            if not all(isinstance(line, str) for line in lines):
                raise ValueError("a text that is no string")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"--prompts-file {options.prompts_file} cannot be read ({error}); it holds a text a line, or .jsonl "
                'objects with a field "text"'
            ) from error
        prompts += lines
    return prompts or [""]


def refuse_unwritable(output: Path) -> None:
    """Before anything is decoded."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        unfinished_of(output).touch()
    except OSError as error:
        raise ConfigError(f"--output {output} cannot be written ({error.strerror}); choose another path") from error


def unfinished_of(output: Path) -> Path:
    return output.with_name(output.name + ".unfinished")


def say_now(number: int, text: str) -> None:
    print(text, end="", flush=True)


def write_lines(path: Path, texts: list[Continuation]) -> None:
    """Whole or not at all."""
    unfinished = unfinished_of(path)
    with unfinished.open("w", encoding="utf-8") as file:
        for made in texts:
            record: dict[str, Any] = {
                "prompt": made.prompt,
                "text": made.text,
                "tokens": made.result.tokens,
                "ended": made.result.ended,
                "passes": made.result.passes,
            }
            line = json.dumps(record, ensure_ascii=False)
            # line ends to some readers, which JSON allows inside of a string
            file.write(re.sub("[\x85\u2028\u2029]", lambda match: f"\\u{ord(match[0]):04x}", line) + "\n")
    unfinished.replace(path)
    print(f"{path}: {len(texts)} texts")


def show(texts: list[Continuation], tokenizer: Any, *, coloured: bool, picture: Path | None = None) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=picture is None, record=picture is not None)
    for number, made in enumerate(texts):
        line = Text(made.prompt, style="bold" if sys.stdout.isatty() or coloured else "")
        line.append_text(by_pass(made, tokenizer) if coloured else Text(made.text, style="not bold"))
        if number:
            console.print()
        console.print(line)
    if coloured:
        legend = Text("passes: ").append_text(
            Text(" ").join(Text(f" {n + 1} ", f"black on {c}") for n, c in enumerate(PALETTE))
        )
        console.print(legend.append(" 7 as 1, and so on; tokens of one colour in a row came from one pass"))
    if picture is not None:
        from card_megatron.evaluation.report import write_text

        drawn = console.export_svg(title="tokens by the pass that filled them")
        # without its fonts, which a reader's browser would fetch from elsewhere
        write_text(picture, re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL))
        print(f"picture: {picture}")


def by_pass(made: Continuation, tokenizer: Any) -> Any:
    """The text token by token, each on the colour of its pass. A character of several tokens has its last one's."""
    from rich.text import Text

    line, told = Text(), ""
    for number, filled in enumerate(made.result.filled_in, start=1):
        text = text_of(tokenizer, made.prompt_tokens, made.result.tokens[:number]).rstrip("\ufffd")
        if len(text) > len(told):
            line.append(text[len(told) :], style=f"black on {PALETTE[(filled - 1) % len(PALETTE)]}")
            told = text
    return line


def print_stats(texts: list[Continuation], stats: Any) -> None:
    ended = {reason: sum(made.result.ended == reason for made in texts) for reason in ("eos", "length", "stop")}
    near_ties = sum(made.result.near_ties for made in texts)
    rows = [
        (
            "texts",
            f"{len(texts)} (" + ", ".join(f"{count} by {reason}" for reason, count in ended.items() if count) + ")",
        ),
        ("tokens", f"{stats.tokens_produced:,} in {stats.seconds:.2f} s: {stats.tokens_per_second:,.1f} tokens/s"),
        ("passes", f"{stats.passes:,} and {stats.prefill_passes} over prompts"),
        ("tokens per pass", f"{stats.tokens_per_pass:.2f} of a text"),
        ("forwarded", f"{stats.tokens_forwarded:,} tokens, at most {stats.widest} of a text in a pass"),
        ("key/value cache", f"{stats.cache_bytes / 1e6:,.1f} MB"),
        ("near ties", f"{near_ties} choices that were closer than 1e-4"),
    ]
    print()
    for name, value in rows:
        print(f"{name:<17}{value}")
    total = sum(stats.advances.values())
    print("accept lengths   (how often a pass lengthened a text by so many tokens)")
    for length, count in sorted(stats.advances.items()):
        print(f"{length:>6}  {count:>7,}  {'█' * round(40 * count / total)}")
