"""Writes a trained model as a transformers checkpoint, checks it against transformers, and
writes its model card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import (
    NemotronHForCausalLM,
    NemotronHMamba2Mixer,
)

from nemotron_h_model import NemotronH, Shape

MAX_WEIGHT_BYTES = 8_000_000
TOLERANCE = 1e-3
PAD, BOS, EOS = "<pad>", "<s>", "</s>"
BLOCK_TYPES = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}


def config_fields(shape: Shape) -> dict[str, Any]:
    """config.json, in the spelling of published checkpoints plus transformers' own list."""
    return {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "torch_dtype": "bfloat16",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": len(shape.pattern),
        "hybrid_override_pattern": shape.pattern,
        "layers_block_type": [BLOCK_TYPES[kind] for kind in shape.pattern],
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "layer_norm_epsilon": shape.eps,
        "norm_eps": shape.eps,
        "residual_in_fp32": False,
        "use_bias": False,
        "intermediate_size": shape.intermediate_size,
        "mlp_hidden_act": "relu2",
        "mlp_bias": False,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mamba_num_heads": shape.mamba_num_heads,
        "mamba_head_dim": shape.mamba_head_dim,
        "mamba_hidden_act": "silu",
        "mamba_proj_bias": False,
        "mamba_ssm_cache_dtype": "float32",
        "ssm_state_size": shape.ssm_state_size,
        "n_groups": shape.n_groups,
        "conv_kernel": shape.conv_kernel,
        "use_conv_bias": True,
        "chunk_size": shape.chunk_size,
        "expand": 2,
        # transformers' PyTorch path clamps dt to at least time_step_min; training did not.
        "time_step_min": 0.0,
        "time_step_max": 0.1,
        "time_step_floor": 1e-4,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 2,
        "use_cache": True,
    }


def write_checkpoint(out: Path, state: dict[str, Tensor], shape: Shape, tok: Tokenizer) -> int:
    """Writes everything an engine needs into `out`; returns the size of the weights file."""
    weights = {
        # Published nemotron_h checkpoints call the trunk `backbone`.
        ("backbone." + name.removeprefix("model.") if name.startswith("model.") else name): (
            value.detach().to("cpu", torch.bfloat16).contiguous()
        )
        for name, value in state.items()
    }
    path = out / "model.safetensors"
    save_file(weights, path, metadata={"format": "pt"})
    size = path.stat().st_size
    if size > MAX_WEIGHT_BYTES:
        raise RuntimeError(f"{path} holds {size} bytes, more than {MAX_WEIGHT_BYTES}")

    write_json(out / "config.json", config_fields(shape))
    write_json(
        out / "generation_config.json",
        {"bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 0},
    )
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
    return size


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@torch.no_grad()
def max_difference(ours: NemotronH, theirs: NemotronHForCausalLM, ids: Tensor) -> float:
    """The largest absolute difference in logits, both models in fp32 on the CPU."""
    ours.eval()
    theirs.eval()
    return (ours(ids) - theirs(input_ids=ids, use_cache=False).logits).abs().max().item()


def require_close(difference: float, what: str) -> None:
    print(f"{what}: largest logit difference {difference:.2e}", flush=True)
    # Written so that NaN fails too.
    if not difference <= TOLERANCE:
        raise RuntimeError(f"{what}: logits differ by {difference}, more than {TOLERANCE}")


@torch.no_grad()
def check_forward(shape: Shape) -> float:
    """Compares our forward with transformers' own on random weights (nothing at its default)."""
    ours = NemotronH(shape)
    for parameter in ours.parameters():
        if parameter.dim() == 1:
            parameter.add_(0.3 * torch.randn_like(parameter))
    fields = config_fields(shape)
    for key in ("model_type", "architectures", "torch_dtype", "num_hidden_layers"):
        del fields[key]
    # Its initialiser takes the logarithm of time_step_min, so the clamp goes afterwards.
    theirs = NemotronHForCausalLM(NemotronHConfig(**(fields | {"time_step_min": 1e-3})))
    for module in theirs.modules():
        if isinstance(module, NemotronHMamba2Mixer):
            module.time_step_limit = (0.0, float("inf"))
    theirs.load_state_dict(ours.state_dict(), strict=True)
    # Two full chunks and a part of a third.
    ids = torch.randint(0, shape.vocab_size, (2, 2 * shape.chunk_size + 21))
    difference = max_difference(ours, theirs, ids)
    require_close(difference, "training forward against transformers")
    return difference


def check_saved(out: Path, ours: NemotronH, ids: list[int]) -> float:
    """Loads the folder with transformers and compares it with the model it was written from."""
    theirs = NemotronHForCausalLM.from_pretrained(str(out), dtype=torch.float32)
    difference = max_difference(ours.cpu(), theirs, torch.tensor([ids]))
    require_close(difference, "saved checkpoint against transformers")
    return difference


def model_card(facts: dict[str, Any]) -> str:
    """README.md for the checkpoint's folder."""
    arch, run, bpb = facts["architecture"], facts["run"], facts["heldout_bits_per_byte"]
    bpb_2048 = facts["heldout_bits_per_byte_2048"]["all"]
    kinds = arch["pattern"]
    rows = "\n".join(
        f"| {s['title']} | {s['origin']} | {s['licence']} | {s['train_bytes']:,} "
        f"| {s['heldout_bytes']:,} | {bpb[s['name']]:.3f} |"
        for s in facts["data"]["sources"]
    )
    samples = "\n\n".join(f"```text\n{text}\n```" for text in facts["samples"])
    return f"""---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# nemotron-h-tiny

A language model of {arch["parameters"]:,} parameters in the `nemotron_h` architecture (Mamba-2
blocks, attention without positions, squared-ReLU MLPs), small enough to live in a repository and
trained to write recognisable English. It exists to test and demonstrate an inference engine.
It is no assistant, knows no facts, and repeats the language and the views of its sources.

## Architecture

`{kinds}`: {kinds.count("M")} Mamba-2 blocks ({arch["mamba_num_heads"]} heads of
{arch["mamba_head_dim"]}, state {arch["ssm_state_size"]}, {arch["n_groups"]} groups),
{kinds.count("*")} attention blocks ({arch["num_attention_heads"]} query and
{arch["num_key_value_heads"]} key/value heads of {arch["head_dim"]}) and {kinds.count("-")} MLPs of
{arch["intermediate_size"]}; hidden size {arch["hidden_size"]}; byte-level BPE of
{arch["vocab_size"]} tokens (`<pad>` 0, `<s>` 1, `</s>` 2). Embeddings are not tied. Weights are
bfloat16 ({facts["weight_bytes"]:,} bytes). No token is put before a prompt; `</s>` separated
documents in training. dt is not clamped.

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
