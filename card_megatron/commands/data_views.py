"""`card data inspect|sample|epochs|merge|split|shuffle`: a look at finished data, and finished data rearranged."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from card_megatron.config.errors import ConfigError

if TYPE_CHECKING:
    from card_megatron.config.schema import RunConfig
    from card_megatron.data.indexed import Indexed
    from card_megatron.data.tokenizers import Tokenizer

SAMPLE = """Show samples of a run exactly as its model will see them: the same text, noise and weights. Masked inputs
are orange, targets are the darker the more their prediction counts. The index of samples is built where the run will
look for it (data.path_to_cache, or RUN_DIR/index_cache)."""
EPOCHS = """Show how many epochs of each source of data.train a run makes, before it runs."""
PREFIX = "prefix of a .bin/.idx pair"
SHOWN_TOKENS, SHOWN_CHARACTERS, BAR = 400, 300, 40


def add_views(commands: Any) -> None:
    """Add the subcommands to those of `card data`."""
    inspect = _command(commands, "inspect", inspect_data, "count what a .bin/.idx pair holds, and decode its beginning")
    inspect.add_argument("prefix", type=_prefix, help=PREFIX)
    inspect.add_argument("--documents", type=int, default=3, help="documents that are decoded (default: 3)")
    inspect.add_argument("--tokenizer", help="where the tokenizer is now (default: where the manifest says)")
    inspect.add_argument(
        "--verify", action="store_true", help="also compare the .bin with the manifest's checksums, and the index"
    )

    merge = _command(commands, "merge", merge_data, "join pairs that were made with the same tokenizer")
    merge.add_argument("prefixes", type=_prefix, nargs="+", metavar="prefix", help=f"{PREFIX}, in the order wanted")
    split = _command(commands, "split", split_data, "share documents out to P_train, P_valid and P_test")
    split.add_argument("prefix", type=_prefix, help=PREFIX)
    split.add_argument("--shares", required=True, help="of train, valid and test, e.g. 98,1,1; 0 writes none")
    shuffle = _command(commands, "shuffle", shuffle_data, "write the documents in a random order")
    shuffle.description = (
        "Write the documents in a random order. Memory does not grow with the data; the disk holds them "
        "twice more while a shuffle of more than 256 MB runs."
    )
    shuffle.add_argument("prefix", type=_prefix, help=PREFIX)
    for command in (merge, split, shuffle):
        about = "prefix of the names to write" if command is split else "prefix to write"
        command.add_argument("--output", type=_prefix, required=True, metavar="P", help=about)
    for command in (split, shuffle):
        command.add_argument("--seed", type=int, default=1234, help="keys what is random (default: 1234)")

    for name, function, about in (
        ("sample", show_samples, "show samples as the model will see them: noise, weights, a picture"),
        ("epochs", show_epochs, "show how many epochs of each source a run makes"),
    ):
        # a parser that takes every word for a value (none begins with NUL) and leaves them to the run's own parser
        command = commands.add_parser(name, help=about, add_help=False, prefix_chars="\0")
        command.add_argument("arguments", nargs="*")
        command.set_defaults(function=function)


def _command(commands: Any, name: str, function: Callable, about: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")
    parser.set_defaults(function=function)
    return parser


def _prefix(value: str) -> Path:
    """A prefix, also where a user completed it to one of its files."""
    return Path(value.removesuffix(".bin").removesuffix(".idx"))


def _print_any_text() -> None:
    """Texts of all scripts follow: what the terminal's encoding lacks becomes a question mark."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


@contextlib.contextmanager
def _progress(what: str, total: int, unit: str = " tokens") -> Iterator[Callable[[int], object]]:
    from tqdm import tqdm

    with tqdm(total=total, desc=what, unit=unit, unit_scale=True, disable=None, leave=False) as bar:
        yield bar.update


# ---------------------------------------------------------------- inspect


