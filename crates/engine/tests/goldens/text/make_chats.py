"""Writes chats.json: what transformers renders chats to.

Run: python make_chats.py TOKENIZERS, with `pip install transformers jinja2` and TOKENIZERS
as for make_tokens.py. A case names a folder of TOKENIZERS, whose own template is taken, or a
file of templates/, which has the constructs of its family and none of its text.
"""
import json
import pathlib
import sys

from transformers.utils.chat_template_utils import render_jinja_template

USER = {"role": "user", "content": " What is 2 + 2? "}
TALK = [
    {"role": "system", "content": "Be brief. <b>\"Zażółć\"</b> 😀"},
    {"role": "user", "content": "Hi\n there"},
    {"role": "assistant", "content": "<think>\nlong thought\n</think>\n\nHello! "},
    USER,
]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "x": [1, 2.5, True, None, "é<>&'"], "e": {}, "l": []}}}
FINAL = [USER, {"role": "assistant", "content": "The answer is "}]
CASES = [
    {"from": source, "messages": messages, **options}
    for source in ("gemma3", "qwen3", "llama3", "llama3_1", "deepseek_v3", "mistral.jinja", "llama3_2.jinja")
    for messages, options in (
        ([USER], {}),
        (TALK, {}),
        (TALK, {"add_generation_prompt": False}),
        (FINAL, {"add_generation_prompt": False, "continue_final_message": True}),
    )
] + [
    {"from": "qwen3", "messages": [USER], "kwargs": {"enable_thinking": False}},
    {"from": "qwen3", "messages": TALK, "tools": [TOOL]},
    {"from": "llama3_2.jinja", "messages": TALK, "tools": [TOOL], "kwargs": {"date_string": "1 Jan 2026"}},
    {"from": "generation.jinja", "messages": TALK},
    {"from": "generation.jinja", "messages": FINAL, "kwargs": {"flags": {"on": True, "none": None, "text": "é\"'"}}},
    {"from": "mistral.jinja", "messages": [USER, USER], "raises": "roles must alternate"},
    {"from": "gemma3", "messages": [USER, USER], "raises": "roles must alternate"},
]


def source_of(folder, name):
    if name.endswith(".jinja"):
        return (pathlib.Path(__file__).parent / "templates" / name).read_text(), {"bos_token": "<s>", "eos_token": "</s>"}
    config = json.loads((folder / name / "tokenizer_config.json").read_text())
    text = lambda token: token["content"] if isinstance(token, dict) else token
    tokens = {key: text(config[key]) for key in ("bos_token", "eos_token", "unk_token", "pad_token") if config.get(key)}
    return config["chat_template"], tokens


def main():
    folder = pathlib.Path(sys.argv[1])
    rows = []
    for case in CASES:
        template, tokens = source_of(folder, case["from"])
        kwargs = {**tokens, **case.get("kwargs", {})}
        if case["from"] == "llama3_2.jinja":
            case.setdefault("kwargs", {})["date_string"] = kwargs["date_string"] = "1 Jan 2026"
        if "raises" not in case:
            case["rendered"] = render_jinja_template(
                conversations=[case["messages"]],
                chat_template=template,
                tools=case.get("tools"),
                add_generation_prompt=case.get("add_generation_prompt", True),
                continue_final_message=case.get("continue_final_message", False),
                **kwargs,
            )[0][0]
        rows.append(case)
    (pathlib.Path(__file__).parent / "chats.json").write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


main()
