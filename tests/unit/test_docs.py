"""The commands of README and docs/ work: each is executed, in a small workspace that has the names they use."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from card_megatron.cli import main as card
from card_megatron.training import signals
from tests.evaluation import judge_folder, write_documents
from tests.scoring import trained_diffusion, trained_model

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples" / "study" / "README.md"]
PLACEHOLDER = re.compile(r"\b[A-Z][A-Z_]+\b|…|\|")
"""A line with one of these is a form (INPUT, RUN_DIR), and no command."""
ELSEWHERE = {
    "card launch data": "needs mpirun; tests/cluster submits such jobs",
    "card status 123456": "a job of a SLURM; tests/cluster",
    "card status runs/card --watch": "goes on until the run ends",
    "card study run": "hours; tests/unit/test_study.py runs a small one",
    "card study status": "of that",
    "card eval lm_eval": "tests/unit/test_evaluation_harness.py; its tasks come from the hub",
    "card eval runs/card_1b --tasks arc_easy": "tasks from the hub",
    "card eval watch": "tests/unit/test_evaluation_watch.py",
}
"""Beginning of a command that is not executed here -> why, and where it is tested."""
SMALL = {
    "card train": [
        "--train.train_iters=4",
        "--optimizer.lr_warmup_iters=1",
        "--eval.samples=8",
        "--data.num_workers=0",
    ],
    "card train --config start/run.yaml": ["--data.sequence_length=64", "--run_dir=runs/from_hf"],
    "card data tokenizer train": ["--sample-lines=20000"],
    "card launch": ["--dry-run"],
    "card generate": ["--max-new-tokens=8"],
    "card eval perplexity": ["--limit=2", "--stride=32"],
    "card eval denoising": ["--samples=8", "--window=32"],
    "card eval generation": ["--max-new-tokens=8", "--samples=2"],
}
"""Beginning of a command -> what makes it short."""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def commands() -> Iterator[tuple[str, str]]:
    """(page, command) of every block of code, without what is optional and what is a remark."""
    for page in PAGES:
        for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE):
            for line in re.sub(r"\\\n\s*", "", block).splitlines():
                for part in re.split(r"\s{3,}(?=card )", line):
                    command = re.sub(r"\s\[[^\]]*\](?=\s|$)", "", part.partition(" #")[0]).strip()
                    if command.startswith("card ") and not PLACEHOLDER.search(command.partition('"')[0]):
                        yield name_of(page), command


def as_a_shell_would(word: str) -> list[str]:
    """A pattern as the files that it means, here."""
    return (sorted(map(str, Path().glob(word))) if "*" in word else []) or [word]


def why_elsewhere(command: str) -> str | None:
    return next((why for beginning, why in ELSEWHERE.items() if command.startswith(beginning)), None)


def test_every_page_is_looked_at_and_no_exception_is_stale():
    found = [*commands()]
    assert {page for page, _ in found} >= {
        "README.md",
        *(f"docs/{name}.md" for name in ("conversion", "decoding", "evaluation", "scaling")),
    }
    for beginning in [*ELSEWHERE, *SMALL]:
        assert any(command.startswith(beginning) for _, command in found), f"{beginning}: no page has such a command"


@pytest.fixture(scope="module")
def workspace(corpus, tmp_path_factory) -> Path:
    """Everything that the pages call by a name, as small as it can be."""
    folder = tmp_path_factory.mktemp("docs")
    run, exported = trained_model(corpus, folder)
    others = trained_diffusion(corpus, folder, "arm")
    (folder / "runs").mkdir()
    for name in ("card", "card_1b", "card_1b_h100_bf16", "x"):
        shutil.copytree(run, folder / "runs" / name)
    for name, path in others.items():
        shutil.copytree(path, folder / "runs" / name)
    for name, path in (("card", run), ("arm", others["arm"])):
        shutil.copytree(path, folder / "runs" / "study" / f"{name}-s1")
    shutil.copytree(exported, folder / "llama")
    for name in ("examples", "docs"):  # copies: some commands write into them
        shutil.copytree(ROOT / name, folder / name)
    judge_folder(folder / "path" / "to" / "judge")
    (folder / "eval_data").mkdir()
    write_documents(folder / "eval_data")
    text = "The value of the name is a string, and the name of the value is a list. " * 6
    for name in ("valid", "mine"):
        (folder / f"{name}.jsonl").write_text(json.dumps({"text": text}) + "\n")
    (folder / "wiki.test.raw").write_text(text)
    (folder / "domains" / "wikitext").mkdir(parents=True)
    (folder / "domains" / "wikitext" / "wiki.test.raw").write_text(text)
    (folder / "prompts.txt").write_text("def main\n")
    (folder / "hellaswag_val.jsonl").write_text(json.dumps({"context": "Return the name of"}) + "\n")
    (folder / "results").mkdir()
    (folder / "data" / "study").mkdir(parents=True)
    for suffix in (".bin", ".idx", ".json"):
        for name in ("train", "valid"):
            shutil.copy(f"{corpus}/first{suffix}", folder / "data" / "study" / f"{name}{suffix}")
    shutil.copy(f"{corpus}/tokenizer.model", folder / "data" / "study")
    text = (ROOT / "examples" / "configs" / "card_1b_h100_bf16.yaml").read_text()
    for name in ("run.yaml", "X.yaml"):  # of pages that start 128 ranks
        (folder / name).write_text(text.replace("micro_batch_size: 8", "micro_batch_size: 4"))
    return folder


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", [name_of(page) for page in PAGES])
def test_the_commands_of_a_page_work(page, workspace, monkeypatch, capfd):
    """In the order of the page: later ones may need what earlier ones wrote."""
    monkeypatch.chdir(workspace)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name, command in commands():
        if name != page or why_elsewhere(command):
            continue
        words = [found for word in shlex.split(command)[1:] for found in as_a_shell_would(word)]
        words += [more for beginning, extra in SMALL.items() if command.startswith(beginning) for more in extra]
        try:
            if "--nproc" in words and words[0] != "config":  # ranks that it starts do not come back here
                subprocess.run([sys.executable, "-m", "card_megatron", *words], check=True, timeout=300)
            else:
                card(words)
        except (SystemExit, subprocess.CalledProcessError) as end:
            if isinstance(end, subprocess.CalledProcessError) or end.code not in (None, 0):
                pytest.fail(f"{page}: {command}\n{end}\n{''.join(capfd.readouterr())[-3000:]}")
        finally:
            signals.reset()  # `card train` keeps them to the end of its process, which this one is not
