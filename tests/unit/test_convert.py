"""Whole conversions: bit-exact there and back, compared with transformers, nothing half-written."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import safe_open

from card_megatron import cli
from card_megatron.checkpoint.source import open_source
from card_megatron.commands.convert import size
from card_megatron.config.errors import CardError, CheckpointError, ConfigError
from card_megatron.convert import mapping, verify
from card_megatron.convert.from_hf import from_hf
from card_megatron.convert.to_hf import to_hf
from card_megatron.data.tokenizers import load_tokenizer, tokenizer_of
from card_megatron.platform import Ranks
from tests.checkpoints import flip_a_byte
from tests.convert import MODELS, transformers_model, weights
from tests.curves import tiny_config
from tests.runs import tensors


@pytest.fixture
def hf(tmp_path):
    """Saves a random model of transformers, norms and biases random too; returns its folder."""

    def save(name: str = "plain", dtype: torch.dtype = torch.float32) -> Path:
        model = transformers_model(MODELS[name])
        with torch.no_grad():
            for param_name, param in model.named_parameters():
                if param.dim() == 1 and not (name == "query, key, value biases" and "o_proj.bias" in param_name):
                    param.add_(torch.randn_like(param) * 0.2)
        model.to(dtype).save_pretrained(tmp_path / "hf")
        return tmp_path / "hf"

    return save


def quiet(text: str) -> None: ...


# ---------------------------------------------------------------- there and back


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back_every_weight_is_the_same(hf, tmp_path, name):
    """Both ways compare log-probabilities with transformers: the conversion fails if they differ."""
    source = hf(name)
    imported = from_hf(source, tmp_path / "checkpoint", say=quiet)
    assert imported.comparison is not None and imported.comparison.worst < verify.TOLERANCE
    exported = to_hf(open_source(tmp_path / "checkpoint"), tmp_path / "back", None, say=quiet)
    assert exported.comparison is not None and exported.comparison.worst < verify.TOLERANCE
    before, after = weights(source), weights(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_bf16_stays_bf16_there_and_back(hf, tmp_path):
    source = hf("grouped queries", torch.bfloat16)
    from_hf(source, tmp_path / "checkpoint", say=quiet)
    to_hf(open_source(tmp_path / "checkpoint"), tmp_path / "back", None, say=quiet)
    before, after = weights(source), weights(tmp_path / "back")
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_qwen2_becomes_a_llama_with_the_same_function(tmp_path):
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    model = transformers.Qwen2ForCausalLM(config).eval()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.q_proj.bias)
    model.save_pretrained(tmp_path / "qwen2")
    from_hf(tmp_path / "qwen2", tmp_path / "checkpoint", say=quiet)
    to_hf(open_source(tmp_path / "checkpoint"), tmp_path / "llama", None, say=quiet)
    tokens = torch.arange(20)[None]
    llama = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "llama")
    assert type(llama).__name__ == "LlamaForCausalLM"
    with torch.no_grad():
        assert (llama(tokens).logits - model(tokens).logits).abs().max() < 1e-5


# ---------------------------------------------------------------- a run's checkpoint


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory) -> Path:
    from card_megatron.training.run import train_run

    run_dir = tmp_path_factory.mktemp("run") / "run"
    held_out = f"--data.validation.second=[{corpus}/second]"
    config = tiny_config(corpus, run_dir, "--train.train_iters=4", "--ema.decay=0.5", held_out, "--eval.samples=8")
    train_run(config, Ranks(), console=False)
    return run_dir


def test_an_export_is_a_plain_folder_that_transformers_loads(run, tmp_path):
    import transformers

    source = open_source(run)
    tokenizer = tokenizer_of(source.config)
    assert tokenizer is not None
    to_hf(source, tmp_path / "out", tokenizer, shard_bytes=50_000, say=quiet)
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "README.md"} <= files
    assert sum(name.endswith(".safetensors") for name in files) > 1 and "model.safetensors.index.json" in files
    assert not any(name.endswith(".py") for name in files), "no modelling code"
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["vocab_size"], config["mask_token_id"], config["pard_token"]) == (
        500,
        tokenizer.mask,
        tokenizer.mask,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    fast = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert type(model).__name__ == "LlamaForCausalLM" and len(model.get_input_embeddings().weight) == 500
    assert fast.mask_token_id == tokenizer.mask and fast.eos_token_id == tokenizer.eod
    text = "def main():\n    return  'ünïcode [MASK] </s>'"
    assert fast(text)["input_ids"] == tokenizer.encode_batch([text])[0].tolist()
    embedding = tensors(source.path)["embedding.word_embeddings.weight"]
    assert torch.equal(model.get_input_embeddings().weight, embedding[:500]), "the [MASK] row is among them"


def test_the_average_is_exported_where_it_is_asked_for(run, tmp_path):
    source = open_source(run)
    to_hf(source, tmp_path / "ema", None, ema=True, dtype="bf16", say=quiet)
    saved = tensors(source.path)
    ours = weights(tmp_path / "ema")["model.embed_tokens.weight"]
    assert torch.equal(ours, saved["ema.embedding.word_embeddings.weight"][:500].bfloat16())
    assert not torch.equal(ours, saved["embedding.word_embeddings.weight"][:500].bfloat16())


def test_the_model_card_tells_where_it_comes_from(run, tmp_path):
    source = open_source(run)
    to_hf(source, tmp_path / "out", tokenizer_of(source.config), verify=False, say=quiet)
    card = (tmp_path / "out" / "README.md").read_text()
    assert str(tmp_path.parent) not in card, "no paths of the machine that trained it"
    assert "4 steps, 32 sequences of 32 tokens (1,024 tokens)" in card
    assert "CARD" in card and "first" in card and "documents" in card and "| second |" in card
    assert "Untested" in card and "parallel_drafting" in card and "Not compared" in card


def test_a_file_is_what_safetensors_reads(run, tmp_path):
    to_hf(open_source(run), tmp_path / "out", None, verify=False, say=quiet)
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert len(file.keys()) == 2 + 9 * 4


# ---------------------------------------------------------------- a start for continued pretraining


def test_a_mask_is_added_where_there_is_none(hf, corpus, tmp_path):
    from sentencepiece import SentencePieceTrainer

    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    source = hf("untied")
    SentencePieceTrainer.train(
        input=str(text), model_prefix=str(source / "tokenizer"), vocab_size=100, hard_vocab_limit=False, minloglevel=2
    )
    (source / "tokenizer.vocab").unlink()
    imported = from_hf(source, tmp_path / "checkpoint", say=quiet)
    tokenizer = load_tokenizer(tmp_path / "checkpoint" / "tokenizer.model")
    assert imported.mask_is_new and imported.mask == tokenizer.mask == tokenizer.vocab_size - 1
    assert imported.comparison is not None and imported.comparison.worst < verify.TOLERANCE
    saved, before = tensors(tmp_path / "checkpoint"), weights(source)
    for ours, theirs in (
        ("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
        ("output_layer.weight", "lm_head.weight"),
    ):
        others = torch.arange(100) != imported.mask
        assert torch.equal(saved[ours][:100][others], before[theirs][others])
        assert torch.allclose(saved[ours][imported.mask], before[theirs].mean(dim=0), atol=1e-6)


# ---------------------------------------------------------------- what is refused, and what is left of it


def test_an_existing_output_stays_as_it_is(run, tmp_path):
    taken = tmp_path / "out"
    taken.mkdir()
    (taken / "config.json").write_text("mine")
    (taken / "model.safetensors").write_text("mine, too")
    with pytest.raises(ConfigError, match=r"exists already.*--force"):
        to_hf(open_source(run), taken, None, say=quiet)
    assert (taken / "config.json").read_text() == "mine"
    to_hf(open_source(run), taken, None, force=True, say=quiet)
    assert (taken / "model.safetensors").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_force_does_not_replace_what_is_no_export(run, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    (home / "config.json").write_text("some other program's")
    with pytest.raises(ConfigError, match="no output of this command"):
        to_hf(open_source(run), home, None, force=True, say=quiet)
    assert (home / "config.json").is_file()
    copied = tmp_path / "run" / "checkpoints" / "step_000004"
    shutil.copytree(open_source(run).path, copied)
    for output in (copied, copied.parent, copied / "inside"):
        with pytest.raises(ConfigError, match="which is read"):
            to_hf(open_source(copied), output, None, force=True, say=quiet)
    other = tmp_path / "other" / "step_000004"
    shutil.copytree(copied, other)
    with pytest.raises(ConfigError, match="no output of this command"):
        to_hf(open_source(copied), other, None, force=True, say=quiet)
    assert (other / "manifest.json").is_file()


def test_weights_that_are_not_finite_agree_with_nothing(hf, tmp_path):
    from safetensors.torch import save_file

    source = hf("untied")
    held = weights(source)
    held["model.embed_tokens.weight"][4] = float("nan")  # the row of [MASK], which clean inputs may never meet
    save_file(held, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="not finite"):
        from_hf(source, tmp_path / "out", say=quiet)
    assert not (tmp_path / "out").exists()


def test_another_type_on_the_way_in(hf, tmp_path):
    imported = from_hf(hf("grouped queries"), tmp_path / "half", dtype="bf16", say=quiet)
    assert imported.comparison is not None and imported.comparison.worst < verify.TOLERANCE
    assert {tensor.dtype for tensor in tensors(tmp_path / "half").values()} == {torch.bfloat16}


def test_mixed_types_stay_as_they_are(hf, tmp_path):
    from safetensors.torch import save_file

    source = hf()
    held = {key: value.bfloat16() if value.dim() > 1 else value for key, value in weights(source).items()}
    save_file(held, source / "model.safetensors", metadata={"format": "pt"})
    from_hf(source, tmp_path / "checkpoint", say=quiet)
    to_hf(open_source(tmp_path / "checkpoint"), tmp_path / "back", None, say=quiet)
    after = weights(tmp_path / "back")
    assert all(torch.equal(held[key], after[key]) and held[key].dtype == after[key].dtype for key in held)


def test_a_mask_that_is_known_stays_known(hf, tmp_path):
    """Without tokenizer files: the source's own mask_token_id, and none is made up where it has none."""
    source = hf()
    for mask in (4, None):
        config = json.loads((source / "config.json").read_text()) | {"mask_token_id": mask}
        (source / "config.json").write_text(json.dumps(config))
        from_hf(source, tmp_path / f"in{mask}", verify=False, say=quiet)
        to_hf(open_source(tmp_path / f"in{mask}"), tmp_path / f"out{mask}", None, verify=False, say=quiet)
        back = json.loads((tmp_path / f"out{mask}" / "config.json").read_text())
        assert back.get("mask_token_id") == mask
        assert (tmp_path / f"out{mask}" / "custom_generate").exists() == (mask is not None)


