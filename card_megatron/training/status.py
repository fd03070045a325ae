"""How a run stands, from the files of its run directory alone: no torch, so that asking is quick."""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from card_megatron.checkpoint import folder
from card_megatron.config.errors import CardError

TAIL_BYTES = 1 << 20
"""Of metrics.jsonl, which grows with the run, only the end is read."""
ALIVE_SECONDS = 60.0
"""Heartbeats are written every few seconds: a rank that has been silent for this long does not live."""


@dataclass
class Status:
    """What `card status` shows; None or empty where the run has not come so far."""

    run_dir: str
    state: str
    """running, complete, stopped, dead or new."""
    why: str
    """The state in a few words more."""
    step: int | None = None
    steps: int | None = None
    tokens: int | None = None
    loss: float | None = None
    nll: float | None = None
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    eta_seconds: float | None = None
    """Seconds of training that are left; of a run that runs, counted from now."""
    validation: dict[str, Any] | None = None
    """{"step": …, "loss": {set: loss}}"""
    checkpoint: dict[str, Any] | None = None
    """{"step", "path", "time"} of the newest one."""
    skipped_steps: int = 0
    restarts: list[dict[str, Any]] = field(default_factory=list)
    """{"time", "step", "reason"} of every start after the first."""
    stragglers: list[str] = field(default_factory=list)
    job: dict[str, Any] | None = None
    """{"id", "state", …} where Slurm knows the run's job."""


def read_status(run_dir: str | Path) -> Status:
    """Look at a run directory; raises CardError where there is no run."""
    run_dir = Path(run_dir)
    events, decisions = (list(json_lines(run_dir / name)) for name in ("events.jsonl", "restarts.jsonl"))
    if not run_dir.is_dir() or not (events or decisions or (run_dir / "config.yaml").is_file()):
        files = "neither events.jsonl, nor config.yaml, nor a job's restarts.jsonl"
        found = "no folder" if not run_dir.exists() else f"no run: there is {files} in it"
        raise CardError(f"{run_dir} is {found}; give the run_dir of a `card train`, or the number of its Slurm job")
    records = list(json_lines(run_dir / "metrics.jsonl", tail=TAIL_BYTES))
    state, why = state_of(run_dir, events, decisions)
    status = Status(str(run_dir), state, why)
    _take_record(status, [record for record in records if "tokens_per_second" in record], run_dir)
    validations = [record for record in records if "validation" in record]
    if validations:
        losses = {name: metrics.get("loss") for name, metrics in validations[-1]["validation"].items()}
        status.validation = {"step": validations[-1]["step"], "loss": losses}
    status.checkpoint = newest_checkpoint(run_dir)
    status.skipped_steps = len({event["step"] for event in events if event["event"] == "bad_step"})
    status.restarts = restarts_of(events, decisions)
    status.stragglers = stragglers_of(events)
    starts = [event for event in events if event["event"] == "started"]
    jobs = sorted((line["time"], str(line["job_id"])) for line in (*starts, *decisions) if "job_id" in line)
    status.job = {"id": jobs[-1][1]} if jobs else None
    return status


def json_lines(path: Path, tail: int | None = None) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file that may be written to at this moment: what is cut or broken is left out."""
    try:
        with path.open("rb") as file:
            if tail is not None:
                file.seek(max(0, os.fstat(file.fileno()).st_size - tail))
            lines = file.read().split(b"\n")
    except OSError:
        return
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value


def read_json(path: Path) -> dict[str, Any] | None:
    """The object of a JSON file; None where there is none."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _take_record(status: Status, records: list[dict[str, Any]], run_dir: Path) -> None:
    if not records:
        return
    last = records[-1]
    status.step, status.steps, status.tokens = last["step"], last["steps"], last["consumed_tokens"]
    for name in ("loss", "nll", "step_seconds", "tokens_per_second", "mfu", "eta_seconds"):
        setattr(status, name, last.get(name))
    if status.state == "running" and status.eta_seconds is not None:
        since = time.time() - (run_dir / "metrics.jsonl").stat().st_mtime
        status.eta_seconds = max(0.0, status.eta_seconds - max(0.0, since))


# ---------------------------------------------------------------- does it run?


