#!/usr/bin/env python3
"""Writes tiny random nemotron_h checkpoints with logits and greedy tokens from transformers.

Each variant is a folder with a checkpoint and reference.safetensors, which holds for every
prompt i: prompt_i (int32, the token ids), logits_i (float32, (length, vocab), one full pass) and
greedy_i (int32, the greedy continuation, every token from a full pass over all that precedes it).

The passes run on the CPU in float64 wherever transformers does not itself ask for float32.
transformers' PyTorch path clamps dt to at least time_step_min, which is 0 here.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import (
    NemotronHForCausalLM,
    NemotronHMamba2Mixer,
)

BLOCK_TYPES = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
GOOD_MARGIN = 0.02


@dataclass(frozen=True)
class Variant:
    name: str
    pattern: str
    sizes: dict[str, Any]
    dtype: torch.dtype = torch.float32
    tied: bool = False
    shards: int = 1
    # True: config.json as transformers 5 writes it, and its own names (`model.`) for tensors.
    # False: both as published checkpoints have them, with tensors under `backbone.`.
    transformers_spelling: bool = False
    prompt_lengths: tuple[int, ...] = field(default=(1, 6, 19, 45))


VARIANTS = (
    Variant(
        "nemotron-h-a",
        "M-M*-M*",
        {
            "vocab_size": 264,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "ssm_state_size": 16,
            "n_groups": 2,
            "chunk_size": 16,
        },
        transformers_spelling=True,
    ),
    Variant(
        "nemotron-h-b",
        "M*-M",
        {
            "vocab_size": 259,
            "hidden_size": 36,
            "intermediate_size": 50,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 12,
            "mamba_num_heads": 3,
            "mamba_head_dim": 16,
            "ssm_state_size": 64,
            "n_groups": 1,
            "chunk_size": 8,
        },
    ),
    Variant(
        "nemotron-h-c",
        "M*-M-M*-",
        {
            "vocab_size": 272,
            "hidden_size": 40,
            "intermediate_size": 56,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 32,
            "n_groups": 4,
            "chunk_size": 32,
        },
        dtype=torch.bfloat16,
        tied=True,
        shards=2,
    ),
)


def build_config(variant: Variant) -> NemotronHConfig:
    return NemotronHConfig(
        layers_block_type=[BLOCK_TYPES[kind] for kind in variant.pattern],
        tie_word_embeddings=False,
        conv_kernel=4,
        use_conv_bias=True,
        layer_norm_epsilon=1e-5,
        mlp_hidden_act="relu2",
        max_position_embeddings=512,
        **variant.sizes,
    )


def build_model(variant: Variant, seed: int) -> NemotronHForCausalLM:
    """A model in float64 whose weights are exact in the variant's storage type."""
    # The initialiser takes the logarithm of time_step_min, so it becomes 0 only afterwards.
    model = NemotronHForCausalLM(build_config(variant))
    model.config.time_step_min = 0.0
    for module in model.modules():
        if isinstance(module, NemotronHMamba2Mixer):
            module.time_step_limit = (0.0, float("inf"))
    randomise(model, variant, torch.Generator().manual_seed(seed))
    return model.double().eval()


@torch.no_grad()
def randomise(model: NemotronHForCausalLM, variant: Variant, generator: torch.Generator) -> None:
    """Gives every parameter a value that no default could stand in for."""

    def uniform(p: Tensor, low: float, high: float) -> Tensor:
        return torch.rand(p.shape, generator=generator) * (high - low) + low

    def normal(p: Tensor, std: float) -> Tensor:
        return torch.randn(p.shape, generator=generator) * std

    hidden = variant.sizes["hidden_size"]
    for name, p in model.named_parameters():
        leaf = name.rsplit(".", 1)[-1]
        if leaf == "A_log":
            value = uniform(p, 0.3, 8.0).log()
        elif leaf == "dt_bias":
            dt = uniform(p, math.log(0.01), math.log(0.7)).exp()
            value = dt + torch.log(-torch.expm1(-dt))
        elif leaf == "D":
            value = normal(p, 1.0)
        elif p.dim() == 1 and leaf == "weight":
            value = uniform(p, 0.5, 1.5)
        elif leaf == "bias":
            value = normal(p, 0.3)
        elif name.endswith("conv1d.weight"):
            value = normal(p, 0.6)
        elif name in ("model.embeddings.weight", "lm_head.weight"):
            # Large logits: greedy choices then differ by much more than rounding.
            value = normal(p, 4.0 * hidden**-0.5)
        else:
            value = normal(p, p.shape[1] ** -0.5)
        p.copy_(value.to(variant.dtype))
    if variant.tied:
        # transformers does not tie this architecture, whatever its config says.
        model.lm_head.weight = model.model.embeddings.weight


@torch.no_grad()
def full_pass(model: NemotronHForCausalLM, ids: list[int]) -> Tensor:
    """float32 logits (length, vocab), without a cache."""
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def greedy(model: NemotronHForCausalLM, prompt: list[int], count: int) -> tuple[list[int], float]:
    """The continuation and the smallest lead of a chosen token over the next best."""
    ids, margin = list(prompt), math.inf
    for _ in range(count):
        best = torch.topk(full_pass(model, ids)[-1], 2)
        margin = min(margin, (best.values[0] - best.values[1]).item())
        ids.append(int(best.indices[0]))
    return ids[len(prompt) :], margin