def inspect_data(options: argparse.Namespace) -> None:
    from card_megatron.data.indexed import Indexed
    from card_megatron.data.inspect import length_statistics

    if options.documents < 0:
        raise ConfigError(f"--documents={options.documents} must be 0 or more")
    _print_any_text()
    data = Indexed(options.prefix)
    manifest = data.manifest()
    if options.verify:
        _verify(data, manifest)
    tokenizer, known = _tokenizer_of(data, manifest, options.tokenizer)
    lengths = length_statistics(data)
    print(f"data         {data.prefix}")
    print(f"documents    {len(data):,}")
    print(f"tokens       {data.tokens:,} ({data.dtype.name}, {data.tokens * data.dtype.itemsize / 1e6:,.1f} MB)")
    print(
        f"lengths      mean {lengths.mean:,.1f}, median {lengths.median:,.1f}, "
        f"shortest {lengths.shortest:,}, longest {lengths.longest:,}"
    )
    tallest = max(count for _, _, count in lengths.histogram)
    for low, high, count in lengths.histogram:
        print(f"{low:>14,} - {high:<11,}{count:>14,}  {'█' * -(-BAR * count // tallest)}")
    _print_manifest(manifest)
    problem = _print_vocabulary(data, tokenizer, known)
    _print_documents(data, tokenizer, known, options.documents)
    if problem:
        raise ConfigError(problem)


def _verify(data: Indexed, manifest: dict[str, Any] | None) -> None:
    from card_megatron.data.inspect import damage

    if manifest is None or "checksums" not in manifest:
        raise ConfigError(f"--verify: {data.prefix}.json has no checksums; `card data build` writes them with the data")
    size = data.tokens * data.dtype.itemsize
    with _progress("verifying", size, "B") as progress:
        problems = list(damage(data, manifest, progress))
    if problems:
        raise ConfigError("\n  - ".join([f"{data.prefix} is damaged; build or copy it again:", *problems]))
    print(f"verified     {size:,} bytes in {len(manifest['checksums'])} ranges are what the manifest says")


def _tokenizer_of(
    data: Indexed, manifest: dict[str, Any] | None, given: str | None
) -> tuple[Tokenizer | None, dict[str, Any]]:
    """The tokenizer, where it is here, and what is known of it: vocab_size, eod and mask."""
    from card_megatron.data.build import describe_tokenizer
    from card_megatron.data.tokenizers import load_tokenizer

    made_with = manifest["tokenizer"] if manifest else {}
    name = given or made_with.get("name")
    try:
        tokenizer = load_tokenizer(name) if name else None
    except ConfigError:
        if given:
            raise
        return None, made_with
    if tokenizer is None:
        return None, made_with
    if made_with and made_with["sha256"] != tokenizer.fingerprint():
        if not given:  # another file has taken its place
            return None, made_with
        raise ConfigError(
            f"--tokenizer {given} (sha256 {tokenizer.fingerprint()[:12]}…) is not the one that made {data.prefix} "
            f"({made_with['name']}, {made_with['sha256'][:12]}…); give that one"
        )
    return tokenizer, describe_tokenizer(tokenizer, str(name))


def _print_manifest(manifest: dict[str, Any] | None) -> None:
    if manifest is None:
        print("manifest     none: not made by `card data`")
        return
    made_with = manifest["tokenizer"]
    print(
        f"tokenizer    {made_with['name']} ({made_with['kind']}, {made_with['vocab_size']:,} ids, "
        f"sha256 {made_with['sha256'][:12]}…)"
    )
    made = manifest.get("made")
    if made:
        details = ", ".join(f"{key} {value}" for key, value in made.items() if key not in ("command", "from"))
        sources = ", ".join(source["prefix"] for source in made["from"][:5])
        more = f" and {len(made['from']) - 5} more" if len(made["from"]) > 5 else ""
        print(f"made by      card data {made['command']} of {sources}{more}" + (f" ({details})" if details else ""))
    inputs = manifest.get("inputs")
    if inputs:
        size = sum(entry.get("bytes", 0) for entry in inputs)
        more = ", …" if len(inputs) > 3 else ""
        print(f"inputs       {len(inputs):,} files, {size / 1e6:,.1f} MB: ", end="")
        print(", ".join(entry["path"] for entry in inputs[:3]) + more)
    problems = manifest.get("problems") or {}
    print(f"problems     {', '.join(f'{count:,} x {what}' for what, count in problems.items()) or 'none'}")


