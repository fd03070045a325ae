"""`card study`: a grid of runs, trained, evaluated and reported."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from card_megatron.commands.eval_options import at_least
from card_megatron.config.errors import ConfigError

if TYPE_CHECKING:
    from card_megatron.study.definition import Study, StudyRun
    from card_megatron.study.execute import Progress

DESCRIPTION = """A study is a YAML file that declares a grid of runs (configuration, changes, seeds), their evaluations
and the columns of a report. `run` trains and evaluates what is not finished, several runs at a time; it may be
stopped and started again at any moment. It ends with 1 where a run failed, with 3 where something is left to do. Each
finished run leaves a JSON file, all that `report` needs."""
SLURM = """submit each run as a job instead, and its evaluations as one that follows it; all options behind it are
those of `card launch`: --slurm --nodes 1 --gpus-per-node 8. Start `card study run` once more when they have ended."""
LINE_SECONDS = 60.0
"""Between two lines of progress where there is no terminal."""
NOT_COMPLETE = 3
"""Exit code of a run that was stopped, or that left runs to others: `card study run X && card study report X` waits."""
BEGIN, END = "<!-- card study report {name} -->", "<!-- end of {name} -->"


def run(arguments: Sequence[str]) -> None:
    words, launch = split_slurm([*arguments])
    options = parser().parse_args(words)
    if launch is not None and options.what != "run":
        raise ConfigError(f"--slurm submits runs; it has no meaning for `card study {options.what}`")
    if options.what == "run":
        refuse_mixed(options, launch is not None)
    from card_megatron.study.reading import read_study

    study = read_study(options.study)
    if options.what == "report":
        return write_report(study, options)
    runs = study.grid(options.only)
    if options.what == "status":
        return show_status(study, runs)
    if launch is not None:
        from card_megatron.commands.study_jobs import submit_all

        return submit_all(study, runs, launch, dry_run=options.dry_run, again=options.again)
    execute(study, runs, options)


def split_slurm(words: list[str]) -> tuple[list[str], list[str] | None]:
    """The options of the study, and those behind --slurm."""
    if "--slurm" not in words:
        return words, None
    place = words.index("--slurm")
    return words[:place], words[place + 1 :]


def refuse_mixed(options: argparse.Namespace, slurm: bool) -> None:
    if options.slurm is not None:
        raise ConfigError("--slurm takes no value of its own; write --slurm and the options of `card launch` behind it")
    for name in ("jobs", "threads", "minutes"):
        if slurm and getattr(options, name) is not None:
            raise ConfigError(f"--{name} is of runs on this machine; with --slurm each run is a job: leave it out")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="card study", description=DESCRIPTION)
    parts = made.add_subparsers(dest="what", required=True, metavar="run|status|report")
    go = parts.add_parser(
        "run", help="train and evaluate what is not finished", description=DESCRIPTION, allow_abbrev=False
    )
    go.add_argument("--jobs", type=at_least(1), help="runs at a time on this machine (default: 1)")
    go.add_argument("--threads", type=at_least(1), help="of each (default: the cores, shared among --jobs)")
    go.add_argument("--minutes", type=float, help="then save, stop and leave the rest to the next start")
    go.add_argument(
        "--again",
        action="store_true",
        help="also train what has a record but was not trained in this folder; the record is then written anew",
    )
    go.add_argument("--dry-run", action="store_true", help="check every run, and show what would be done")
    go.add_argument("--slurm", nargs=argparse.REMAINDER, help=SLURM)
    status = parts.add_parser("status", help="how the runs stand")
    made_report = parts.add_parser("report", help="tables and curves of what is finished")
    made_report.add_argument("--output", type=Path, metavar="DIR", help="default: reports, beside the study")
    made_report.add_argument(
        "--into", type=Path, metavar="PAGE.md", help="also replace the study's part of this page, between its marks"
    )
    for part in (go, status, made_report):
        part.add_argument("study", type=Path, metavar="STUDY.yaml")
    for part in (go, status):
        part.add_argument(
            "--only",
            nargs="+",
            action="extend",
            default=[],
            metavar="RUN",
            help="names, or NAME-sSEED, behind the file; before --slurm",
        )
    return made


# ---------------------------------------------------------------- run


def execute(study: Study, runs: list[StudyRun], options: argparse.Namespace) -> None:
    from card_megatron.commands.study_checks import check_evaluations, check_runs
    from card_megatron.study.execute import Executor

    if options.minutes is not None and not options.minutes > 0:
        raise ConfigError(f"--minutes {options.minutes} must be more than 0")
    jobs = options.jobs or 1
    threads = options.threads or max(1, (os.cpu_count() or 1) // jobs)
    executor = Executor(study, runs, jobs=jobs, threads=threads, minutes=options.minutes, again=options.again)
    if executor.todo:
        check_runs(executor.todo)
        check_evaluations(study, executor.todo)
    if options.dry_run:
        for item in executor.progress:
            print(f"{item.run.label:<24} {item.state:<8} card train {shlex.join(item.run.options())}")
            if item.why:
                print(f"{'':<24} {item.why}")
        return
    if not executor.todo:
        print(
            f"{study.path}: every run has its record in {study.result_path(runs[0]).parent}; --again trains them here "
            "once more"
        )
        return
    for item in executor.progress:
        if item.why:
            print(f"{item.run.label}: {item.why}", file=sys.stderr)
    with shown_progress() as show:
        complete = executor.run(show)
    for state in ("failed", "elsewhere"):
        for item in executor.progress:
            if item.state == state:
                print(f"{item.run.label} {state}: {item.why}", file=sys.stderr)
    words = "complete" if complete else "not complete: the same command goes on"
    print(f"{study.path}: {words}; card study report {study.path}")
    if not complete:
        sys.exit(1 if any(item.state == "failed" for item in executor.progress) else NOT_COMPLETE)


@contextmanager
def shown_progress() -> Iterator[Callable[[Sequence[Progress]], None]]:
    """A live table on a terminal; else a line for every change, and one a minute."""
    if not sys.stdout.isatty():
        yield line_printer()
        return
    from rich.live import Live

    with Live(refresh_per_second=2) as live:
        yield lambda items: live.update(progress_table(items))


def line_printer() -> Callable[[Sequence[Progress]], None]:
    known: dict[str, str] = {}
    last = time.monotonic()

    def show(items: Sequence[Progress]) -> None:
        nonlocal last
        due = time.monotonic() - last > LINE_SECONDS
        for item in items:
            if known.get(item.run.label) != item.state or (due and item.state == "training"):
                known[item.run.label] = item.state
                print(" ".join(word for word in (item.run.label, item.state, *how_far(item)) if word), flush=True)
        if due:
            last = time.monotonic()

    return show


def progress_table(items: Sequence[Progress]):
    from rich.table import Table

    table = Table()
    for column in ("run", "state", "step", "loss", "left"):
        table.add_column(column)
    for item in items:
        table.add_row(item.run.label, item.state, *how_far(item))
    return table


def how_far(item: Progress) -> tuple[str, str, str]:
    """Step, loss and time left of a run, where there is something to say."""
    from card_megatron.config.errors import CardError
    from card_megatron.training.status import read_status

    try:
        status = read_status(item.run.run_dir)
    except CardError:
        return "", "", ""
    step = "" if status.step is None else f"{status.step}/{status.steps}"
    loss = "" if status.loss is None else f"loss {status.loss:.4f}"
    left = "" if status.eta_seconds is None or item.state != "training" else f"{status.eta_seconds / 60:.0f} min left"
    return step, loss, left


def show_status(study: Study, runs: list[StudyRun]) -> None:
    from rich.console import Console

    from card_megatron.study.execute import Progress, state_of

    items = [Progress(run, state_of(study, run)) for run in runs]
    Console().print(progress_table(items))
    print(f"{sum(item.state == 'done' for item in items)} of {len(items)} runs are done")


# ---------------------------------------------------------------- report


def write_report(study: Study, options: argparse.Namespace) -> None:
    from card_megatron.evaluation.report import write_json, write_text
    from card_megatron.study.findings import read_findings, unknown_metrics
    from card_megatron.study.pictures import draw
    from card_megatron.study.report import report
    from card_megatron.study.summary import summary

    if options.into is not None:
        with_part(options.into, study.name, "")  # refuses a page without its marks before anything is written
    folder = options.output or study.path.parent / "reports"
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--output {folder} is a file; name the folder that the page and its pictures go into")
    findings = read_findings(study)
    folder.mkdir(parents=True, exist_ok=True)
    for name, near in unknown_metrics(findings).items():
        print(f"no record of {study.path} has {name!r}{near}", file=sys.stderr)
    pictures = draw(findings, folder)
    page = folder / f"{study.name}.md"
    text = report(findings, pictures)
    write_text(page, text)
    write_json(page.with_suffix(".json"), summary(findings))
    print(text, end="")
    if options.into is not None:
        beside = {name: os.path.relpath(folder / file, options.into.parent) for name, file in pictures.items()}
        write_text(options.into, with_part(options.into, study.name, report(findings, beside)))
    print(f"\nwritten to {page}", file=sys.stderr)


def with_part(page: Path, name: str, part: str) -> str:
    """The page with its part of this study replaced."""
    begin, end = (mark.format(name=name) for mark in (BEGIN, END))
    text = page.read_text("utf-8") if page.is_file() else ""
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ConfigError(
            f"--into {page} needs one line {begin!r} and behind it one {end!r}: the part goes between them"
        )
    before, after = text.split(begin)[0], text.split(end)[1]
    return f"{before}{begin}\n{part}{end}{after}"
