"""RUN_DIR/events.jsonl: what happened to a run besides its steps: starts, saves, skipped steps, spikes, ends."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Events:
    """Appends a line an event, on disk when it returns; `say` shows those that a user wants to see."""

    def __init__(self, run_dir: str | Path, active: bool, say: Callable[[str], None]):
        self.active, self.say = active, say
        self.path = Path(run_dir) / "events.jsonl"

    def __call__(self, event: str, **facts: Any) -> None:
        if not self.active:
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"time": time.time(), "event": event, **facts}) + "\n")
        except OSError as error:
            self.say(f"{self.path}: {error.strerror}")
        line = SHOWN.get(event)
        if line is not None:
            self.say(line.format(**facts))


SHOWN = {
    "resumed": "resumed from {checkpoint} at step {step}",
    "save_finished": "saved step {step}: {bytes:,} bytes in {seconds} s",
    "save_failed": "SAVE FAILED at step {step}: {problems}; newest checkpoint: {newest}",
    "bad_step": "step {step} skipped: loss {loss}, gradient norm {grad_norm}; samples {first}..{last}, worst {worst}",
    "spike": "loss spike at step {step}: {loss:.4f}, mean {mean:.4f}; samples {first}..{last}, worst {worst}",
    "straggler": "slow at step {step}: {text}",
    "straggler_over": "no longer slow at step {step}: ranks {ranks}",
    "profile_failed": "the profile could not be written: {problem}",
    "profiled": "profiled steps {first}..{step}: {folder}",
    "stopped": "stopped at step {step}: {reason}",
}
"""The line that a terminal or a log gets of an event; others only go to the file."""