def test_a_new_mask_takes_no_token_away(hf, corpus, tmp_path):
    """A folder that adds tokens beside its tokenizer's file."""
    from sentencepiece import SentencePieceTrainer

    source, text = hf("untied"), tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    SentencePieceTrainer.train(
        input=str(text), model_prefix=str(source / "tokenizer"), vocab_size=60, hard_vocab_limit=False, minloglevel=2
    )
    from sentencepiece import SentencePieceProcessor

    last = SentencePieceProcessor(model_file=str(source / "tokenizer.model")).get_piece_size()
    (source / "added_tokens.json").write_text(json.dumps({"<|im_end|>": last}))
    with pytest.raises(ConfigError, match=r"belongs to '<\|im_end\|>'"):
        from_hf(source, tmp_path / "out", say=quiet)
    assert not (tmp_path / "out").exists()


def test_another_tokenizer_is_refused(run, tmp_path):
    with pytest.raises(SystemExit, match=r"not the tokenizer.*mask 257 \(was 4\)"):
        cli.main(["convert", "to-hf", str(run), str(tmp_path / "out"), "--tokenizer", "bytes"])
    assert not (tmp_path / "out").exists()


def test_a_live_runs_last_line_harms_nothing(run, tmp_path):
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    with (copied / "metrics.jsonl").open("a") as records:
        records.write('{"step": 5, "lo')
    to_hf(open_source(copied), tmp_path / "out", None, ema=True, verify=False, say=quiet)
    assert "not the weights of this export" in (tmp_path / "out" / "README.md").read_text()


