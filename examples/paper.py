"""The paper's runs and ablations by name: shows the table, or trains one of its rows.

python examples/paper.py [NAME] [--cpu] [options of `card train`]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

from card_megatron.config.load import options_of as config_options

FOLDER = Path(__file__).parent / "configs" / "paper"


def rows() -> dict[str, dict[str, Any]]:
    """Name -> the configuration that it changes, under "config", and its options."""
    return yaml.safe_load((FOLDER / "table.yaml").read_text(encoding="utf-8"))


def options_of(name: str, *, cpu: bool) -> list[str]:
    """The options of `card train` for a row; each has its own run directory."""
    changed = dict(rows()[name])
    folder = FOLDER / "cpu" if cpu else FOLDER
    config = folder / f"{changed.pop('config')}.yaml"
    return [
        f"--config={config}",
        *config_options(changed | {"run_dir": f"runs/{'paper_cpu' if cpu else 'paper'}/{name}"}),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", help="a row of configs/paper/table.yaml; none shows them all")
    parser.add_argument("--cpu", action="store_true", help="the CPU-sized twin, on the data of README's commands")
    chosen, more = parser.parse_known_args()
    if chosen.name is None:
        print((FOLDER / "table.yaml").read_text(encoding="utf-8"), end="")
    elif chosen.name not in rows():
        sys.exit(f"{chosen.name} is no row of {FOLDER / 'table.yaml'}; it has {', '.join(rows())}")
    else:
        from card_megatron.cli import main as card

        card(["train", *options_of(chosen.name, cpu=chosen.cpu), *more])


if __name__ == "__main__":
    main()
