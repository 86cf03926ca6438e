"""Writes <family>_tokens.json: what Hugging Face tokenizers gives for a few texts.

Run: python make_tokens.py TOKENIZERS, with `pip install tokenizers` and TOKENIZERS a folder
with gemma3/, qwen3/ and llama3/tokenizer.json (tests/fetch_tokenizers.sh makes one).
"""
import json
import pathlib
import sys

from tokenizers import Tokenizer

TEXTS = [
    "Hello, world!",
    " leading and trailing  ",
    "two  three   four    spaces\tand\t\ttabs",
    "line\nline\n\nline\r\n\r\n  indented\n\n\n\nend\n",
    "The year 2026, 1234567 items at 3.14159% — don't, we'll, I'M, they'VE",
    "def f(x):\n    return {'a': [x ** 2 for _ in range(10)]}  # ok\n",
    "<table><tr><td>a</td> <td>b</td></tr></table> a > </b>",
    "Zażółć gęślą jaźń. Смешанный текст, ελληνικά, עברית, العربية",
    "日本語のテキストと中文文本，한국어도。ﾊﾝｶｸ",
    "emoji 😀👍🏽 family 👨‍👩‍👧‍👦 flags 🇯🇵🇺🇦 keycap 1️⃣",
    "combining e\u0301 and composed \u00e9, ligature \ufb01, angstrom \u212b",
    "\u0000 nul, \u0007 bell, \u200b zero width, \ufeff bom, \u2581 blank, \ufffd replacement",
    "rare 𓀀 𒀀 \U0001fae8 \ue000 private use",
    "a" * 70,
    " " * 40 + "x" + "\n" * 35,
    "<bos><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>",
    "https://example.com/a?b=c&d=%20#e_f-g user@example.org C:\\dir\\file.txt",
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
    "\u2581 x \u2581y a\u2581b\u2581\u2581\u2581 c\n\u2581 d \u2581 \u2581 \u2581" + " \u2581" * 20 + "e \u2581",
]


def main():
    folder = pathlib.Path(sys.argv[1])
    here = pathlib.Path(__file__).parent
    for family in ("gemma3", "qwen3", "llama3"):
        tokenizer = Tokenizer.from_file(str(folder / family / "tokenizer.json"))
        rows = []
        for text in TEXTS:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            rows.append({"text": text, "ids": ids, "decoded": tokenizer.decode(ids, skip_special_tokens=False)})
        with open(here / f"{family}_tokens.json", "w") as out:
            out.write("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


main()
