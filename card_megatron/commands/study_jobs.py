"""`card study run --slurm`: each run of a study as a job, and its evaluations as jobs that follow it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from card_megatron.commands import launch
from card_megatron.config.errors import ConfigError
from card_megatron.launch.slurm import submit
from card_megatron.study.definition import Study, StudyRun
from card_megatron.study.execute import evaluation_arguments, is_done, is_trained
from card_megatron.study.record import evaluation_path, note_origin


def submit_all(study: Study, runs: Sequence[StudyRun], options: list[str], *, dry_run: bool) -> None:
    """Refuses all before it submits any."""
    for name in ("--array", "--job-name", "--dependency", "--print", "--dry-run"):
        if any(word.partition("=")[0] == name for word in options):
            raise ConfigError(f"--slurm {name}: a study names its own jobs; leave it out")
    todo = [run for run in runs if not is_done(study, run)]
    jobs = {run.label: training_job(study, run, options) for run in todo if not is_trained(run)}
    for job in jobs.values():
        launch.check_training(job)
    for run in todo:
        if dry_run:
            for words in commands_of(study, run, options):
                print(f"card launch {shlex.join(words)}")
            continue
        after = None
        if run.label in jobs:
            run.run_dir.mkdir(parents=True, exist_ok=True)
            note_origin(run)
            # of a chain the last link: the one behind which the run is finished
            after = submit(jobs[run.label])[-1]
            print(f"{run.label}: job {after} trains")
        for name, words in study.evaluations().items():
            arguments = evaluation_words(study, run, name, words, options)
            follows = [] if after is None else [f"--dependency=afterok:{after}"]
            number = submit(made([*follows, *arguments]))[-1]
            print(f"{run.label}: job {number} evaluates {name}")
    if not todo:
        print(f"{study.path}: every run is done")


def commands_of(study: Study, run: StudyRun, options: list[str]) -> list[list[str]]:
    """Words of `card launch`, without the dependency, whose number is not known yet."""
    training = [] if is_trained(run) else [training_words(study, run, options)]
    return [
        *training,
        *(evaluation_words(study, run, name, words, options) for name, words in study.evaluations().items()),
    ]


def training_words(study: Study, run: StudyRun, options: list[str]) -> list[str]:
    return ["train", f"--job-name={study.name}-{run.label}", *options, *run.options()]


def evaluation_words(study: Study, run: StudyRun, name: str, words: list[str], options: list[str]) -> list[str]:
    """An evaluation takes the options of the job, but no chain: it is one job."""
    kept = [word for word in options if word.partition("=")[0] != "--chain"]
    arguments = evaluation_arguments(words, run, evaluation_path(run, name, words))
    return ["eval", f"--job-name={study.name}-{run.label}-{name}", *kept, *arguments]


def training_job(study: Study, run: StudyRun, options: list[str]):
    return made(training_words(study, run, options))


def made(words: list[str]):
    options, rest = launch.parser().parse_known_args(words)
    return launch.make_job(options, [word for word in rest if word != "--"], words)
