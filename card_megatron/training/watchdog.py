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
"""A heartbeat file is rewritten at most this often."""


class Watchdog:
    """A heartbeat file for this rank, and a thread that acts when the beats stop."""

    def __init__(self, run_dir: str | Path, rank: int, world_size: int, minutes: float):
        self.folder = Path(run_dir) / "heartbeats"
        self.rank, self.world_size, self.seconds = rank, world_size, 60.0 * minutes
        self.step, self.doing = 0, "starting"
        self.last_beat, self.last_written = time.monotonic(), -HEARTBEAT_SECONDS
        self.ended = threading.Event()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.stacks = (self.folder / f"rank_{rank}.stacks").open("w")  # open already: a full disk must not hide them
        self.beat(0, "starting")
        if self.seconds:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def beat(self, step: int, doing: str) -> None:
        """Progress: this rank is at `step`, about to do `doing`."""
        changed = doing != self.doing
        self.step, self.doing, self.last_beat = step, doing, time.monotonic()
        if changed or self.last_beat - self.last_written >= HEARTBEAT_SECONDS:
            self._write()
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

    def _write(self) -> None:
        self.last_written = self.last_beat
        beat = {"rank": self.rank, "step": self.step, "doing": self.doing, "time": time.time(), "pid": os.getpid()}
        unfinished = self._path(self.rank).with_suffix(".unfinished")
        try:
            unfinished.write_text(json.dumps(beat) + "\n")
            unfinished.replace(self._path(self.rank))
        except OSError:
            pass  # a full disk must not end a run that could go on

    def _watch(self) -> None:
        while not self.ended.wait(min(1.0, self.seconds / 4)):
            if time.monotonic() - self.last_beat > self.seconds:
                self._bite()

    def _bite(self) -> None:
        """Write down where this rank and the others stand, and leave."""
        self._write()
        time.sleep(min(2.0, self.seconds))  # the others' last beats, written now, tell who is behind
        text = (
            f"rank {self.rank} made no progress for {self.seconds:.0f} s at step {self.step} ({self.doing}); "
            f"{self._who_is_behind()}\nguard.hang_minutes sets the limit. Stacks of this rank:\n"
        )
        for file in filter(None, (self.stacks, sys.__stderr__)):
            with contextlib.suppress(OSError):
                file.write(text)
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
        os._exit(EXIT_CODE)

    def _who_is_behind(self) -> str:
        beats: dict[int, dict[str, Any]] = {}
        for rank in range(self.world_size):
            try:
                beats[rank] = json.loads(self._path(rank).read_text())
            except (OSError, ValueError):
                beats[rank] = {"step": -1, "doing": "no heartbeat"}
        furthest = max((beat["step"], _progress(beat["doing"])) for beat in beats.values())
        behind = [rank for rank, beat in beats.items() if (beat["step"], _progress(beat["doing"])) < furthest]
        if not behind:
            return "all ranks stand at the same point"
        places = ", ".join(f"rank {rank} (step {beats[rank]['step']}, {beats[rank]['doing']})" for rank in behind[:16])
        return f"did not arrive: {places}{' …' if len(behind) > 16 else ''}"


def _progress(doing: str) -> int:
    """What is done in a step comes in this order; a rank that does an earlier thing is behind."""
    order = ("starting", "no heartbeat", "training", "asking all ranks", "validating", "saving", "ended")
    return order.index(doing) if doing in order else 0
