"""`card generate`, and the same decoding inside plain transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from card_megatron import cli
from card_megatron.checkpoint.source import open_source
from card_megatron.convert.custom_generate import MODULES, standalone_source, without_own_imports
from card_megatron.convert.to_hf import to_hf
from card_megatron.data.tokenizers import tokenizer_of
from card_megatron.decoding.model import open_model
from card_megatron.decoding.sampling import SamplingParams
from card_megatron.decoding.text import Generation, generate, text_of
from card_megatron.platform import Ranks
from tests.curves import tiny_config

PROMPTS = ["def main", "", "import os\nimport", "The"]


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory) -> Path:
    from card_megatron.training.run import train_run

    run_dir = tmp_path_factory.mktemp("generate") / "run"
    options = ["--train.train_iters=40", "--optimizer.lr=3e-3", "--objective.t_max=0.3"]
    train_run(tiny_config(corpus, run_dir, *options), Ranks(), console=False)
    return run_dir


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory) -> Path:
    source = open_source(run)
    to_hf(source, tmp_path_factory.mktemp("exported") / "hf", tokenizer_of(source.config), say=lambda text: None)
    return next(tmp_path_factory.getbasetemp().glob("exported*/hf"))


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def card_generate(*arguments: object) -> None:
    cli.main(["generate", *map(str, arguments)])


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize("where", ["run", "exported"])
def test_strategies_and_models_agree(request, tmp_path, where):
    """verify gives ar's text; a checkpoint and its export give the same."""
    model = request.getfixturevalue(where)
    texts = {}
    for strategy in ("ar", "verify", "confidence"):
        output = tmp_path / f"{strategy}.jsonl"
        own = ["--tau=2"] if strategy == "confidence" else []
        card_generate(model, *PROMPTS, "--strategy", strategy, "--max-new-tokens=24", "--output", output, *own)
        texts[strategy] = [(line["prompt"], line["text"], line["tokens"]) for line in lines_of(output)]
    assert texts["ar"] == texts["verify"]
    assert texts["ar"] == texts["confidence"], "tau=2 fills one slot a pass: the first"
    assert [prompt for prompt, *_ in texts["ar"]] == PROMPTS and any(text for _, text, _ in texts["ar"])


def test_the_export_continues_as_the_checkpoint_does(run, exported):
    made = []
    for path in (run, exported):
        with open_model(path) as model:
            sampling = SamplingParams(temperature=0.8, top_k=50, seed=7)
            made.append(generate(model, PROMPTS, Generation(max_new_tokens=24, sampling=sampling))[0])
    assert [one.result.tokens for one in made[0]] == [one.result.tokens for one in made[1]]
    assert len({tuple(one.result.tokens) for one in made[0]}) == len(PROMPTS), "each prompt has a seed of its own"


def test_what_is_shown(run, capsys):
    card_generate(run, "def main", "--max-new-tokens=12", "--show", "--stats", "--fixed-drafts", "--drafts=3")
    shown = capsys.readouterr().out
    assert shown.startswith("def main")
    for word in ("tokens/s", "tokens per pass", "accept lengths", "near ties", "passes:", "at most"):
        assert word in shown


def test_what_is_shown_is_drawn(run, capsys, tmp_path):
    picture = tmp_path / "new" / "text.svg"
    card_generate(run, "def main", "--max-new-tokens=12", "--picture", picture)
    assert "passes:" in capsys.readouterr().out
    drawn = picture.read_text()
    assert drawn.startswith("<svg") and "def&#160;main" in drawn and "url(" not in drawn.replace("url(#", "")
    faults = {"--picture=a.png": "does not end in .svg", "--picture=a.svg --output=o": "shows none"}
    for options, fault in faults.items():
        with pytest.raises(SystemExit, match=fault):
            card_generate(run, "def main", *options.split())


def test_a_stream_is_the_text(run, capsys, tmp_path):
    options = ["--max-new-tokens=24", "--temperature=1.5", "--seed=3"]
    card_generate(run, "def main", *options, "--stream")
    streamed = capsys.readouterr().out
    card_generate(run, "def main", *options, "--output", tmp_path / "out.jsonl")
    assert streamed.rstrip("\n") == ("def main" + lines_of(tmp_path / "out.jsonl")[0]["text"]).rstrip("\n")