def _print_vocabulary(data: Indexed, tokenizer: Tokenizer | None, known: dict[str, Any]) -> str | None:
    """Print what occurs; returns what must not."""
    from card_megatron.data.inspect import count_ids, pieces, visible

    with _progress("counting", data.tokens) as progress:
        found = count_ids(data, known.get("vocab_size"), progress)
    used = int((found.counts > 0).sum())
    size = f"{used:,} of {len(found.counts):,} ids occur ({used / len(found.counts):.1%})"
    print(f"vocabulary   {size if known else f'{used:,} ids occur'}; the most frequent:")
    for number in found.most_frequent(10):
        text = f'"{visible(pieces(tokenizer, [number])[0])}"' if tokenizer else ""
        print(f"{number:>14,}  {text:<14}{found.counts[number]:>14,}  {found.counts[number] / data.tokens:.2%}")
    if not known:
        print("             how many there are, [MASK] and end of document are not known; --tokenizer tells")
        return None
    ends, masks = int(found.counts[known["eod"]]), int(found.counts[known["mask"]])
    print(f"end of doc   {ends / max(data.tokens, 1):.3%} of the tokens: {ends:,} in {len(data):,} documents")
    print(f"impossible   {found.outside:,} ids outside of the vocabulary, {masks:,} [MASK]; there must be none")
    if found.outside or masks:
        return (
            f"{data.prefix} holds {found.outside:,} ids outside of 0 to {known['vocab_size'] - 1} and {masks:,} [MASK] "
            f"({known['mask']}), which no text has: it is damaged, or was made with another tokenizer; build it again"
        )
    return None


def _print_documents(data: Indexed, tokenizer: Tokenizer | None, known: dict[str, Any], count: int) -> None:
    from card_megatron.data.inspect import visible

    if tokenizer is None and count:
        print(f"text         tokenizer {known.get('name', '')} is not here; --tokenizer says where it is")
        return
    for number in range(min(count, len(data))):
        assert tokenizer is not None
        ids = data[number]
        text = visible(tokenizer.decode(ids[:SHOWN_TOKENS].tolist()))
        cut = len(ids) > SHOWN_TOKENS or len(text) > SHOWN_CHARACTERS
        print(f"document {number:<4}{len(ids):,} tokens: {text[:SHOWN_CHARACTERS]}{'…' if cut else ''}")


# ---------------------------------------------------------------- merge, split, shuffle


def merge_data(options: argparse.Namespace) -> None:
    from card_megatron.data.indexed import Indexed
    from card_megatron.data.rearrange import merge

    with _progress("merging", sum(Indexed(prefix).tokens for prefix in options.prefixes)) as progress:
        _print_written(options.output, merge(options.prefixes, options.output, progress))


def split_data(options: argparse.Namespace) -> None:
    from card_megatron.data.indexed import Indexed
    from card_megatron.data.rearrange import split

    shares = _shares(options.shares)
    with _progress("splitting", Indexed(options.prefix).tokens) as progress:
        parts = split(options.prefix, shares, options.output, _seed(options), progress)
    for name, manifest in parts.items():
        _print_written(f"{options.output}_{name}", manifest)


def shuffle_data(options: argparse.Namespace) -> None:
    from card_megatron.data.indexed import Indexed
    from card_megatron.data.rearrange import moved_by_shuffle, shuffle

    with _progress("shuffling", moved_by_shuffle(Indexed(options.prefix))) as progress:
        manifest = shuffle(options.prefix, options.output, _seed(options), progress)
    _print_written(options.output, manifest)


def _print_written(prefix: Path | str, manifest: dict[str, Any]) -> None:
    print(f"{prefix}.bin/.idx: {manifest['documents']:,} documents, {manifest['tokens']:,} tokens")


def _shares(given: str) -> list[float]:
    try:
        shares = [float(share) for share in given.split(",")]
    except ValueError:
        shares = []
    if len(shares) != 3 or not all(0 <= share < float("inf") for share in shares) or not sum(shares):
        raise ConfigError(f"--shares={given} is not three shares such as 98,1,1 (train, valid, test)")
    return shares


def _seed(options: argparse.Namespace) -> int:
    if options.seed < 0:
        raise ConfigError(f"--seed={options.seed} must be 0 or more")
    return options.seed


# ---------------------------------------------------------------- sample, epochs


