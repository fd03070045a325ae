"""`card checkpoint`: list, inspect and verify checkpoints, without a GPU and without loading a tensor."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from card_megatron.checkpoint import folder
from card_megatron.checkpoint.manifest import Manifest, problems_of, read_manifest
from card_megatron.checkpoint.source import resolve
from card_megatron.config.errors import CheckpointError


def run(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="card checkpoint", description="Look at what a run has saved.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    abouts = {
        "list": "the checkpoints of a run, newest first",
        "inspect": "layout, versions, files and tensors of a checkpoint",
        "verify": "compare every file with the manifest's size and checksum",
    }
    for name, about in abouts.items():
        command = commands.add_parser(name, help=about, description=about)
        where = "a run directory" if name == "list" else "a checkpoint, or a run directory for its newest one"
        command.add_argument("path", type=Path, help=where)
        command.set_defaults(function=globals()[f"{name}_checkpoints"])
    options = parser.parse_args(list(arguments))
    options.function(options.path)


def list_checkpoints(run_dir: Path) -> None:
    found = folder.visible(run_dir)
    if not found:
        raise CheckpointError(f"{run_dir} has no checkpoints; `card train` writes them to RUN_DIR/checkpoints")
    latest = folder.latest(folder.checkpoints_of(run_dir))
    print(f"{'checkpoint':<14}{'samples':>14}{'size':>12}  {'saved':<26}layout")
    for checkpoint in found:
        try:
            manifest = read_manifest(checkpoint)
        except CheckpointError as error:
            print(f"{checkpoint.name:<14}  {error}")
            continue
        mark = "  latest" if checkpoint.name == latest else ""
        print(
            f"{checkpoint.name:<14}{manifest.consumed_samples:>14,}{megabytes(manifest.total_bytes):>12}  "
            f"{manifest.created:<26}{layout_of(manifest)}{mark}"
        )


def inspect_checkpoints(path: Path) -> None:
    checkpoint = resolve(path)
    manifest = read_manifest(checkpoint)
    print(f"checkpoint   {checkpoint}")
    print(f"step         {manifest.step:,} ({manifest.consumed_samples:,} samples consumed)")
    print(f"model        {manifest.parameters:,} parameters{', with averaged weights' if manifest.ema else ''}")
    print(
        f"saved        {manifest.created} in {manifest.seconds:.1f} s, as {layout_of(manifest)}; any layout can load it"
    )
    print(f"versions     {', '.join(f'{name} {version}' for name, version in manifest.versions.items())}")
    print(f"files        {len(manifest.files)}, {megabytes(manifest.total_bytes)}")
    for name, entry in sorted(manifest.files.items()):
        print(f"  {name:<28}{entry['bytes']:>16,} bytes  crc32 {entry['crc32']}")
    print("tensors")
    for name, shape, dtype in tensors_of(checkpoint):
        print(f"  {name}  {list(shape)}  {dtype}")


def verify_checkpoints(path: Path) -> None:
    from tqdm import tqdm

    checkpoint = resolve(path)
    manifest = read_manifest(checkpoint)
    with tqdm(total=len(manifest.files), desc="verifying", unit=" files", disable=None) as progress:
        problems = problems_of(checkpoint, manifest, seen=lambda name: progress.update())
    if problems:
        sys.exit(f"{checkpoint} is damaged:\n  - " + "\n  - ".join(problems))
    print(f"{checkpoint}: {len(manifest.files)} files, {megabytes(manifest.total_bytes)}, all as the manifest says")


def tensors_of(checkpoint: Path) -> list[tuple[str, Sequence[int], str]]:
    """(name, shape, type) of every tensor, from Megatron's metadata: a pickle, so only for trusted checkpoints."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from card_megatron.platform import install

    install()
    try:
        metadata = FileSystemReader(str(checkpoint)).read_metadata()
    except Exception as error:
        path = checkpoint / ".metadata"
        raise CheckpointError(f"{path} cannot be read ({error}); `card checkpoint verify` tells more") from error
    return [
        (name, entry.size, str(entry.properties.dtype).removeprefix("torch."))
        for name, entry in sorted(metadata.state_dict_metadata.items())
        if isinstance(entry, TensorStorageMetadata)
    ]


def layout_of(manifest: Manifest) -> str:
    sizes = [f"{name} {size}" for name, size in manifest.layout.items() if name != "world_size" and size > 1]
    count = manifest.layout["world_size"]
    return f"{count} rank{'s' * (count > 1)}" + (f" ({', '.join(sizes)})" if sizes else "")


def megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