def test_a_stop_string_ends_a_text_and_is_not_part_of_it(run, tmp_path):
    with open_model(run) as model:
        options = Generation(max_new_tokens=48, sampling=SamplingParams(temperature=1.0, seed=5))
        (whole,), _ = generate(model, ["def main"], options)
        stop = whole.text[6:9]
        heard: list[str] = []
        cut = Generation(max_new_tokens=48, sampling=options.sampling, stop=(stop, "never there"))
        (ended,), _ = generate(model, ["def main"], cut, lambda number, text: heard.append(text))
    assert ended.result.ended == "stop" and stop not in ended.text
    assert whole.text.startswith(ended.text + stop)
    assert "".join(heard) == ended.text
    texts = [text_of(model.tokenizer, [], ended.result.tokens[:end]) for end in (None, -1)]
    assert stop in texts[0] and stop not in texts[1], "no more tokens than the stop string needs"


def test_a_space_behind_the_prompt_is_kept(tmp_path):
    """Tokenizers with a dummy prefix decode the beginning of a text without its space."""
    from sentencepiece import SentencePieceTrainer

    from card_megatron.data.tokenizer_training import add_mask
    from card_megatron.data.tokenizers import encode, load_tokenizer

    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"),
        model_prefix=str(tmp_path / "sp"),
        vocab_size=60,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    tokenizer = load_tokenizer(add_mask(tmp_path / "sp.model", tmp_path / "masked.model"))
    whole, prompt = encode(tokenizer, "the quick brown"), encode(tokenizer, "the quick")
    assert whole[: len(prompt)] == prompt
    assert text_of(tokenizer, prompt, whole[len(prompt) :]) == " brown"


def test_ids_without_a_piece_never_come_out(corpus, tmp_path):
    """A model with more rows than its tokenizer: ours, and the exported generate."""
    import torch
    import transformers

    from card_megatron.training.run import train_run

    options = ["--train.train_iters=2", "--model.vocab_size=600", "--optimizer.lr_warmup_iters=0"]
    train_run(tiny_config(corpus, tmp_path / "run", *options), Ranks(), console=False)
    source = open_source(tmp_path / "run")
    to_hf(source, tmp_path / "hf", tokenizer_of(source.config), say=lambda text: None)
    prompts, sampling = ["def main", "The"], SamplingParams(temperature=3.0, seed=2)
    with open_model(tmp_path / "run") as model:
        made, _ = generate(model, prompts, Generation(max_new_tokens=40, sampling=sampling))
    tokens = [one.result.tokens for one in made]
    assert all(token < 500 and token not in (3, 4) for row in tokens for token in row)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    fast = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf", padding_side="left")
    batch = fast(prompts, return_tensors="pt", padding=True)
    rows = theirs.generate(
        **batch, **dict(max_new_tokens=40, do_sample=True, temperature=3.0, top_k=0, seed=2),
        custom_generate=str(tmp_path / "hf"), trust_remote_code=True,
    )  # fmt: skip
    width = batch["input_ids"].shape[1]
    assert [row[: len(ours)] for row, ours in zip(rows[:, width:].tolist(), tokens, strict=True)] == tokens
    assert isinstance(rows, torch.Tensor)


def test_what_custom_generate_cannot_do_is_refused(exported):
    import torch
    import transformers

    from card_megatron.decoding.generate_function import generate as theirs

    model = transformers.AutoModelForCausalLM.from_pretrained(exported)
    for options in (
        dict(num_beams=4),
        dict(return_dict_in_generate=True),
        dict(generation_config=transformers.GenerationConfig(no_repeat_ngram_size=2)),
    ):
        with pytest.raises(ValueError, match="is not supported"):
            theirs(model, torch.tensor([[5, 6]]), **options)


