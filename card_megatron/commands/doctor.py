"""`card doctor`: is this machine, or this cluster, fit for a run?"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from card_megatron.config.errors import CardError
from card_megatron.planning.doctor.check import Check, Findings, merge, worst
from card_megatron.planning.doctor.examine import Order, examine_all, examine_here, speed_here

DESCRIPTION = """Look for what would spoil a run, before it costs GPU hours: versions that do not fit, sick GPUs, small
limits, slow or full disks; with --distributed also names, clocks, a run directory that is not shared, and the bandwidth
of every kind of link. Exits with 1 where something fails."""
EXAMPLES = """examples:
  card doctor --run-dir runs/card
  card doctor --distributed --nproc 2
  srun --ntasks-per-node=8 card doctor --distributed --expect-gpus 8 --expect-ranks 128 --run-dir /shared/runs/card"""
COLORS = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def run(arguments: Sequence[str]) -> None:
    options = make_parser().parse_args(list(arguments))
    order = Order(
        run_dir=Path(options.run_dir),
        storage_mb=options.storage_mb,
        network_mb=options.network_mb,
        expect_gpus=options.expect_gpus,
        expect_ranks=options.expect_ranks,
    )
    rank, findings = examine(options, order, arguments)
    checks = merge(findings)
    if rank != 0:  # rank 0 speaks for all, unless they could not talk to each other
        sys.exit(1 if len(findings) == 1 and worst(checks) == "fail" else 0)
    if options.json:
        print(
            json.dumps({"verdict": worst(checks), "checks": [dataclasses.asdict(check) for check in checks]}, indent=2)
        )
    else:
        show(checks, findings)
    sys.stdout.flush()
    sys.exit(1 if worst(checks) == "fail" else 0)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="card doctor",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--run-dir", default="runs", help="where runs are to be written (default: runs)")
    parser.add_argument("--distributed", action="store_true", help="as one rank of torchrun or srun, or with --nproc")
    parser.add_argument("--nproc", type=at_least_one, default=1, help="with --distributed: start this many ranks here")
    parser.add_argument("--expect-gpus", type=int, metavar="N", help="fail where a host has another number of GPUs")
    parser.add_argument("--expect-ranks", type=int, metavar="N", help="fail where there are not so many ranks")
    parser.add_argument(
        "--storage-mb", type=at_least_one, default=64, help="size of the file that is written (default: 64)"
    )
    parser.add_argument("--network-mb", type=at_least_one, default=64, help="size of the messages (default: 64)")
    parser.add_argument(
        "--timeout", type=float, default=120.0, help="seconds that ranks wait for each other (default: 120)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    return parser


def at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def examine(options: argparse.Namespace, order: Order, arguments: Sequence[str]) -> tuple[int, list[Findings]]:
    """(this rank, everybody's findings)."""

    def say(what: str) -> None:
        if rank == 0:
            print(f"looking at {what} ...", file=sys.stderr, flush=True)

    rank, host = int(os.environ.get("RANK", 0)), socket.gethostname()
    if not options.distributed:
        checks = examine_here(order, say)
        speed = speed_here()
        return rank, [Findings(rank, host, tuple([*checks, *([speed[1]] if speed is not None else [])]))]

    from card_megatron.platform import init_process_group, ranks_from_environment

    ranks = ranks_from_environment()
    rank = ranks.rank
    if ranks.world_size == 1 and options.nproc == 1 and options.expect_ranks in (None, 1):
        raise CardError(
            "--distributed found one rank only; start it with torchrun or srun, or give --nproc 2 to try two ranks here"
        )
    if ranks.world_size == 1 and options.nproc > 1:
        from card_megatron.commands.train import start_local_ranks

        start_local_ranks(options.nproc, arguments, command="doctor")
    import torch.distributed as dist

    try:
        init_process_group(ranks, timeout_minutes=options.timeout / 60)
        return rank, examine_all(order, say)
    except (RuntimeError, OSError, ValueError) as error:  # what torch.distributed raises
        return rank, [Findings(rank, host, (*examine_here(order, say), broken(rank, host, error)))]
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def broken(rank: int, host: str, error: Exception) -> Check:
    """Ranks that cannot talk: said by each of them, as nobody can gather anything."""
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    print(f"rank {rank} on {host}: {reason}", file=sys.stderr, flush=True)
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    remedy = f"can every host reach {address}? See firewalls and NCCL_SOCKET_IFNAME/GLOO_SOCKET_IFNAME; NCCL_DEBUG=INFO"
    return Check("network", "process group", reason, "all ranks reach each other", "fail", remedy)


def show(checks: Sequence[Check], findings: Sequence[Findings]) -> None:
    """The table, and one line to end with."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # a log file has no width of its own
    console = Console(width=None if sys.stdout.isatty() else 160)
    table = Table("", "check", "found", "expected", pad_edge=False)
    for check in checks:
        found = f"{check.value} ({check.where})" if check.where else check.value
        mark = Text(check.verdict, style=COLORS[check.verdict])
        table.add_row(mark, check.name, Text(found), Text(check.expected))
    console.print(table)
    for check in checks:
        if check.remedy:
            line = Text.assemble((check.verdict, COLORS[check.verdict]), f" {check.name}: {check.remedy}")
            console.print(line, soft_wrap=True)
    hosts = dict.fromkeys(rank.host for rank in findings)
    counts = {verdict: sum(check.verdict == verdict for check in checks) for verdict in COLORS}
    console.print(
        f"{len(findings)} rank{'s' * (len(findings) > 1)} on {len(hosts)} host{'s' * (len(hosts) > 1)}: "
        f"{counts['ok']} ok, {counts['warn']} warn, {counts['fail']} fail",
        highlight=False,
    )
