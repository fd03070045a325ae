"""Trains, evaluates and records the runs of a study, several at a time, each a process of its own."""

from __future__ import annotations

import fcntl
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from card_megatron.config.errors import CardError, ConfigError
from card_megatron.evaluation.report import write_json
from card_megatron.study.definition import Study, StudyRun, data_identity
from card_megatron.study.record import collect, earlier_record, evaluation_path, is_evaluated, note_origin
from card_megatron.study.stored import read_record, record_of
from card_megatron.training.status import read_status

LOOK_SECONDS = 1.0


@dataclass
class Progress:
    """Where one run of the grid stands."""

    run: StudyRun
    state: str = "waiting"
    """waiting, training, evaluating NAME, done, stopped, elsewhere (another `card study run` has it) or failed."""
    why: str = ""


def is_done(study: Study, run: StudyRun, *, here: bool = False) -> bool:
    """Its record is there, with every evaluation that the study asks for; refuses a record of something else.

    `here`: and the run that it is of was trained in this folder.
    """
    path = study.result_path(run)
    if not path.is_file():
        return False
    config = run.load()
    record = record_of(study, run, config)
    there, declared = record.get("data"), data_identity(config)
    if there is not None and declared is not None and there != declared:
        raise ConfigError(
            f"{path} was trained on other data ({there}) than stands there now ({declared}); a study compares runs of "
            "the same data: build it again as it was, or move the records away"
        )
    if here and not (is_trained(run) and earlier_record(study, run)):
        return False
    return not missing_evaluations(study, record)


def state_of(study: Study, run: StudyRun) -> str:
    """In a word or two, of a run that nobody looks after."""
    if is_done(study, run):
        return "done"
    if study.result_path(run).is_file():
        return f"lacks {', '.join(missing_evaluations(study, read_record(study.result_path(run))))}"
    return "trained" if is_trained(run) else "not finished"


def missing_evaluations(study: Study, record: dict[str, Any] | None) -> dict[str, list[str]]:
    """Those that a record does not have, or has with other words."""
    known = {} if record is None else record["evaluations"]
    return {name: words for name, words in study.evaluations().items() if known.get(name, {}).get("arguments") != words}


def why_again(study: Study, run: StudyRun) -> str:
    """For an evaluation that its record lacks, a run that is not here is trained once more: hours, so it is said."""
    path = study.result_path(run)
    if not path.is_file() or is_trained(run):
        return ""
    missing = missing_evaluations(study, read_record(path))
    return f"trained once more, since its record has no {', '.join(missing)} and its run is not here" if missing else ""


class HeldElsewhere(ConfigError):
    """Another `card study run` has the run."""


@contextmanager
def held(run: StudyRun) -> Iterator[None]:
    """One `card study run` at a time has a run; several may share a study."""
    run.run_dir.mkdir(parents=True, exist_ok=True)
    with (run.run_dir / "study.lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise HeldElsewhere(
                f"another `card study run` has {run.run_dir}; wait for it, or leave the run out: --only"
            ) from None
        except OSError:  # a file system without locks
            pass
        yield