def test_a_wrong_conversion_is_noticed_and_leaves_nothing(run, tmp_path, monkeypatch):
    """Planted: key and value heads swapped, which no shape can tell."""
    split = mapping.QueryKeyValue.split
    monkeypatch.setattr(
        mapping.QueryKeyValue, "split", lambda self, *args: [(parts := split(self, *args))[0], parts[2], parts[1]]
    )
    with pytest.raises(CheckpointError, match=r"the conversion is wrong.*clean"):
        to_hf(open_source(run), tmp_path / "out", None, say=quiet)
    assert not list(tmp_path.iterdir())


def test_a_forced_conversion_that_fails_keeps_the_old_one(run, tmp_path, monkeypatch):
    to_hf(open_source(run), tmp_path / "out", None, verify=False, say=quiet)
    monkeypatch.setattr(mapping.Gated, "split", lambda self, tensor, sizes: [part * 1.1 for part in tensor.chunk(2)])
    before = weights(tmp_path / "out")
    with pytest.raises(CheckpointError):
        to_hf(open_source(run), tmp_path / "out", None, force=True, say=quiet)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(tmp_path / "out").items())


def test_damaged_checkpoints_are_refused(run, tmp_path):
    broken = tmp_path / "checkpoints" / "step_000004"
    shutil.copytree(open_source(run).path, broken)
    flip_a_byte(broken / "__0_0.distcp")
    with pytest.raises(CheckpointError, match="damaged"):
        to_hf(open_source(broken), tmp_path / "out", None, say=quiet)
    assert not (tmp_path / "out").exists()


