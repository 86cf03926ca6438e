"""Compares the CUDA back end's logits with transformers' on random weights, on a machine with a GPU and torch.

usage: compare_cuda.py LOGITS_BINARY [case ...]

LOGITS_BINARY is `cargo build --release -p overnight-engine --example logits`. Each case is written as a checkpoint,
computed teacher-forced by transformers (in f32 from the same bf16 weights, and in bf16) and by the binary: the whole
prompt in one step, in chunks, and token by token through the decode graphs. Prints one line a run and fails when mean
regret is above 0.06 nat or the 99th percentile above 0.20, or when the log probabilities of the 20 likeliest tokens
are off by more than MEAN_TIMES (on average) or MAX_TIMES (at most) what transformers' own bf16 run is off, which
rounds as often. Before that the gate itself is tried on logits that must fail it.
"""
import os, subprocess, sys, tempfile
import numpy as np
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen3Config

CASES = {
    "qwen3": lambda: Qwen3Config(hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, head_dim=128, vocab_size=4096, max_position_embeddings=2048, tie_word_embeddings=True),
    "llama": lambda: LlamaConfig(hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, vocab_size=4096, max_position_embeddings=2048, tie_word_embeddings=False),
    "gemma3": lambda: Gemma3TextConfig(hidden_size=640, intermediate_size=2048, num_hidden_layers=8,
        num_attention_heads=4, num_key_value_heads=1, head_dim=256, vocab_size=4096, max_position_embeddings=2048,
        sliding_window=128),
    "qwen3-0.6b": lambda: Qwen3Config(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, vocab_size=151936, max_position_embeddings=40960,
        rope_theta=1000000, tie_word_embeddings=True),
}


REGRET_MEAN, REGRET_P99 = 0.06, 0.20
MEAN_TIMES, MAX_TIMES = 1.2, 1.5
# Two runs of a model in f32 differ by less.
OFF_MIN = 0.002


def off_top_20(got, want):
    """How far the log probabilities of the 20 likeliest tokens of `want` are off, by position."""
    top = np.argsort(-want, axis=-1)[:, :20]
    log_p = lambda x: x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)
    return np.abs(np.take_along_axis(log_p(got), top, -1) - np.take_along_axis(log_p(want), top, -1))


def compare(name, got, want, half, label):
    """Teacher-forced: nats that `want` loses by the likeliest token of `got`, and distance of the top 20 beside that
    of `half`, the same model computed in bf16 by others."""
    choice = got.argmax(-1)
    rows = np.arange(len(want))
    regret = want.max(-1) - want[rows, choice]
    off, allowed = off_top_20(got, want), off_top_20(half, want)
    mean_max, off_max = MEAN_TIMES * max(allowed.mean(), OFF_MIN), MAX_TIMES * max(allowed.max(), OFF_MIN)
    distance = np.linalg.norm(got - want) / np.linalg.norm(want)
    mean, p99 = regret.mean(), np.quantile(regret, 0.99)
    # A comparison with something that is not a number is false.
    ok = bool(np.isfinite(distance) and mean <= REGRET_MEAN and p99 <= REGRET_P99
              and off.mean() <= mean_max and off.max() <= off_max)
    print(f"{name:12} {label:22} distance {distance:.4f}  top-20 logprob off {off.mean():.4f} of {mean_max:.4f} "
          f"max {off.max():.3f} of {off_max:.3f}  regret mean {mean:.4f} p99 {p99:.4f}  "
          f"same choice {np.mean(choice == want.argmax(-1)):.3f}  {'ok' if ok else 'FAILED'}", flush=True)
    return ok


def check_the_gate():
    """What must pass passes, and what must not does not."""
    random = np.random.default_rng(7)
    want = random.normal(0, 2, (400, 1000))
    noise = lambda size: want + random.normal(0, size, want.shape)
    half = noise(0.02)
    one_row, one_token, shifted = want.copy(), want.copy(), want.copy()
    one_row[200] = want[199]
    one_token[:, 7] += 0.5
    shifted[100:108] = np.roll(shifted[100:108], 1, axis=-1)
    broken = want.copy()
    broken[3, 3] = np.nan
    tries = [(noise(0.02), True), (want, True), (noise(0.06), False), (one_row, False), (one_token, False),
             (shifted, False), (broken, False)]
    for index, (got, expected) in enumerate(tries):
        if compare("the gate", got, want, half, f"try {index}, {'good' if expected else 'bad'}") != expected:
            sys.exit(f"the gate itself is wrong: try {index} should {'pass' if expected else 'fail'}")


def main():
    check_the_gate()
    binary, names = sys.argv[1], sys.argv[2:] or list(CASES)
    good = True
    for name in names:
        torch.manual_seed(7)
        config = CASES[name]()
        model = AutoModelForCausalLM.from_config(config, torch_dtype=torch.bfloat16, attn_implementation="eager")
        # The usual initialization makes every layer a whisper beside the residual.
        with torch.no_grad():
            for key, value in model.named_parameters():
                if value.ndim == 2 and "embed" not in key:
                    value.copy_((torch.randn_like(value, dtype=torch.float32) * 1.4 / value.shape[1] ** 0.5).to(value))
                elif value.ndim == 1:
                    value.add_(0.2 * torch.randn_like(value))
        model = model.cuda().eval()
        ids = torch.randint(0, config.vocab_size, (1, 400), device="cuda")
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            model.save_pretrained(folder, safe_serialization=True)
            half = model(ids).logits[0].float().cpu().numpy().astype(np.float64)
            full = model.float()(ids).logits[0].cpu().numpy().astype(np.float64)
            compare(name, half, full, half, "transformers bf16")
            for chunk, label in ((400, "whole prompt"), (96, "chunks of 96"), (1, "token by token")):
                out = os.path.join(folder, "logits")
                words = [binary, folder, "cuda", str(chunk), out, *map(str, ids[0].tolist())]
                subprocess.run(words, check=True)
                got = np.fromfile(out, dtype="<f4").reshape(400, -1).astype(np.float64)
                good &= compare(name, got, full, half, f"overnight {label}")
        del model
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
