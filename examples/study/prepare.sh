#!/usr/bin/env bash
# prepare.sh SOURCES: links the texts of the studies into data/study and builds what they train on.
# SOURCES holds corpus/books_{train,valid}.jsonl, corpus/wikitext-2-raw/wiki.test.raw, eval/lambada/lambada_test.jsonl and
# eval/lm1b/1b_benchmark.test.tokens; .jsonl files have a {"text": ...} a line.
set -euo pipefail
sources=$(realpath "${1:?usage: prepare.sh SOURCES, the folder of corpus/ and eval/}")
to=data/study
mkdir -p "$to"
for file in corpus/books_train.jsonl corpus/books_valid.jsonl corpus/wikitext-2-raw/wiki.test.raw \
    eval/lambada/lambada_test.jsonl eval/lm1b/1b_benchmark.test.tokens; do
    [ -f "$sources/$file" ] || { echo "prepare.sh: $sources/$file is not there" >&2; exit 1; }
    ln -sfn "$sources/$file" "$to/$(basename "$file")"
done

card data tokenizer train "$to/books_train.jsonl" --output "$to/tokenizer.model" --vocab-size 4096
# every 50th chapter: the little text of data_potential.yaml
awk 'NR % 50 == 1' "$to/books_train.jsonl" >"$to/books_subset.jsonl"
card data build "$to/books_train.jsonl" --output "$to/train" --tokenizer "$to/tokenizer.model" --workers 2
card data build "$to/books_subset.jsonl" --output "$to/subset" --tokenizer "$to/tokenizer.model"
card data build "$to/books_valid.jsonl" --output "$to/valid" --tokenizer "$to/tokenizer.model"

# 40 words from two places of each held-out chapter: the prompts of decoding.yaml
python3 - "$to" <<'PROMPTS'
import json
import sys
from pathlib import Path

folder = Path(sys.argv[1])
chapters = [json.loads(line)["text"].split() for line in (folder / "books_valid.jsonl").read_text("utf-8").splitlines()]
prompts = [" ".join(words[start : start + 40]) for start in (200, 600) for words in chapters if len(words) >= 640]
(folder / "prompts.jsonl").write_text("".join(json.dumps({"context": prompt}) + "\n" for prompt in prompts), "utf-8")
print(f"{folder}/prompts.jsonl: {len(prompts)} prompts")
PROMPTS
