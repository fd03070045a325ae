"""`card study run --slurm`: each run of a study as a job, and its evaluations as jobs that follow it."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Sequence

from card_megatron.commands import launch
from card_megatron.commands.study_checks import check_evaluations
from card_megatron.config.errors import ConfigError
from card_megatron.evaluation.report import write_json
from card_megatron.launch.slurm import submit
from card_megatron.study.definition import Study, StudyRun
from card_megatron.study.execute import evaluation_arguments, is_done, is_trained
from card_megatron.study.record import evaluation_path, is_evaluated, note_origin

REFUSED = {
    **dict.fromkeys(("--array", "--job-name", "--dependency", "--print", "--dry-run"), "a study names its own jobs"),
    # when a run ends early, the links that are left are cancelled, and what waits for the last of them waits for ever
    "--chain": "evaluations follow one job; a run that needs longer than its time limit requeues itself (--requeue)",
}
JOBS = "study_jobs.json"
"""In a run directory: the jobs that were submitted for it last."""


def submit_all(
    study: Study, runs: Sequence[StudyRun], options: list[str], *, dry_run: bool, again: bool = False
) -> None:
    """Refuses all before it submits any."""
    for name, why in REFUSED.items():
        if any(word.partition("=")[0] == name for word in options):
            raise ConfigError(f"--slurm {name}: {why}; leave it out")
    todo = [run for run in runs if not is_done(study, run, here=again)]
    check_evaluations(study, todo)
    queued = set() if dry_run else queued_jobs()
    for run in todo[:]:
        waiting = sorted(submitted(run) & queued)
        if waiting:
            print(f"{run.label}: left alone, its jobs are in the queue: {', '.join(map(str, waiting))}")
            todo.remove(run)
    jobs = {run.label: training_job(study, run, options) for run in todo if not is_trained(run)}
    for job in jobs.values():
        launch.check_training(job)
    for run in todo:
        if dry_run:
            for words in commands_of(study, run, options):
                print(f"card launch {shlex.join(words)}")
            continue
        after = None
        numbers: list[int] = []
        if run.label in jobs:
            run.run_dir.mkdir(parents=True, exist_ok=True)
            note_origin(run)
            (after,) = submit(jobs[run.label])
            numbers.append(after)
            print(f"{run.label}: job {after} trains")
        for name, words in unfinished_evaluations(study, run).items():
            arguments = evaluation_words(study, run, name, words, options)
            follows = [] if after is None else [f"--dependency=afterok:{after}"]
            numbers += submit(made([*follows, *arguments]))
            print(f"{run.label}: job {numbers[-1]} evaluates {name}")
        if numbers:
            write_json(run.run_dir / JOBS, {"jobs": numbers})
        else:
            print(f"{run.label}: everything is there; `card study run` without --slurm collects it")
    if all(is_done(study, run) for run in runs):
        print(f"{study.path}: every run is done")


def queued_jobs() -> set[int]:
    """Of this user; empty where SLURM does not say."""
    if shutil.which("squeue") is None:
        return set()
    done = subprocess.run(["squeue", "--me", "--noheader", "--format=%A"], capture_output=True, text=True, timeout=60)
    return {int(word) for word in done.stdout.split() if word.isdigit()}


def submitted(run: StudyRun) -> set[int]:
    path = run.run_dir / JOBS
    return set(json.loads(path.read_text("utf-8"))["jobs"]) if path.is_file() else set()


def unfinished_evaluations(study: Study, run: StudyRun) -> dict[str, list[str]]:
    """Those whose output is not there."""
    return {
        name: words
        for name, words in study.evaluations().items()
        if not (is_trained(run) and is_evaluated(run, evaluation_path(run, name, words), words))
    }


def commands_of(study: Study, run: StudyRun, options: list[str]) -> list[list[str]]:
    """Words of `card launch`, without the dependency, whose number is not known yet."""
    training = [] if is_trained(run) else [training_words(study, run, options)]
    return [
        *training,
        *(
            evaluation_words(study, run, name, words, options)
            for name, words in unfinished_evaluations(study, run).items()
        ),
    ]


def training_words(study: Study, run: StudyRun, options: list[str]) -> list[str]:
    return ["train", f"--job-name={study.name}-{run.label}", *options, *run.options()]


def evaluation_words(study: Study, run: StudyRun, name: str, words: list[str], options: list[str]) -> list[str]:
    """An evaluation takes the options of the job."""
    arguments = evaluation_arguments(words, run, evaluation_path(run, name, words))
    return ["eval", f"--job-name={study.name}-{run.label}-{name}", *options, *arguments]


def training_job(study: Study, run: StudyRun, options: list[str]):
    return made(training_words(study, run, options))


def made(words: list[str]):
    options, rest = launch.parser().parse_known_args(words)
    return launch.make_job(options, [word for word in rest if word != "--"], words)
