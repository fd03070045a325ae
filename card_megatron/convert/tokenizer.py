"""A tokenizer as the files that transformers and `tokenizers` load: tokenizer.json and tokenizer_config.json.

The ids are ours for every text, and a text that spells a special token stays text: `split_special_tokens` says so to
transformers; `tokenizers` alone has no place for it in the file (`backend.encode_special_tokens = True` after loading).

Where SentencePiece and `tokenizers` could differ:

- BPE: SentencePiece takes the leftmost of two overlapping ways to one piece, merges have a fixed order. This needs a
  periodic piece and neighbours that joining from the left does not leave; the tests look for it in thousands of texts.
- Unigram: SentencePiece adds scores in fp32, `tokenizers` in fp64. Where two cuts of a text have the same score ("aaa"
  as "aa a" or "a aa") fp32's rounding decides, otherwise from place to place. `card data tokenizer train` makes scores
  whose sums are exact; with other models such a tie is not counted as a difference.
- A character map (nmt_nfkc and its like): see character_map.py.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from card_megatron.config.errors import ConfigError
from card_megatron.convert.sentencepiece_json import SentencePieceModel, sentencepiece_backend
from card_megatron.data.tokenizers import (
    MASK_PIECE,
    BytesTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
)

TOKENIZER_CLASS = "PreTrainedTokenizerFast"
"""The class that takes tokenizer.json as it is; Llama's and Qwen's own put their rules in the place of the file's.
For a config.json of Qwen2, which we never write, transformers 5 takes Qwen2's whatever is said here."""
ROLES = {
    "unk_token": ("<unk>", "[UNK]", "<|unk|>"),
    "pad_token": ("<pad>", "[PAD]", "<|pad|>", "<|padding|>"),
}
"""What a special token of a tokenizer.json is for, by its name. None begins a text: in training texts follow the end of
another, and a harness would begin them with a token that the model has never seen."""
CUT = 60
"""Characters of a text, or of its ids, that a difference shows."""
RESERVED = 100
"""Special tokens and symbols that are spelled in texts, to see that they stay text."""