def make_prompts(variant: Variant, generator: torch.Generator) -> list[list[int]]:
    vocab = variant.sizes["vocab_size"]
    return [
        torch.randint(3, vocab, (length,), generator=generator).tolist()
        for length in variant.prompt_lengths
    ]


def reference(
    model: NemotronHForCausalLM, prompts: list[list[int]], count: int
) -> tuple[dict[str, Tensor], float]:
    tensors: dict[str, Tensor] = {}
    smallest = math.inf
    for i, prompt in enumerate(prompts):
        tokens, margin = greedy(model, prompt, count)
        smallest = min(smallest, margin)
        tensors[f"prompt_{i}"] = torch.tensor(prompt, dtype=torch.int32)
        tensors[f"logits_{i}"] = full_pass(model, prompt).contiguous()
        tensors[f"greedy_{i}"] = torch.tensor(tokens, dtype=torch.int32)
    return tensors, smallest


def checkpoint_config(model: NemotronHForCausalLM, variant: Variant) -> dict[str, Any]:
    fields = json.loads(model.config.to_json_string(use_diff=True))
    fields["architectures"] = ["NemotronHForCausalLM"]
    dtype = str(variant.dtype).removeprefix("torch.")
    if variant.transformers_spelling:
        return fields | {"dtype": dtype}
    for name in ("layers_block_type", "time_step_limit", "mtp_layers_block_type", "dtype"):
        fields.pop(name, None)
    return fields | {
        "torch_dtype": dtype,
        "hybrid_override_pattern": variant.pattern,
        "num_hidden_layers": len(variant.pattern),
        "tie_word_embeddings": variant.tied,
    }


def checkpoint_tensors(model: NemotronHForCausalLM, variant: Variant) -> dict[str, Tensor]:
    tensors = {}
    for name, value in model.state_dict().items():
        if variant.tied and name == "lm_head.weight":
            continue
        if not variant.transformers_spelling and name.startswith("model."):
            name = "backbone." + name.removeprefix("model.")
        tensors[name] = value.to(variant.dtype).contiguous()
    return tensors


def save_weights(folder: Path, tensors: dict[str, Tensor], shards: int) -> None:
    metadata = {"format": "pt"}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata=metadata)
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for k in range(shards):
        file = f"model-{k + 1:05}-of-{shards:05}.safetensors"
        # Every k-th tensor, so that each layer is spread over the shards.
        part = {name: tensors[name] for name in names[k::shards]}
        save_file(part, folder / file, metadata=metadata)
        weight_map |= dict.fromkeys(part, file)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / "model.safetensors.index.json", index)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def make_variant(variant: Variant, out: Path, first_seed: int, tries: int, count: int) -> None:
    """Tries a few seeds and keeps the one whose greedy choices are the clearest."""
    best: tuple[float, int, NemotronHForCausalLM, dict[str, Tensor]] | None = None
    for seed in range(first_seed, first_seed + tries):
        model = build_model(variant, seed)
        prompts = make_prompts(variant, torch.Generator().manual_seed(seed))
        tensors, margin = reference(model, prompts, count)
        if best is None or margin > best[0]:
            best = (margin, seed, model, tensors)
        if margin >= GOOD_MARGIN:
            break
    assert best is not None
    margin, seed, model, tensors = best
    if not all(torch.isfinite(t).all() for t in tensors.values()):
        raise RuntimeError(f"{variant.name}: logits are not finite")

    folder = out / variant.name
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(folder, checkpoint_tensors(model, variant), variant.shards)
    save_file(tensors, folder / "reference.safetensors", metadata={"seed": str(seed)})
    write_json(folder / "config.json", checkpoint_config(model, variant))
    sizes = ", ".join(f"{p.name} {p.stat().st_size}" for p in sorted(folder.iterdir()))
    spread = torch.cat([tensors[f"logits_{i}"].flatten() for i in range(len(prompts))]).std().item()
    distinct = len({t for i in range(len(prompts)) for t in tensors[f"greedy_{i}"].tolist()})
    print(
        f"{variant.name}: seed {seed}, smallest margin {margin:.4f}, {distinct} distinct greedy "
        f"tokens, logits' std {spread:.2f}"
    )
    print(f"  {sizes}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes reference checkpoints and logits.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the variants' folders")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--tries", type=int, default=6, help="seeds to try for clear greedy choices"
    )
    parser.add_argument("--smoke", action="store_true", help="one seed, four greedy tokens")
    args = parser.parse_args()
    torch.set_num_threads(2)  # the tensors are too small for more
    for variant in VARIANTS:
        tries, count = (1, 4) if args.smoke else (args.tries, 32)
        make_variant(variant, args.out, args.seed, tries, count)
    total = sum(p.stat().st_size for p in args.out.rglob("*") if p.is_file())
    print(f"total {total} bytes")


if __name__ == "__main__":
    main()