def test_tensors_that_are_missing_or_unknown_are_named(hf, tmp_path):
    from safetensors.torch import save_file

    source = hf()
    held = weights(source)
    save_file({key: value for key, value in held.items() if "up_proj" not in key}, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.0\.mlp\.up_proj\.weight"):
        from_hf(source, tmp_path / "out", say=quiet)
    save_file(held | {"model.layers.0.extra": torch.ones(2)}, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"unknown: model\.layers\.0\.extra"):
        from_hf(source, tmp_path / "out", say=quiet)
    save_file(held | {"model.norm.weight": torch.ones(31)}, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape \[31\]"):
        from_hf(source, tmp_path / "out", say=quiet)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["to-hf", "nowhere", "out"], "no checkpoint"),
        (["from-hf", "nowhere", "out"], "config.json cannot be read"),
        (["from-hf", ".", "out"], "which is read"),
    ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, arguments, fault):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=fault):
        cli.main(["convert", *arguments])
    assert not list(tmp_path.iterdir())


def test_no_average_is_said(corpus, tmp_path):
    from card_megatron.training.run import train_run

    train_run(tiny_config(corpus, tmp_path / "run", "--train.train_iters=3"), Ranks(), console=False)
    with pytest.raises(CardError, match=r"no averaged weights; train with ema\.decay"):
        to_hf(open_source(tmp_path / "run"), tmp_path / "out", None, ema=True, say=quiet)


def test_sizes_are_read():
    assert (size("4GB"), size("500mb"), size("1.5 KB"), size("17")) == (4 * 10**9, 500 * 10**6, 1500, 17)
    for text in ("GB", "-1", "0", "4 parsecs"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a size"):
            size(text)


def test_megatron_lms_flags(run, corpus, tmp_path):
    """tools/convert_checkpoint.py, and a run that starts from what it made by the command line's own option."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
    try:
        import convert_checkpoint
    finally:
        sys.path.pop(0)
    out, back = tmp_path / "hf", tmp_path / "start"
    convert_checkpoint.main(
        ["--load-dir", str(run), "--save-dir", str(out), "--target", "hf", "--params-dtype", "bf16"]
    )
    convert_checkpoint.main(["--load-dir", str(out), "--save-dir", str(back), "--target", "mcore", "--no-verify"])
    assert {tensor.dtype for tensor in weights(out).values()} == {torch.bfloat16}
    with pytest.raises(SystemExit):
        convert_checkpoint.main(["--load-dir", str(out), "--save-dir", str(back), "--target", "mcore", "--ema"])
    arguments = ["--train.train_iters=1", "--data.sequence_length=32", f"--data.train=[{corpus}/first]"]
    arguments += ["--train.global_batch_size=2", "--train.micro_batch_size=2", "--data.num_workers=0"]
    # its tokenizer is the export's tokenizer.json, which encodes as the .model does and is another file
    arguments += [f"--data.tokenizer={corpus}/tokenizer.model", f"--run_dir={tmp_path / 'run'}"]
    # in a process of its own: the command takes over the signals of its process
    command = [sys.executable, "-m", "card_megatron", "train", "--config", back / "run.yaml", "--init-from", back]
    subprocess.run([*map(str, command), *arguments], check=True, timeout=120)
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["checkpoint"] for event in events if event["event"] == "initialised"] == [str(back)]
