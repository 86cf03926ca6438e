"""Writes the reference's answers for the tiny checkpoints: see README.md beside this file.

usage: make_goldens.py CHECKPOINTS OUT
"""

import json
import pathlib
import sys

import torch
import transformers
from transformers import AutoModelForCausalLM

TOP = 20
GREEDY = 32
PROMPT_LENS = [4, 24, 48]


def prompts(rows):
    """Token ids from a fixed congruential generator, so that no library decides them."""
    state = 12345
    out = []
    for length in PROMPT_LENS:
        ids = []
        for _ in range(length):
            state = (state * 1103515245 + 12345) % 2**31
            ids.append(state // 65536 % rows)
        out.append(ids)
    return out


def greedy(model, ids):
    """Without the cache, so that only the forward pass is trusted. Also the smallest lead of a winner."""
    ids, new, lead = list(ids), [], float("inf")
    for _ in range(GREEDY):
        logits = model(torch.tensor([ids])).logits[0, -1]
        two = logits.topk(2)
        new.append(int(two.indices[0]))
        lead = min(lead, float(two.values[0] - two.values[1]))
        ids.append(new[-1])
    return new, round(lead, 5)


def main():
    checkpoints, out = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    torch.set_grad_enabled(False)
    for folder in sorted(p for p in checkpoints.iterdir() if p.is_dir()):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        cases = []
        for ids in prompts(256):
            logprobs = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
            top = logprobs.topk(TOP)
            new, lead = greedy(model, ids)
            cases.append(
                {
                    "prompt": ids,
                    "top_ids": top.indices.tolist(),
                    "top_logprobs": [[round(x, 5) for x in row] for row in top.values.tolist()],
                    "greedy": new,
                    "greedy_smallest_lead": lead,
                }
            )
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        golden = {"made_with": versions, "dtype": "float32", "cases": cases}
        (out / f"{folder.name}.json").write_text(json.dumps(golden, separators=(",", ":")) + "\n")
        print(folder.name, [(c["greedy"][:8], c["greedy_smallest_lead"]) for c in cases])


if __name__ == "__main__":
    main()
