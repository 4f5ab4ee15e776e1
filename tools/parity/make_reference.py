#!/usr/bin/env python3
"""Writes tiny random checkpoints with logits and greedy tokens from transformers.

Each variant is a folder with a checkpoint and reference.safetensors, which holds for every
prompt i: prompt_i (int32, the token ids), logits_i (float32, (length, vocab), one full pass) and
greedy_i (int32, the greedy continuation, every token from a full pass over all that precedes it).
A family's module says what else there is.

The passes run on the CPU in float64 wherever transformers does not itself ask for float32.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

import torch

# The multi-token prediction reference, which training is checked against too.
sys.path.append(str(Path(__file__).resolve().parent.parent / "train"))

from reference import make_variant  # noqa: E402

FAMILIES = ("nemotron_h", "qwen3_5")


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes reference checkpoints and logits.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the variants' folders")
    parser.add_argument("--family", choices=(*FAMILIES, "all"), default="all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--tries", type=int, default=6, help="seeds to try for clear greedy choices"
    )
    parser.add_argument("--smoke", action="store_true", help="one seed, four greedy tokens")
    args = parser.parse_args()
    torch.set_num_threads(2)  # the tensors are too small for more
    for family in FAMILIES if args.family == "all" else (args.family,):
        for variant in importlib.import_module(f"{family}_reference").VARIANTS:
            tries, count = (1, 4) if args.smoke else (args.tries, 32)
            make_variant(variant, args.out, args.seed, tries, count)
    total = sum(p.stat().st_size for p in args.out.rglob("*") if p.is_file())
    print(f"total {total} bytes")


if __name__ == "__main__":
    main()
