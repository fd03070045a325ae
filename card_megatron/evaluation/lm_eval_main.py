"""The harness's own command line, which knows the model `card` and the group `card_paper`:

    python -m card_megatron.evaluation.lm_eval_main --model card --model_args checkpoint=PATH,tensor=2 --tasks arc_easy
    torchrun --nproc-per-node 4 -m card_megatron.evaluation.lm_eval_main --model card ...

The harness (0.4) looks for no plug-ins, so its unmodified `lm_eval` command learns of the model through a task's file:
`lm_eval --model card --tasks .../card_megatron/evaluation/tasks/card_model.yaml,arc_easy ...`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from card_megatron.config.errors import CardError, ConfigError
from card_megatron.launchers import ranks_from_environment


def import_harness() -> None:
    """Make `card` known; one rank of many shows bars and notes."""
    if ranks_from_environment().rank != 0:
        os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported
        os.environ.setdefault("LMEVAL_LOG_LEVEL", "ERROR")
    try:
        import lm_eval.models  # noqa: F401
    except ImportError as error:
        raise ConfigError("tasks need the lm-evaluation-harness: pip install -e '.[eval]' in the checkout") from error
    import card_megatron.evaluation.harness  # noqa: F401


def main(arguments: Sequence[str] | None = None) -> None:
    given = [*(sys.argv[1:] if arguments is None else arguments)]
    try:
        import_harness()
        from lm_eval.__main__ import cli_evaluate

        from card_megatron.evaluation.tasks import FOLDER

        if given[:1] not in (["ls"], ["validate"]) and "--include_path" not in {
            word.partition("=")[0] for word in given
        }:
            given += ["--include_path", str(FOLDER)]
        sys.argv = ["lm_eval", *given]  # which is where the harness looks
        cli_evaluate()
    except CardError as error:
        sys.exit(f"lm_eval: {error}")


if __name__ == "__main__":
    main()