def show_samples(options: argparse.Namespace) -> None:
    from card_megatron.config.load import config_parser, load_config, rank_count

    parser = config_parser("card data sample", SAMPLE)
    parser.add_argument("--nproc", type=rank_count, help="Ranks of the run; none is one replica of the model.")
    parser.add_argument("--count", type=_at_least(1), default=2, help="Samples to show.")
    parser.add_argument("--start", type=_at_least(0), default=0, help="The first of them, in the order of the run.")
    parser.add_argument("--split", default="train", help="train, validation/NAME or test/NAME.")
    parser.add_argument("--weights", action="store_true", help="A line for every prediction, with its weight.")
    parser.add_argument("--picture", type=Path, help="SVG file to draw: rows are samples, columns are positions.")
    config, given = load_config(options.arguments, parser)
    if given.picture and given.picture.suffix != ".svg":
        raise ConfigError(f"--picture={given.picture} does not end in .svg, which is what is drawn")
    config, tokenizer = _checked(config, given.nproc)
    with _alone():
        from card_megatron.data.picture import draw, print_samples, read_samples

        samples = read_samples(config, tokenizer, given.split, given.start, given.count)
    _print_any_text()
    print_samples(samples, with_weights=given.weights)
    if given.picture:
        given.picture.parent.mkdir(parents=True, exist_ok=True)
        given.picture.write_text(draw(samples, f"{given.split}: what {config.objective.name} trains on"), "utf-8")
        print(f"picture: {given.picture}")


def show_epochs(options: argparse.Namespace) -> None:
    from card_megatron.config.load import config_parser, load_config, rank_count

    parser = config_parser("card data epochs", EPOCHS)
    parser.add_argument("--nproc", type=rank_count, help="Ranks of the run; none is one replica of the model.")
    parser.add_argument(
        "--limit", type=_epochs, default=4.0, help="Warn of sources that are read more often than this."
    )
    config, given = load_config(options.arguments, parser)
    if config.data.mock:
        raise ConfigError("data.mock=true has no sources whose epochs could be counted; give data.train")
    config, _ = _checked(config, given.nproc)
    from card_megatron.data.inspect import blend_sources

    sources, length = blend_sources(config), config.data.sequence_length
    total = sum(source.samples for source in sources)
    width = max(len("source"), *(len(source.prefix) for source in sources))
    print(f"{'source':<{width}}{'tokens':>20}{'weight':>9}{'samples':>16}{'share':>9}{'tokens drawn':>20}{'epochs':>9}")
    for source in sources:
        print(
            f"{source.prefix:<{width}}{source.tokens:>20,}{source.weight:>9.4f}{source.samples:>16,}"
            f"{source.samples / total:>9.2%}{source.samples * length:>20,}{source.epochs:>9.2f}"
        )
    tokens = sum(source.tokens for source in sources)
    print(
        f"{'run':<{width}}{tokens:>20,}{1:>9.4f}{total:>16,}{1:>9.2%}"
        f"{total * length:>20,}{total * length / tokens:>9.2f}"
    )
    for source in sources:
        if source.epochs > given.limit:
            print(
                f"warning: {source.prefix} is read {source.epochs:.2f} times, more often than --limit {given.limit:g}; "
                "give it a smaller weight or more text, or shorten the run"
            )


def _at_least(least: int) -> Callable[[str | int], int]:
    """The type of a whole number; jsonargparse also asks it about a value that is one already."""

    def whole_number(value: str | int) -> int:
        if not str(value).isdecimal() or int(value) < least:
            raise argparse.ArgumentTypeError(f"{value!r} is not a whole number of at least {least}")
        return int(value)

    return whole_number


def _epochs(value: str | float) -> float:
    try:
        return float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{value!r} is not a number of epochs; give one such as 4") from None


def _checked(config: RunConfig, nproc: int | None) -> tuple[RunConfig, Tokenizer]:
    """Refuse what training would refuse, but for the machine: data may be looked at where no GPU is."""
    from card_megatron.config.checks import check
    from card_megatron.config.derived import model_parallel_size
    from card_megatron.data.preprocess import refuse_unusable
    from card_megatron.platform import capabilities, install
    from card_megatron.training.preflight import resolve_vocabulary

    capabilities()  # looked at before install(), which answers for CUDA
    install()
    config, tokenizer = resolve_vocabulary(config)
    replica = model_parallel_size(config.parallel) * config.parallel.expert_model_parallel_size
    check(config, world_size=nproc or replica, cuda=True, transformer_engine=True)
    assert tokenizer is not None, "check() demands a tokenizer or mock data"
    refuse_unusable(config.data, tokenizer)
    return config, tokenizer


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """A process group of this process, which Megatron's blends ask for their rank."""
    import torch.distributed as dist

    from card_megatron.platform import Ranks, init_process_group

    is_there = dist.is_initialized()
    init_process_group(Ranks())
    try:
        yield
    finally:
        if not is_there:
            dist.destroy_process_group()
