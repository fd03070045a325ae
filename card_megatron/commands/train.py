"""`card train`: train a model on this machine, or as one rank of many."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jsonargparse import ArgumentParser

from card_megatron.config.errors import ConfigError
from card_megatron.config.load import config_parser, load_config, rank_count
from card_megatron.launchers import tell_end
from card_megatron.platform import capabilities, ranks_from_environment

DESCRIPTION = """Train a model. Fields come from defaults, then --preset, then --config, then --section.key value.
Under torchrun, srun or mpirun each process is a rank; alone, --nproc N starts N of them here."""


def train_parser() -> ArgumentParser:
    parser = config_parser("card train", DESCRIPTION)
    parser.add_argument("--nproc", type=rank_count, default=1, help="Start this many ranks on this machine.")
    parser.add_argument("--init-from", help="Short for --checkpoint.init_from.")
    return parser


def run(arguments: Sequence[str]) -> None:
    config, options = load_config(arguments, train_parser())
    if options.init_from is not None:
        config = replace(config, checkpoint=replace(config.checkpoint, init_from=options.init_from))
    refuse_unwritable(config.run_dir)
    score_tasks = None
    if config.eval.tasks:
        from card_megatron.evaluation.during import DuringTraining

        score_tasks = DuringTraining(config)  # which refuses unknown tasks
    ranks = ranks_from_environment()
    if options.nproc > 1 and ranks.world_size == 1:
        from card_megatron.platform.ranks import Ranks
        from card_megatron.training.preflight import preflight

        preflight(config, Ranks(world_size=options.nproc))  # refuse once, here, rather than in every rank
        start_local_ranks(options.nproc, arguments)
    from card_megatron.training.run import train_run

    summary = train_run(config, ranks, score_tasks=score_tasks)
    if ranks.rank == 0 and "stopped" not in summary:
        tell_end()


def refuse_unwritable(run_dir: str) -> None:
    """Refuse a run_dir that cannot be made, before hours of training end in it."""
    folder = Path(run_dir).absolute()
    existing = next(path for path in (folder, *folder.parents) if os.access(path, os.F_OK))
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ConfigError(f"run_dir={run_dir}: {existing} is no folder that can be written to; choose another run_dir")


def start_local_ranks(count: int, arguments: Sequence[str], command: str = "train") -> None:
    """Become torchrun with this very command, --nproc aside; it does not return."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, capabilities().cpu_cores // count)))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    # torchrun would read --nproc, wherever it stands, as a short form of its own options
    options, skip = [], False
    for argument in arguments:
        if not skip and argument.partition("=")[0] != "--nproc":
            options.append(argument)
        skip = argument == "--nproc" and not skip  # its value follows
    sys.stdout.flush()
    os.execv(sys.executable, [*torchrun, "-m", "card_megatron", command, *options])
