"""A rank that makes no progress says where it stands and which ranks are behind, then ends; nothing waits for ever."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

EXIT_CODE = 86
"""What a rank that hung exits with."""
HEARTBEAT_SECONDS = 5.0
"""A heartbeat file is rewritten this often."""
SILENT_SECONDS = 120.0
"""A heartbeat older than this, by whatever clock, is that of a rank that does not live."""
WAITING = ("torch/distributed/", *(f"megatron/core/{part}/" for part in ("distributed", "optimizer")))
WAITING += tuple(f"megatron/core/{part}_parallel/" for part in ("pipeline", "tensor"))
"""Code in which a rank waits for others. What hangs elsewhere is what they wait for."""


class Watchdog:
    """A thread that writes a heartbeat file for this rank, and acts when the beats stop."""

    def __init__(self, run_dir: str | Path, rank: int, world_size: int, minutes: float):
        self.folder = Path(run_dir) / "heartbeats"
        self.rank, self.world_size, self.seconds = rank, world_size, 60.0 * minutes
        self.last_written = 0.0
        self.ended = threading.Event()
        self.folder.mkdir(parents=True, exist_ok=True)
        # open already: a full disk must not hide them; appended to: a restart must not wipe out what ended the last run
        self.stacks = (self.folder / f"rank_{rank}.stacks").open("a")
        self.beat(0, "starting")
        self._write()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def beat(self, step: int, doing: str) -> None:
        """Progress: this rank is at `step`, about to do `doing`. Touches no file."""
        self.step, self.doing, self.last_beat = step, doing, time.monotonic()
        if self.seconds:
            # the backstop of the thread below, in C: it also fires when something holds Python's lock for ever
            faulthandler.dump_traceback_later(1.5 * self.seconds + 10.0, exit=True, file=self.stacks)

    def close(self) -> None:
        self.ended.set()
        faulthandler.cancel_dump_traceback_later()
        self.doing = "ended"
        self._write()
        self.stacks.close()

    def _path(self, rank: int) -> Path:
        return self.folder / f"rank_{rank}.json"

    def _write(self, **more: Any) -> None:
        self.last_written = time.monotonic()
        beat = {"rank": self.rank, "step": self.step, "doing": self.doing, "time": time.time(), "pid": os.getpid()}
        unfinished = self._path(self.rank).with_suffix(".unfinished")
        try:
            unfinished.write_text(json.dumps(beat | more) + "\n")
            unfinished.replace(self._path(self.rank))
        except OSError:
            pass  # a full disk must not end a run that could go on

    def _watch(self) -> None:
        while not self.ended.wait(min(1.0, self.seconds / 4) if self.seconds else HEARTBEAT_SECONDS):
            if self.seconds and time.monotonic() - self.last_beat > self.seconds:
                self._bite()
            elif time.monotonic() - self.last_written >= HEARTBEAT_SECONDS:
                self._write()

    def _bite(self) -> None:
        """Write down where this rank and the others stand, and leave."""
        last_beat, (place, waits) = self.last_beat, _main_thread()
        self._write(place=place, waits=waits)
        time.sleep(min(2.0, self.seconds))  # the others' last beats, written now, tell who is behind
        if self.last_beat != last_beat or self.ended.is_set():
            return  # late, but here: a machine that was suspended, say
        text = (
            f"rank {self.rank} made no progress for {self.seconds:.0f} s at step {self.step} ({self.doing}, {place}); "
            f"{self._who_is_behind()}\nguard.hang_minutes sets the limit. Stacks of this rank:\n"
        )
        for file in filter(None, (self.stacks, sys.__stderr__)):
            with contextlib.suppress(OSError):
                file.write(text)
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
        self._dump_collectives()
        if not waits:  # the others wait for this one: its end would break their connections before they have spoken
            time.sleep(min(10.0, 2 * self.seconds))
        os._exit(EXIT_CODE)

    def _dump_collectives(self) -> None:
        """What this rank asked of the others last, where the flight recorder is on (guard.flight_recorder)."""
        from card_megatron.training.process import dump_collectives

        with contextlib.suppress(Exception):  # whatever it is, the rank has to end now
            path = dump_collectives(self.folder.parent, self.rank)
            if path is not None and sys.__stderr__ is not None:
                sys.__stderr__.write(f"rank {self.rank}: its last collectives are in {path}\n")
                sys.__stderr__.flush()

    def _who_is_behind(self) -> str:
        beats: dict[int, dict[str, Any]] = {}
        for rank in range(self.world_size):
            try:
                beats[rank] = json.loads(self._path(rank).read_text())
            except (OSError, ValueError):
                beats[rank] = {"time": 0.0}
            if time.time() - beats[rank]["time"] > SILENT_SECONDS:
                beats[rank] = {"step": -1, "doing": "no heartbeat"}
        furthest = max(map(_standing, beats.values()))
        behind = [rank for rank, beat in beats.items() if _standing(beat) < furthest]
        if not behind:
            return "all ranks stand at the same point"
        places = ", ".join(f"rank {rank} ({_described(beats[rank])})" for rank in behind[:16])
        return f"did not arrive: {places}{' …' if len(behind) > 16 else ''}"


def _main_thread() -> tuple[str, bool]:
    """Where the main thread stands, and whether it waits for other ranks there."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    code = frame.f_code
    return f"in {code.co_name}, {code.co_filename}:{frame.f_lineno}", any(part in code.co_filename for part in WAITING)


def _standing(beat: dict[str, Any]) -> tuple[int, int, bool]:
    """How far a rank is: the step, what it does in it (things come in this order), and whether it waits for others."""
    order = ("no heartbeat", "starting", "training", "asking all ranks", "validating", "saving", "ended")
    return beat["step"], order.index(beat["doing"]), beat.get("waits", False)


def _described(beat: dict[str, Any]) -> str:
    if beat["step"] < 0:
        return beat["doing"]
    return ", ".join([f"step {beat['step']}", beat["doing"], *filter(None, [beat.get("place")])])