def state_of(
    run_dir: Path, events: list[dict[str, Any]], decisions: list[dict[str, Any]] | None = None
) -> tuple[str, str]:
    """(state, why): the lock and the heartbeats say whether it runs, the other files how it ended."""
    beats = [beat for path in (run_dir / "heartbeats").glob("rank_*.json") if (beat := read_json(path)) is not None]
    alive = [beat for beat in beats if beat["doing"] != "ended" and time.time() - beat["time"] < ALIVE_SECONDS]
    holder = lock_holder(run_dir)
    here = f" on {socket.gethostname()}"
    held = is_locked(run_dir / "lock")
    # the lock of a process on this machine is certain; of another machine's, a file system may know nothing
    if held or (alive and not (held is False and holder.endswith(here))):
        doing = f"{alive[0]['doing']} at step {alive[0]['step']}, " if alive else ""
        return "running", f"{doing}{holder or 'heartbeats are fresh'}"
    stopped, summary = read_json(run_dir / "stopped.json"), read_json(run_dir / "summary.json")
    last = next((event["event"] for event in reversed(events) if event["event"] in ("finished", "started")), None)
    decision = decisions[-1] if decisions else None
    started = max((int(event["time"]) for event in events if event["event"] == "started"), default=0)
    if decision is not None and decision["time"] >= started and decision["reason"] != "finished":
        if not decision["requeued"]:
            return "stopped", f"{decision['reason']} (step {decision['step']:,}, {ago(decision['time'])})"
        return "dead", f"to be started again: {decision['reason']} (step {decision['step']:,}, {ago(decision['time'])})"
    if stopped is not None:
        return "stopped", f"by {stopped['reason']} at step {stopped['step']:,}, {ago(stopped['time'])}"
    if last == "finished" and summary is not None:
        return "complete", f"{summary['steps']:,} steps in {summary['seconds'] / 3600:.2f} hours"
    if last is None:
        return "new", "it has not started yet"
    seen = max([beat["time"] for beat in beats] + [event["time"] for event in events[-1:]])
    left = (
        " after it had ended itself (its log says why)" if beats and all(b["doing"] == "ended" for b in beats) else ""
    )
    return "dead", f"no process has it, and it left no word{left}; last sign of life {ago(seen)}"


def lock_holder(run_dir: Path) -> str:
    """Who holds, or last held, the run: "process 12 on node3"."""
    try:
        return (run_dir / "lock").read_text().strip()
    except OSError:
        return ""


def is_locked(path: Path) -> bool | None:
    """True while a run holds the lock; None where that cannot be known. The lock itself is not touched."""
    import fcntl

    question = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)  # struct flock of 64-bit Linux
    try:
        with path.open("r+b") as file:
            answer = fcntl.fcntl(file, fcntl.F_GETLK, question)
    except OSError:
        return None
    return struct.unpack("hhqqi", answer)[0] != fcntl.F_UNLCK


# ---------------------------------------------------------------- what happened to it


def newest_checkpoint(run_dir: Path) -> dict[str, Any] | None:
    found = folder.visible(run_dir)
    if not found:
        return None
    return {"step": folder.step_of(found[0]), "path": str(found[0]), "time": found[0].stat().st_mtime}


def restarts_of(events: list[dict[str, Any]], decisions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every start after the first, and why it was needed: by the launcher's word, or else by the run's own.

    A start that died before it could say anything is known to the launcher alone.
    """
    restarts = [
        {"time": line["time"], "step": line["step"], "reason": line["reason"]} for line in decisions if line["requeued"]
    ]
    attempt: list[dict[str, Any]] = []
    own: dict[str, Any] | None = None  # the restart that only events tell of
    for event in events:
        if event["event"] == "started" and attempt:
            # the launcher's clock has whole seconds
            known = [line for line in decisions if int(attempt[0]["time"]) <= line["time"] <= event["time"]]
            own = None
            if not any(line["requeued"] for line in known):
                own = {"time": event["time"], "step": 0, "reason": known[-1]["reason"] if known else end_of(attempt)}
                restarts.append(own)
        if event["event"] == "started":
            attempt = []
        if event["event"] == "resumed" and own is not None:
            own["step"] = event["step"]
        attempt.append(event)
    return sorted(restarts, key=lambda restart: restart["time"])


def end_of(attempt: list[dict[str, Any]]) -> str:
    """How one start of a run ended, by its own events."""
    for event in reversed(attempt):
        if event["event"] == "stopped":
            return f"asked to end by {event['reason']}"
        if event["event"] == "finished":
            return "was complete, and extended"
    return "ended without a word (killed, crashed or hung: see its log and heartbeats/)"


def stragglers_of(events: list[dict[str, Any]]) -> list[str]:
    """Those that are slow still."""
    slow: dict[tuple[int, ...], str] = {}
    for event in events:
        if event["event"] == "started":
            slow = {}
        elif event["event"] == "straggler":
            slow[tuple(event["ranks"])] = event["text"]
        elif event["event"] == "straggler_over":
            slow.pop(tuple(event["ranks"]), None)
    return list(slow.values())


def ago(moment: float) -> str:
    """A time in the past, in one unit."""
    seconds = max(0.0, time.time() - moment)
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} seconds ago"