def test_prompts_come_from_files(run, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "b.jsonl").write_text('{"text": "three\\nlines\u2028and"}\n')
    for name in ("a.txt", "b.jsonl"):
        out = tmp_path / f"{name}.out"
        card_generate(run, "zero", "--prompts-file", tmp_path / name, "--max-new-tokens=2", "--output", out)
    found = [[line["prompt"] for line in lines_of(tmp_path / f"{name}.out")] for name in ("a.txt", "b.jsonl")]
    assert found == [["zero", "one", "two"], ["zero", "three\nlines\u2028and"]]


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--max-new-tokens=100"], r"max_position_embeddings=64; ask for at most"),
        (["--temperature=-1"], r"temperature=-1\.0 must be at least 0"),
        (["--top-p=0"], r"top_p=0\.0 must be in"),
        (["--strategy=confidence", "--block=0"], r"block \(K\)=0 must be at least 1"),
        (["--drafts=-1"], r"drafts \(K\)=-1"),
        (["--max-new-tokens=0"], "must be at least 1"),
        (["--tensor=2"], "ranks cannot hold replicas of tensor 2"),
        (["--ema"], "no averaged weights"),
        (["--tokenizer=nowhere.model"], r"nowhere\.model: no such file"),
        (["--prompts-file=nowhere.txt"], "nowhere.txt cannot be read"),
        (["more", "--stream"], "one prompt"),
        (["--stop="], "would end every text at once"),
        (["--output=/proc/nowhere/out.jsonl"], "cannot be written"),
        (["--tokenizer=bytes"], "not the tokenizer"),
    ],
)
def test_bad_input_is_one_line(run, arguments, fault):
    with pytest.raises(SystemExit, match=fault):
        card_generate(run, "def main", *arguments)


def test_no_model_is_said(tmp_path):
    with pytest.raises(SystemExit, match="no checkpoint"):
        card_generate(tmp_path, "def main")


# ---------------------------------------------------------------- plain transformers

FOREIGN = """
import json, sys

class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("megatron", "card_megatron"):
            raise ImportError(f"{name} cannot be imported here")

sys.meta_path.insert(0, Nothing())
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, prompts, options = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
model = AutoModelForCausalLM.from_pretrained(folder)
batch = tokenizer(prompts, return_tensors="pt", padding=True)
results = {}
for name, option in options.items():
    out = model.generate(**batch, custom_generate=folder, trust_remote_code=True, **option)
    results[name] = out[:, batch["input_ids"].shape[1]:].tolist()
results["plain"] = model.generate(**batch, max_new_tokens=20, do_sample=False)[:, batch["input_ids"].shape[1]:].tolist()
print(json.dumps(results))
"""


def test_custom_generate_in_plain_transformers_is_ours(run, exported):
    prompts = ["def main", "import os\nimport", "The quick"]
    options = {
        "ar": dict(strategy="ar", max_new_tokens=20),
        "verify": dict(strategy="verify", max_new_tokens=20),
        "confidence": dict(strategy="confidence", block_size=4, tau=0.3, max_passes=3, max_new_tokens=20),
        "sampled": dict(strategy="verify", max_new_tokens=20, do_sample=True, temperature=0.9, top_k=20, seed=11),
    }
    command = [sys.executable, "-c", FOREIGN, str(exported), json.dumps(prompts), json.dumps(options)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=180, cwd=exported.parent)
    assert result.returncode == 0, result.stderr
    theirs = json.loads(result.stdout.splitlines()[-1])
    ours = {}
    with open_model(exported) as model:
        for name, option in options.items():
            own = dict(block=4, tau=0.3, max_passes=3) if name == "confidence" else {}
            generation = Generation(
                strategy=option["strategy"],
                max_new_tokens=20,
                **own,
                sampling=SamplingParams(
                    temperature=option.get("temperature", 0.0), top_k=option.get("top_k", 0), seed=option.get("seed", 0)
                ),
            )
            made, _ = generate(model, prompts, generation)
            ours[name] = [one.result.tokens for one in made]
        pad = model.tokenizer.pad
    for name, rows in ours.items():
        padded = [row + [pad] * (max(map(len, rows)) - len(row)) for row in rows]
        assert theirs[name] == padded, name
    assert ours["ar"] == ours["verify"]
    assert theirs["plain"] == theirs["ar"], "greedy as transformers itself"


def test_the_file_is_made_of_the_packages_own_source():
    source = standalone_source()
    assert "card_megatron.decoding" not in "".join(
        line for line in source.splitlines() if line.startswith(("import", "from"))
    )
    package = Path(cli.__file__).parent / "decoding"
    for module in MODULES:
        assert without_own_imports((package / f"{module}.py").read_text()) in source
