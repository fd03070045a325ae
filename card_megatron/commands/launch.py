"""`card launch`: train, data, convert or eval as a job of SLURM."""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from card_megatron.config.errors import ConfigError
from card_megatron.launch.environment import KINDS
from card_megatron.launch.job import ARRAY_TASK, Container, Job, absolute, parse_options
from card_megatron.launch.script import fill_array_task, render
from card_megatron.launch.slurm import submission_options, submit

DESCRIPTION = """Render an sbatch script that runs `card KIND` with all options that are not listed below; submit it.
A training run saves before its time limit, when it is preempted and when it is cancelled; after all of these but the
last, and after the loss of a rank or a node, it is requeued and goes on at the very step. See docs/cluster.md."""
EPILOG = f"""{ARRAY_TASK} in an option of `card KIND` is the number of the array's task:
  card launch train --config X.yaml --gpus-per-node 8 --array 1-3 --seed {ARRAY_TASK} --run_dir runs/x_{ARRAY_TASK}"""


def run(arguments: Sequence[str]) -> None:
    made = parser()
    options, rest = made.parse_known_args(list(arguments))
    job = make_job(options, [word for word in rest if word != "--"], arguments)
    notes = check_training(job) if job.kind == "train" else []
    try:
        act(options, job, notes)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough; what was submitted is submitted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def act(options: argparse.Namespace, job: Job, notes: list[str]) -> None:
    """Print, describe or submit."""
    if options.print:
        print(render(job), end="")
    elif options.dry_run:
        print("\n".join([*describe(job), *notes]))
    else:
        for note in notes:
            print(note, file=sys.stderr)
        report(job, submit(job))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="card launch",
        description=DESCRIPTION,
        epilog=EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("kind", choices=KINDS, metavar="KIND", help=f"the command that runs: {', '.join(KINDS)}")
    made.add_argument("--print", action="store_true", help="print the script instead of submitting it")
    made.add_argument("--dry-run", action="store_true", help="show what would run, and where every rank would stand")
    where = made.add_argument_group("where")
    where.add_argument("--nodes", type=int, default=1, help="default: 1")
    where.add_argument("--gpus-per-node", type=int, metavar="N", help="0 for nodes without; train and eval must say")
    where.add_argument("--ranks-per-node", type=int, metavar="N", help="default: one a GPU, or one")
    where.add_argument("--cpus-per-rank", type=int, metavar="N", help="cores of a rank and its data workers")
    for name in ("partition", "account", "qos", "constraint", "exclude", "reservation"):
        where.add_argument(f"--{name}", help="as sbatch has it")
    when = made.add_argument_group("when, and what becomes of it")
    when.add_argument("--time", help="the limit of one job, as sbatch has it: 24:00:00, 2-12")
    when.add_argument(
        "--signal",
        type=signal_seconds,
        default=300,
        metavar="SECONDS",
        help="training saves this long before the limit, at least as long as a save takes (default: 300)",
    )
    when.add_argument(
        "--requeue",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="start again after interruptions (default: yes)",
    )
    when.add_argument(
        "--max-restarts", type=int, default=3, metavar="N", help="in a row without a new checkpoint (default: 3)"
    )
    when.add_argument("--chain", type=int, default=1, metavar="N", help="N jobs that follow one another (singleton)")
    when.add_argument("--array", help="tasks, as sbatch has it")
    when.add_argument("--dependency", help="as sbatch has it")
    what = made.add_argument_group("what it runs in")
    what.add_argument("--venv", help="virtual environment (default: this one); - for none")
    what.add_argument("--module", action="append", default=[], metavar="NAME", help="module load; may be repeated")
    what.add_argument("--container", metavar="IMAGE", help="image that the ranks run in")
    what.add_argument(
        "--container-runtime",
        choices=["pyxis", "apptainer"],
        default="pyxis",
        help="pyxis (Enroot; default) or apptainer",
    )
    what.add_argument("--mount", action="append", default=[], metavar="SOURCE:TARGET", help="may be repeated")
    what.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="may be repeated")
    what.add_argument(
        "--interface", metavar="NAME", help="network interface by which ranks find each other, such as ib0"
    )
    what.add_argument(
        "--mpi",
        choices=["pmix", "pmi2", "mpirun"],
        default="pmix",
        help="how `card data build` gets its ranks (default: pmix)",
    )
    other = made.add_argument_group("anything else")
    other.add_argument("--job-name", help="default: the run's folder, or card_KIND")
    other.add_argument("--comment", help="default for train: card:RUN_DIR, by which `card status` finds the run")
    other.add_argument("--sbatch", action="append", default=[], metavar="OPTION[=VALUE]", help="any option of sbatch")
    other.add_argument("--srun", action="append", default=[], metavar="OPTION[=VALUE]", help="any option of srun")
    return made


def signal_seconds(text: str) -> int:
    """300, USR1@300 or B:USR1@300."""
    match = re.fullmatch(r"(?:(?:B:)?(?:SIG)?USR1@)?(\d+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, nor USR1@SECONDS: a run saves on USR1")
    return int(match[1])