ODD_TEXTS = (
    "",
    " ",
    "\n",
    "a",
    " a",
    "a ",
    "  leading and trailing  ",
    "The quick brown fox jumps over the lazy dog. It's 3 o'clock; we'll see!",
    "def f(x):\n    return x  # two  spaces\n\n\tif x: pass\n",
    "for (int i = 0; i < 10; ++i) { a[i] += b->c * 0xFF; } // ok\r\n",
    "https://www.example.org/a/b?q=1&r=%20#top user@example.com C:\\dir\\file.txt",
    '{"key": [1, 2.5e-3, null], "text": "a \\"quoted\\" word"}',
    "0 1 12 123 1234567890 3.14159 1,000,000 ½ ² Ⅷ ٣٤٥",
    "$E = mc^2$, \\frac{a}{b}, ∑ ∫ √ ≠ ≤ ∞ → ⇒",
    "aaaaaaaa",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "======",
    "----------------------------------------",
    "abababababab babababa",
    "hahahahaha!!!!!!??????......",
    "  \n \n  ",
    "\n\n\n\n",
    " \t \t\t ",
    "line\r\nline\rline\n\r\n",
    "a\tb\vc\fd",
    "                 seventeen spaces",
    "word" * 100,
    "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft",
    "Grüße, Ünïcödé naïve façade Œuvre Łódź İstanbul ß ẞ",
    "e\u0301 n\u0303 A\u030a o\u0302\u0301",
    "q\u0323\u0307 Z\u0351\u036b\u0343\u036a\u0302 \u0301 at the start",
    "Ελληνικά γράμματα, πολυτονικό: ἀρχή",
    "Русский текст, українська ґ, ё",
    "עברית עם נִקּוּד וסימנים",
    "العربية نصٌّ مُشَكَّل ﷺ ١٢٣",
    "فارسی می‌خواهم",
    "हिन्दी में लिखा हुआ क़लम",
    "বাংলা লেখা தமிழ் తెలుగు ಕನ್ನಡ മലയാളം",
    "ภาษาไทยไม่มีช่องว่างระหว่างคำ",
    "ລາວ မြန်မာ ខ្មែរ བོད་ཡིག",
    "ქართული Հայերեն አማርኛ ᏣᎳᎩ",
    "中文没有空格,這是繁體字。",
    "日本語のテキスト、カタカナとひらがな。が か\u3099",
    "한국어 문장 \u1112\u1161\u11ab",
    "Tiếng Việt có dấu, Tie\u0302\u0301ng Vie\u0323\u0302t",
    "🙂🎉🚀 👍🏽",
    "\U0001f469\u200d\U0001f4bb \U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466",
    "\U0001f3f3\ufe0f\u200d\U0001f308 \U0001f9d1\U0001f3fe\u200d\U0001f692",
    "\U0001f1e9\U0001f1ea\U0001f1eb\U0001f1f7 1\ufe0f\u20e3 \u2764\ufe0f",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 𠜎 𓀀 \U000e0041",
    "Ｆｕｌｌ　ｗｉｄｔｈ １２３ ﾊﾝｶｸ ～",
    "ﬁ ﬂ ﬃ ﬆ ĳ ǆ ㎏ ℡ ™ ª",
    "“quotes” ‘single’ «guillemets» – — … • ‰",
    "zero\u200bwidth\u2060joined\u00adsoft\ufeffmark",
    "\ufeffmark at the start",
    "no\u00a0break\u2003em\u3000ideographic\u2028line\u2029paragraph\u0085next",
    "\x01\x02\x1b[31mred\x1b[0m\x7f\x80\x9f",
    "\u202eright to left override\u202c \u2066isolate\u2069",
    "\ufffd \ufffe \uffff \ue000 \U0010ffff",
    "[MASK]",
    "a [MASK] b, a[MASK]b, [MASK][MASK], [mask], [MASK",
    "<s> </s><unk> <pad> <0x41><0x0A> <|endoftext|> [CLS] [SEP] [PAD]",
    "▁ ▁▁word▁ Ġ Ċ ##ing @@ </w>",
    "NUL\0inside",
)
"""What tokenizers disagree on."""