def refuse_no_room(folder: Path) -> None:
    """For records, before hours of training rather than after them."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"no record can be written to {folder}: {error.strerror}; give the study another `results`"
        ) from error


def is_trained(run: StudyRun) -> bool:
    try:
        return read_status(run.run_dir).state == "complete"
    except CardError:
        return False


class Executor:
    """A few workers over a queue of runs; a signal, or the end of the time, asks the processes to save and end."""

    def __init__(
        self,
        study: Study,
        runs: Sequence[StudyRun],
        *,
        jobs: int,
        threads: int,
        minutes: float | None,
        again: bool = False,
    ):
        """`again`: runs whose record is of another folder are trained here once more."""
        self.study, self.jobs, self.threads, self.minutes = study, jobs, threads, minutes
        self.progress = [Progress(run, why=why_again(study, run)) for run in runs]
        self.waiting: queue.SimpleQueue[Progress] = queue.SimpleQueue()
        for item in self.progress:
            if is_done(study, item.run, here=again):
                item.state = "done"
            else:
                self.waiting.put(item)
        self.stopping = threading.Event()
        self.processes: dict[str, subprocess.Popen] = {}
        self.lock = threading.Lock()

    @property
    def todo(self) -> list[StudyRun]:
        return [item.run for item in self.progress if item.state != "done"]

    def run(self, show: Callable[[Sequence[Progress]], None]) -> bool:
        """Until all is done or stopped; true where nothing is left to do."""
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup stays what it is
            numbers.append(signal.SIGHUP)
        handlers = {number: signal.signal(number, self._on_signal) for number in numbers}
        workers = [threading.Thread(target=self._work, daemon=True) for _ in range(self.jobs)]
        end = None if self.minutes is None else time.monotonic() + 60 * self.minutes
        refuse_no_room(self.study.path.parent / self.study.results)
        try:
            for worker in workers:
                worker.start()
            while any(worker.is_alive() for worker in workers):
                show(self.progress)
                if end is not None and time.monotonic() > end:
                    self.stop("the time is over")
                time.sleep(LOOK_SECONDS)
        finally:
            if any(worker.is_alive() for worker in workers):  # this loop broke: no run goes on without it
                self.stop("an error")
                for worker in workers:
                    worker.join()
            for number, handler in handlers.items():
                signal.signal(number, handler)
        show(self.progress)
        return all(item.state == "done" for item in self.progress)

    def stop(self, why: str) -> None:
        """Once: training saves on TERM, and a second one would end it without."""
        with self.lock:
            if self.stopping.is_set():
                return
            self.stopping.set()
            for process in self.processes.values():
                process.terminate()
        print(f"stopping ({why}): runs save first; the same command goes on", file=sys.stderr)

    def _on_signal(self, number: int, frame: object) -> None:
        # not the lock: the main thread may hold it. A thread of its own takes it when it is free.
        threading.Thread(target=self.stop, args=(signal.Signals(number).name,), daemon=True).start()

    def _work(self) -> None:
        while not self.stopping.is_set():
            try:
                item = self.waiting.get_nowait()
            except queue.Empty:
                return
            try:
                with held(item.run):
                    self._finish(item)
                item.state, item.why = "done", ""
            except _Stopped:
                item.state = "stopped"
            except HeldElsewhere as error:  # several may share a study: the other one records it
                item.state, item.why = "elsewhere", str(error)
            except Exception as error:  # one run that fails does not take the others with it
                item.state, item.why = "failed", str(error)

    def _finish(self, item: Progress) -> None:
        run = item.run
        if not is_trained(run):
            item.state = "training"
            note_origin(run)
            self._call(item, ["train", *run.options()])
            if not is_trained(run):
                raise _Stopped if self.stopping.is_set() else ConfigError(f"it is not complete; see {log_of(run)}")
        for name, words in missing_evaluations(self.study, earlier_record(self.study, run)).items():
            output = evaluation_path(run, name, words)
            if not is_evaluated(run, output, words):  # by a job of SLURM, or by an earlier start
                item.state = f"evaluating {name}"
                self._call(item, ["eval", *evaluation_arguments(words, run, output)])
        write_json(self.study.result_path(run), collect(self.study, run))

    def _call(self, item: Progress, words: list[str]) -> None:
        """`card WORDS`, whose output goes to the run's log."""
        label, log = item.run.label, log_of(item.run)
        environment = os.environ | {"OMP_NUM_THREADS": str(self.threads)}
        with log.open("ab") as output:
            with self.lock:
                if self.stopping.is_set():
                    raise _Stopped
                # a session of its own: Ctrl-C reaches this process alone, which passes on one signal
                process = subprocess.Popen(
                    [sys.executable, "-m", "card_megatron", *words],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=environment,
                    start_new_session=True,
                )
                self.processes[label] = process
            code = process.wait()
            with self.lock:
                del self.processes[label]
        if self.stopping.is_set() and code:
            raise _Stopped
        if code:
            raise ConfigError(f"card {words[0]} ended with {code}: {last_line(log)} ({log})")


class _Stopped(Exception):
    """The study was asked to stop."""


def evaluation_arguments(words: Sequence[str], run: StudyRun, output: Path) -> list[str]:
    """Of `card eval`: the run stands behind the kind, or first where tasks have no word for theirs."""
    kind = [] if words[0].startswith("--") else [words[0]]
    return [*kind, str(run.run_dir), *words[len(kind) :], f"--output={output}"]


def log_of(run: StudyRun) -> Path:
    return run.run_dir / "study.log"


def last_line(path: Path) -> str:
    lines = path.read_text("utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
