"""Writes a trained model as a transformers checkpoint, compares it, and words its model card."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from data import EOS, PAD

MAX_WEIGHT_BYTES = 7_900_000
TOLERANCE = 1e-3


def write_weights(path: Path, state: dict[str, Tensor]) -> int:
    """Writes bf16 tensors; returns the size of the file."""
    weights = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in state.items()
    }
    save_file(weights, path, metadata={"format": "pt"})
    size = path.stat().st_size
    if size > MAX_WEIGHT_BYTES:
        raise RuntimeError(f"{path} holds {size} bytes, more than {MAX_WEIGHT_BYTES}")
    return size


def write_tokenizer(out: Path, tok: Tokenizer) -> None:
    tok.save(str(out / "tokenizer.json"), pretty=True)
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": False,
            "add_eos_token": False,
            "pad_token": PAD,
            "bos_token": EOS,  # training separates documents by it and uses no other
            "eos_token": EOS,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 4096,
        },
    )


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@torch.no_grad()
def max_difference(ours: nn.Module, theirs: nn.Module, ids: Tensor) -> float:
    """The largest absolute difference in logits, both models in fp32 on the CPU."""
    ours.eval()
    theirs.eval()
    return (ours(ids) - theirs(input_ids=ids, use_cache=False).logits).abs().max().item()


def require_close(difference: float, what: str) -> None:
    print(f"{what}: largest logit difference {difference:.2e}", flush=True)
    # Written so that NaN fails too.
    if not difference <= TOLERANCE:
        raise RuntimeError(f"{what}: logits differ by {difference}, more than {TOLERANCE}")


def randomised(model: nn.Module) -> nn.Module:
    """Moves every vector off its initial value, so that none is at a default."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def wrapped(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 100, break_on_hyphens=False)


def model_card(facts: dict[str, Any], name: str, summary: str, architecture: str) -> str:
    """README.md for the checkpoint's folder. `summary` ends the sentence "A language model of N
    parameters ..."; `architecture` is the section of that name, without what all models share."""
    arch, run, bpb = facts["architecture"], facts["run"], facts["heldout_bits_per_byte"]
    bpb_2048 = facts["heldout_bits_per_byte_2048"]["all"]
    rows = "\n".join(
        f"| {s['title']} | {s['origin']} | {s['licence']} | {s['train_bytes']:,} "
        f"| {s['heldout_bytes']:,} | {bpb[s['name']]:.3f} |"
        for s in facts["data"]["sources"]
    )
    introduction = wrapped(
        f"""A language model of {arch["parameters"]:,} parameters {summary}, small enough to live
        in a repository and trained to write recognisable English. It exists to test and
        demonstrate an inference engine. It is no assistant, knows no facts, and repeats the
        language and the views of its sources."""
    )
    samples = "\n\n".join(f"```text\n{text}\n```" for text in facts["samples"])
    return f"""---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# {name}

{introduction}

## Architecture

{architecture}

The tokenizer is a byte-level BPE of {arch["vocab_size"]} tokens (`<pad>` 0, `<s>` 1, `</s>` 2). No
token is put before a prompt; `</s>` separated documents in training. Weights are bfloat16
({facts["weight_bytes"]:,} bytes).

## Data

| source | from | licence | training bytes | held-out bytes | held-out bits per byte |
| --- | --- | --- | --- | --- | --- |
{rows}
| all | | | {facts["data"]["train_bytes"]:,} | {facts["data"]["heldout_bytes"]:,} \
| {bpb["all"]:.3f} |

Held out: every {facts["data"]["heldout_every"]}th block of about 16 KiB of every source. Bits per
byte are of the saved bfloat16 weights, computed in fp32 over windows of 512 tokens that move by
256, without a token in front. With windows of 2048 tokens: {bpb_2048:.3f}.

## Training

{run["steps"]:,} steps of {run["batch_tokens"]:,} tokens ({run["tokens"]:,} tokens, about
{run["epochs"]:.0f} passes) in {run["train_minutes"]:.1f} minutes on one {run["device"]}: AdamW,
cosine schedule from {run["peak_lr"]}, weight decay {run["weight_decay"]}, dropout
{run["dropout"]}, bfloat16 autocast, an exponential moving average of the weights, seed
{run["seed"]}. Windows of {run["seq_len"]} tokens, and of 2048 in every {run["long_every"]}th step.
The average with the lowest held-out loss was kept (step {run["best_step"]:,}). Loss in nats per
token: training {facts["loss"]["train_probe"]:.3f} (without dropout), held-out
{facts["loss"]["heldout"]:.3f}.

To reproduce: `tools/train/README.md` of the repository. The schedule follows the wall clock, so
another machine gives other weights of about the same quality. `training.json` holds all numbers.

## Licence

The weights are under the Apache License 2.0. They were trained on text in the public domain only.

## Samples

Temperature {facts["sampling"]["temperature"]}, the {facts["sampling"]["top_k"]} likeliest tokens.

{samples}
"""
