"""
Samples text from a checkpoint, as it comes.

    python sample.py --out_dir=out/demo-tmm --start="In the beginning" --num_samples=3
    python sample.py --out_dir=out/demo-tmm --start=FILE:prompt.txt --temperature=0

Arguments are those of train.py: --key=value or --key value, or files of assignments.
"""
import signal

if __name__ == "__main__":                                      # during the imports Ctrl-C just ends the process
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import os
import sys
from dataclasses import dataclass
from typing import Optional

import torch

from model import Settings, setting
from prepare import cli, die, load_tokenizer, or_die, parse_args
from train import autocast, load_checkpoint, pick_device, pick_dtype, print_text


@dataclass
class SampleConfig(Settings):
    out_dir: str = setting("out/demo-tmm", "folder of the checkpoint")
    checkpoint: str = setting("best.pt", "which file in it, best.pt or last.pt")
    start: str = setting("", "prompt, or FILE:path of one; empty: begin a document")
    num_samples: int = setting(1, "texts to sample", low=1)
    max_new_tokens: int = setting(500, "length of each, in tokens", low=0)
    temperature: float = setting(0.8, "0: always the likeliest token", low=0)
    top_k: Optional[int] = setting(200, "sample from the k likeliest tokens; None: from all", low=1)
    top_p: Optional[float] = setting(None, "sample from the likeliest tokens that hold this probability; None: from "
                                           "all", low=0, high=1)
    seed: int = setting(1337, "of the sampling", low=0, high=2 ** 63)
    device: str = setting("auto", "'cpu', 'cuda', 'mps'; auto: cuda, else mps, else cpu")
    dtype: str = setting("auto", "'bfloat16' (autocast) or 'float32'; auto: bfloat16 where the hardware has it",
                         ("auto", "bfloat16", "float32"))


def read_prompt(text):
    with or_die("cannot read the prompt --start", "name a file of UTF-8 text", (OSError, UnicodeError)):
        if text.startswith("FILE:"):
            with open(text[5:], encoding="utf-8-sig", newline="") as f:     # without a byte order mark
                return f.read()
        text.encode()                                           # an argument may hold bytes that are no text
        return text


def main():
    cfg = parse_args(SampleConfig, sys.argv[1:])
    if cfg.top_p == 0:
        die("top_p is 0: it must be above 0 (--temperature=0 takes the likeliest token)")
    prompt = read_prompt(cfg.start)
    device = pick_device(cfg.device)
    model, state = load_checkpoint(os.path.join(cfg.out_dir, cfg.checkpoint), device)
    tokenizer = load_tokenizer(state["tokenizer"])
    ids = tokenizer.encode(prompt) if prompt else [tokenizer.eot]
    idx = torch.as_tensor(ids, device=device)[None]
    torch.manual_seed(cfg.seed)
    for i in range(cfg.num_samples):
        if i:
            print("-" * 80)
        print(prompt, end="", flush=True)
        with autocast(device, pick_dtype(cfg.dtype, device)):
            print_text(tokenizer, (t.item() for t in model.next_tokens(
                idx, cfg.max_new_tokens, cfg.temperature, cfg.top_k, cfg.top_p)))


if __name__ == "__main__":
    cli(main)
