"""Write NAME.sbatch for every entry of commands.yaml: what `card launch` prints for it today."""

from __future__ import annotations

import contextlib
import io
import shlex
from pathlib import Path

import yaml

from card_megatron.commands import launch

FOLDER = Path(__file__).parent


def scripts() -> dict[str, str]:
    """File name -> script."""
    found = {}
    for name, arguments in yaml.safe_load((FOLDER / "commands.yaml").read_text(encoding="utf-8")).items():
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            launch.run([*shlex.split(arguments), "--print"])
        found[f"{name}.sbatch"] = printed.getvalue()
    return found


if __name__ == "__main__":
    for file, text in scripts().items():
        (FOLDER / file).write_text(text, encoding="utf-8")
