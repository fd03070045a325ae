"""Convert checkpoints with flags that users of Megatron-LM's tools/checkpoint/convert.py know.

    python tools/convert_checkpoint.py --load-dir runs/card_1b --save-dir exported --target hf
    python tools/convert_checkpoint.py --load-dir exported --save-dir start --target mcore

The source may be a checkpoint or run directory of card_megatron, a torch_dist checkpoint of a plain GPT model that
Megatron-LM saved, or (to mcore) a Hugging Face folder. `card convert --help` has every option.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from card_megatron.cli import main as card


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load-dir", required=True, help="checkpoint, run directory, or Hugging Face folder")
    parser.add_argument("--save-dir", required=True, help="folder to write")
    parser.add_argument("--target", choices=["hf", "mcore"], default="hf", help="what to write (default: hf)")
    parser.add_argument("--tokenizer-model", help="the tokenizer, if not where the run or the folder has it")
    parser.add_argument("--true-vocab-size", help="vocabulary without padding, of a Megatron-LM checkpoint")
    parser.add_argument("--params-dtype", choices=["fp32", "bf16", "fp16"], help="default: as it is stored")
    parser.add_argument("--ema", action="store_true", help="the averaged weights instead of the trained ones")
    parser.add_argument("--no-verify", action="store_true", help="do not compare with transformers")
    parser.add_argument("--force", action="store_true", help="replace an output that exists")
    options = parser.parse_args(arguments)
    if options.target == "mcore" and (options.ema or options.true_vocab_size):
        parser.error("--ema and --true-vocab-size go with --target hf")
    given = {
        "--tokenizer": options.tokenizer_model,
        "--vocab-size": options.true_vocab_size,
        "--dtype": options.params_dtype,
    }
    flags = {"--ema": options.ema, "--no-verify": options.no_verify, "--force": options.force}
    command = ["convert", "to-hf" if options.target == "hf" else "from-hf", options.load_dir, options.save_dir]
    command += [word for name, value in given.items() if value is not None for word in (name, value)]
    card([*command, *(name for name, on in flags.items() if on)])


if __name__ == "__main__":
    main()
