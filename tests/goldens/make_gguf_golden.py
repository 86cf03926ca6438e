"""Writes the reference's answers for the quantized Gemma: see README.md beside this file.

usage: make_gguf_golden.py FOLDER FILE.gguf OUT.json
"""

import json
import sys

import torch
import transformers
from transformers import AutoModelForCausalLM

from make_goldens import TOP, greedy

# "The capital of France is" with <bos>, and a stretch of unrelated tokens.
PROMPTS = [[2, 818, 5279, 529, 7001, 563], [2] + [(i * 7919 + 31) % 20000 + 100 for i in range(40)]]


def main():
    folder, file, out = sys.argv[1:]
    torch.set_grad_enabled(False)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    cases = []
    for ids in PROMPTS:
        top = model(torch.tensor([ids])).logits[0].double().log_softmax(-1).topk(TOP)
        new, lead = greedy(model, ids)
        rounded = [[round(x, 5) for x in row] for row in top.values.tolist()]
        cases.append(
            {
                "prompt": ids,
                "top_ids": top.indices.tolist(),
                "top_logprobs": rounded,
                "greedy": new,
                "greedy_smallest_lead": lead,
            }
        )
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    golden = {"made_with": versions, "dtype": "float32, dequantized from GGUF", "cases": cases}
    with open(out, "w") as f:
        f.write(json.dumps(golden, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