def make_job(options: argparse.Namespace, rest: list[str], written_by: Sequence[str]) -> Job:
    """The job that the options describe; Job refuses what cannot run."""
    if options.mount and not options.container:
        raise ConfigError(f"--mount {options.mount[0]} needs --container IMAGE: without one every path is as it is")
    if options.gpus_per_node is None and options.kind in ("train", "eval"):
        raise ConfigError(f"card launch {options.kind} must know --gpus-per-node; 0 says that there are none")
    if not rest:
        raise ConfigError(
            f"no options of `card {options.kind}` are given: what should it run? see card {options.kind} --help"
        )
    gpus = options.gpus_per_node or 0
    ranks_per_node = options.ranks_per_node if options.ranks_per_node is not None else max(1, gpus)
    named = {
        name: getattr(options, name) for name in ("partition", "account", "qos", "constraint", "exclude", "reservation")
    }
    named |= {"dependency": options.dependency, "comment": options.comment}
    run_dir = run_dir_of(rest, options.array) if options.kind == "train" else None
    if options.kind == "data" and rest[0] == "build" and options.nodes * ranks_per_node > 1 and "--mpi" not in rest:
        rest = [*rest, "--mpi"]
    return Job(
        kind=options.kind,
        arguments=rest,
        name=options.job_name or default_name(options.kind, run_dir, options.chain),
        nodes=options.nodes,
        ranks_per_node=ranks_per_node,
        gpus_per_node=gpus,
        cpus_per_rank=options.cpus_per_rank,
        time=options.time,
        signal_seconds=options.signal,
        requeue=options.requeue,
        max_restarts=options.max_restarts,
        chain=options.chain,
        array=options.array,
        mpi=options.mpi,
        run_dir=run_dir,
        options={name: value for name, value in named.items() if value is not None} | parse_options(options.sbatch),
        srun=[f"--{entry.removeprefix('--')}" for entry in options.srun],
        venv=venv_of(options),
        modules=options.module,
        container=Container(options.container, options.container_runtime, options.mount) if options.container else None,
        environment=dict(name_and_value(entry) for entry in options.env),
        interface=options.interface,
        written_by=f"card launch {shlex.join([word for word in written_by if word not in ('--print', '--dry-run')])}",
    )


def default_name(kind: str, run_dir: str | None, chain: int) -> str:
    """The run's folder. Jobs of a chain wait for those of their name: runs/a/base is not runs/b/base."""
    if run_dir is None:
        return f"card_{kind}"
    name = Path(run_dir.replace(f"_{ARRAY_TASK}", "")).name
    if chain == 1:
        return name
    return f"{name}-{hashlib.sha256(str(absolute(run_dir)).encode()).hexdigest()[:6]}"


def venv_of(options: argparse.Namespace) -> str | None:
    if options.venv == "-" or (options.container and options.venv is None):
        return None
    return options.venv or (sys.prefix if sys.prefix != sys.base_prefix else None)


def name_and_value(entry: str) -> tuple[str, str]:
    name, equals, value = entry.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise ConfigError(f"--env {entry!r} is not NAME=VALUE")
    return name, value


def run_dir_of(arguments: list[str], array: str | None) -> str:
    """The run directory, the array's task still to be filled in."""
    from card_megatron.config.load import option_pairs

    given = [value for option, value in option_pairs(arguments) if option == "--run_dir" and value is not None]
    return given[-1] if given else load_training(arguments, array).run_dir


def load_training(arguments: list[str], array: str | None):
    """The configuration as `card train` will load it."""
    from card_megatron.commands.train import train_parser
    from card_megatron.config.load import load_config

    config, options = load_config(fill_array_task(arguments, array), train_parser())
    if options.nproc > 1:
        raise ConfigError(
            f"--nproc {options.nproc} starts ranks on one machine; a job's are --nodes times --ranks-per-node"
        )
    return config


def check_training(job: Job) -> list[str]:
    """Refuse here what every rank would refuse after hours in the queue; returns what could not be checked."""
    from card_megatron.commands.config import tokenizer_is_elsewhere
    from card_megatron.commands.train import refuse_unwritable
    from card_megatron.config.checks import check
    from card_megatron.training.preflight import resolve_vocabulary

    config = load_training(job.arguments, job.array)
    notes = []
    if tokenizer_is_elsewhere(config):
        notes.append(f"{config.data.tokenizer} is not here: the tokenizer was not checked")
    else:
        config, _ = resolve_vocabulary(config)
    on_gpus = job.gpus_per_node > 0  # Transformer Engine is assumed there: the ranks look for themselves
    check(config, world_size=job.world_size, cuda=on_gpus, transformer_engine=on_gpus)
    if job.container is None:
        refuse_unwritable(config.run_dir)
    return notes


def describe(job: Job) -> list[str]:
    """The layout of a run, or the number of ranks; and how it would be submitted."""
    words = [
        "sbatch",
        *submission_options(job),
        *(f"--{name}" + (f"={value}" if value else "") for name, value in job.sbatch_options().items()),
    ]
    lines = [f"card {job.kind}: {job.nodes} nodes x {job.ranks_per_node} ranks = {job.world_size}", shlex.join(words)]
    if job.kind != "train":
        return lines
    from card_megatron.launch.layout import crossings, groups_of, places, table
    from card_megatron.platform import install

    install()  # before Megatron is imported, which warns of what a login node does not have
    groups = groups_of(load_training(job.arguments, job.array).parallel, job.world_size)
    return [*lines, "", table(places(groups, job.ranks_per_node)), "", *crossings(groups, job.ranks_per_node)]


def report(job: Job, numbers: list[int]) -> None:
    shown = ", ".join(map(str, numbers))
    print(
        f"submitted job{'s' * (len(numbers) > 1)} {shown}: card {job.kind} on {job.nodes} x {job.ranks_per_node} ranks"
    )
    if job.run_dir is not None:
        print(f"summary: {job.run_dir}/logs/summary.log, ranks: {job.run_dir}/logs/JOB.RESTART/rank_N.log")
        print("save and end, without a requeue: scancel --signal=TERM JOB")
    if job.chain > 1:
        print(
            f"end the whole chain (scancel JOB alone lets the next one begin): scancel --name={shlex.quote(job.name)}"
        )