def export_tokenizer(tokenizer: Tokenizer, folder: Path, *, model_max_length: int) -> None:
    """Write a fast tokenizer that gives the same ids."""
    backend = fast_backend(tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "tokenizer_class": TOKENIZER_CLASS,
        "model_max_length": model_max_length,
        "mask_token": MASK_PIECE,
        "eos_token": backend.id_to_token(tokenizer.eod),
        **roles(backend),
        # what a document spells is text, never a special token
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    if isinstance(tokenizer, SentencePieceTokenizer):
        shutil.copyfile(tokenizer.path, folder / "tokenizer.model")


def fast_backend(tokenizer: Tokenizer) -> Any:
    """The `tokenizers` tokenizer with the ids of ours."""
    if isinstance(tokenizer, SentencePieceTokenizer):
        return sentencepiece_backend(str(tokenizer.path), tokenizer.path.read_bytes())
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return as_it_is(tokenizer)
    if isinstance(tokenizer, BytesTokenizer):
        return byte_backend(tokenizer)
    raise ConfigError(f"a {tokenizer.kind} tokenizer has no text to export; set data.tokenizer")


def as_it_is(tokenizer: HuggingFaceTokenizer) -> Any:
    """A tokenizer.json without its template: no id is added at a text's ends."""
    import tokenizers

    contents = json.loads(tokenizer.backend.to_str())
    if tokenizer.backend.num_special_tokens_to_add(False):
        contents["post_processor"] = None
    backend = tokenizers.Tokenizer.from_str(json.dumps(contents))
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    ours = (backend.id_to_token(number) for number in (tokenizer.mask, tokenizer.eod))
    backend.add_special_tokens([piece for piece in ours if piece not in special])
    return backend


def byte_backend(tokenizer: BytesTokenizer) -> Any:
    """The 256 bytes as a byte-level BPE without merges."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    assert tokenizer.pad is not None
    special = {"</s>": tokenizer.eod, MASK_PIECE: tokenizer.mask, "<s>": tokenizer.bos, "<pad>": tokenizer.pad}
    backend = Backend(models.BPE({**byte_alphabet(), **special}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    return backend


def byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary: itself where it can be seen."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return {**{chr(byte): byte for byte in seen}, **{chr(256 + place): byte for place, byte in enumerate(unseen)}}


def roles(backend: Any) -> dict[str, str]:
    """The beginning, unknown and padding tokens that a tokenizer has."""
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    found = {role: [name for name in names if name in special] for role, names in ROLES.items()}
    return {role: names[0] for role, names in found.items() if names}


# ---------------------------------------------------------------- is it the same?


def encoding_differences(tokenizer: Tokenizer, folder: Path, texts: Sequence[str] = ODD_TEXTS) -> list[str]:
    """A line for each text that the files in a folder encode or decode otherwise than ours; none where all agree."""
    plain, auto = load_plain(folder), load_auto(folder)
    texts = [*texts, *reserved_texts(plain)]
    ours = [ids.tolist() for ids in tokenizer.encode_batch(texts)]
    by_auto = auto(texts, verbose=False)["input_ids"]
    by_plain = [encoding.ids for encoding in plain.encode_batch_fast(texts)]
    plain_decode = partial(plain.decode, skip_special_tokens=False)
    return [
        *special_differences(tokenizer, auto),
        *encoded_differently(tokenizer, "transformers", texts, ours, by_auto, auto.decode),
        *encoded_differently(tokenizer, "tokenizers", texts, ours, by_plain, plain_decode),
    ]


def load_plain(folder: Path) -> Any:
    import tokenizers

    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.encode_special_tokens = True
    return backend


def load_auto(folder: Path) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError("checking a tokenizer needs transformers: pip install -e '.[hf]' in the checkout") from error
    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def reserved_texts(backend: Any) -> list[str]:
    """Texts that spell the tokens which a tokenizer keeps apart from text."""
    names = [token.content for token in backend.get_added_tokens_decoder().values()]
    return [f"a{name} {name}b" for name in names[:RESERVED]]


def special_differences(tokenizer: Tokenizer, auto: Any) -> list[str]:
    pairs = (("mask_token", tokenizer.mask, auto.mask_token_id), ("eos_token", tokenizer.eod, auto.eos_token_id))
    return [f"{name} is {found} in transformers, {ours} here" for name, ours, found in pairs if found != ours]


def encoded_differently(
    tokenizer: Tokenizer,
    library: str,
    texts: Sequence[str],
    ours: list[list[int]],
    theirs: list[list[int]],
    decode: Callable[[list[int]], str],
) -> Iterator[str]:
    for text, ids, found in zip(texts, ours, theirs, strict=True):
        if ids != found and not is_tie(tokenizer, ids, found):
            yield f"{library} encodes {shown(text)} as {shown(found)}, ours is {shown(ids)}"
        elif ids == found and tokenizer.decode(ids) == text != decode(ids):
            yield f"{library} decodes {shown(ids)} to {shown(decode(ids))}, ours to {shown(text)}"


def is_tie(tokenizer: Tokenizer, ids: list[int], others: list[int]) -> bool:
    """Whether fp32, in which SentencePiece adds up a unigram model's scores, cannot tell two cuts of a text apart."""
    if not isinstance(tokenizer, SentencePieceTokenizer) or tokenizer.decode(ids) != tokenizer.decode(others):
        return False
    if SentencePieceModel(str(tokenizer.path), tokenizer.path.read_bytes()).is_bpe:
        return False
    ours, theirs = (sum(map(tokenizer.processor.get_score, cut)) for cut in (ids, others))
    return abs(ours - theirs) <= max(len(ids), len(others)) * abs(ours) * 2.0**-24


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= CUT else text[:CUT] + "..."
