"""`card status`: how a run stands, by its run directory or by its Slurm job."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from card_megatron.commands.slurm_job import is_job_id, job_facts, run_of_job
from card_megatron.config.errors import CardError
from card_megatron.training.status import Status, ago, read_status

DESCRIPTION = """Show how a run stands: step, loss, speed, time left, newest checkpoint, restarts and their reasons,
slow ranks. Reads the files of the run directory only; the run is not disturbed."""


def run(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="card status", description=DESCRIPTION)
    parser.add_argument("run", metavar="RUN|JOBID", help="a run directory, or the number of a job of `card launch`")
    parser.add_argument("--json", action="store_true", help="print one JSON object a look instead")
    parser.add_argument("--watch", type=seconds, metavar="SECONDS", help="look again this often, until it is complete")
    options = parser.parse_args(list(arguments))
    run_dir, job = Path(options.run), None
    if not run_dir.exists() and is_job_id(options.run):
        run_dir, job = run_of_job(options.run), options.run
        if not run_dir.exists():
            state = job_facts(job).get("state", "not known")
            raise CardError(f"job {job} (state {state}) has not begun its run yet: there is no {run_dir}")
    while True:
        status = read_status(run_dir)
        if job is not None or status.job is not None:
            status = with_job(status, job_facts(job or (status.job or {})["id"]))
        if options.watch and sys.stdout.isatty() and not options.json:
            print("\033[2J\033[H", end="")  # a clean screen
        print(json.dumps(dataclasses.asdict(status)) if options.json else "\n".join(lines(status)), flush=True)
        if not options.watch or status.state == "complete":
            return
        time.sleep(options.watch)


def seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} must be more than 0")
    return value


def with_job(status: Status, job: dict[str, Any]) -> Status:
    """A run that does not run is not dead while its job waits or has just been started."""
    names = {"PENDING": "queued", "CONFIGURING": "starting", "RUNNING": "starting", "COMPLETING": "ending"}
    state = names.get(job.get("state", ""))
    if state is None or status.state in ("running", "complete"):
        return dataclasses.replace(status, job=job)
    return dataclasses.replace(status, state=state, why=f"was {status.state}: {status.why}", job=job)


def lines(status: Status) -> Iterator[str]:
    """The status as a person reads it."""
    yield f"run          {status.run_dir}"
    yield f"state        {status.state}: {status.why}"
    if status.job is not None:
        known = [f"{name} {value}" for name, value in status.job.items() if name != "id" and value not in ("", "None")]
        yield f"job          {status.job['id']}{': ' if known else ''}{', '.join(known)}"
    if status.step is not None and status.steps:
        yield f"step         {status.step:,} of {status.steps:,} ({status.step / status.steps:.1%})"
        yield f"tokens       {status.tokens:,}"
        yield f"loss         {shown(status.loss)}, nll {shown(status.nll)}"
    else:
        yield "step         no record yet (logging.interval sets when the first one comes)"
    if status.validation is not None:
        losses = ", ".join(f"{name} {shown(loss)}" for name, loss in status.validation["loss"].items())
        yield f"validation   loss {losses} after step {status.validation['step']:,}"
    if status.tokens_per_second is not None:
        mfu = f", mfu {status.mfu:.1%}" if status.mfu is not None else ""
        yield f"speed        {status.tokens_per_second:,.0f} tokens/s, {status.step_seconds:.3f} s a step{mfu}"
    if status.eta_seconds is not None and status.state != "complete":
        yield f"left         {timedelta(seconds=round(status.eta_seconds))} of training"
    if status.checkpoint is not None:
        saved = status.checkpoint
        yield f"checkpoint   step {saved['step']:,}, {ago(saved['time'])}: {saved['path']}"
    else:
        yield "checkpoint   none yet"
    yield f"restarts     {len(status.restarts)}"
    for restart in status.restarts[-5:]:
        yield f"               {ago(restart['time'])}, from step {restart['step']:,}: {restart['reason']}"
    if status.skipped_steps:
        yield f"skipped      {status.skipped_steps} steps with a non-finite loss or gradient (events.jsonl has them)"
    yield f"slow ranks   {'none named' if not status.stragglers else status.stragglers[0]}"
    for straggler in status.stragglers[1:]:
        yield f"             {straggler}"


def shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
