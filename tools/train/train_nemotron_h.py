#!/usr/bin/env python3
"""Trains a small nemotron_h language model and its tokenizer within a time budget.

Reads what prepare_corpus.py wrote and leaves a transformers checkpoint in --out, with
training.json (the facts of the run) and README.md (the model card). --smoke takes the same path
in a few steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import (
    NemotronHForCausalLM,
    NemotronHMamba2Mixer,
)

import checkpoint
from nemotron_h_model import NemotronH, Shape
from run import Family, run

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


class NemotronHFamily(Family):
    def __init__(self) -> None:
        self.shape = Shape()

    def build(self, dropout: float) -> NemotronH:
        return NemotronH(self.shape, dropout)

    def check_forward(self) -> dict[str, float]:
        ours = checkpoint.randomised(NemotronH(self.shape))
        fields = config_fields(self.shape)
        for key in ("model_type", "architectures", "torch_dtype", "num_hidden_layers"):
            del fields[key]
        # Its initialiser takes the logarithm of time_step_min, so the clamp goes afterwards.
        theirs = NemotronHForCausalLM(NemotronHConfig(**(fields | {"time_step_min": 1e-3})))
        for module in theirs.modules():
            if isinstance(module, NemotronHMamba2Mixer):
                module.time_step_limit = (0.0, float("inf"))
        theirs.load_state_dict(ours.state_dict(), strict=True)
        # Two full chunks and a part of a third.
        ids = torch.randint(0, self.shape.vocab_size, (2, 2 * self.shape.chunk_size + 21))
        difference = checkpoint.max_difference(ours, theirs, ids)
        checkpoint.require_close(difference, "training forward against transformers")
        return {"logits": difference}

    def check_saved(self, out: Path, model: nn.Module, ids: list[int]) -> dict[str, float]:
        theirs = NemotronHForCausalLM.from_pretrained(str(out), dtype=torch.float32)
        difference = checkpoint.max_difference(model, theirs, torch.tensor([ids]))
        checkpoint.require_close(difference, "saved checkpoint against transformers")
        return {"logits": difference}

    def write(self, out: Path, state: dict[str, Tensor]) -> int:
        # Published nemotron_h checkpoints call the trunk `backbone`.
        published = {
            "backbone." + name.removeprefix("model.") if name.startswith("model.") else name: value
            for name, value in state.items()
        }
        checkpoint.write_json(out / "config.json", config_fields(self.shape))
        checkpoint.write_json(
            out / "generation_config.json",
            {"bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 0},
        )
        return checkpoint.write_weights(out / "model.safetensors", published)

    def card(self, facts: dict[str, Any]) -> str:
        s, kinds = self.shape, self.shape.pattern
        summary = """in the `nemotron_h` architecture (Mamba-2 blocks, attention without positions,
            squared-ReLU MLPs)"""
        architecture = checkpoint.wrapped(
            f"""`{kinds}`: {kinds.count("M")} Mamba-2 blocks ({s.mamba_num_heads} heads of
            {s.mamba_head_dim}, state {s.ssm_state_size}, {s.n_groups} groups), {kinds.count("*")}
            attention blocks ({s.num_attention_heads} query and {s.num_key_value_heads} key/value
            heads of {s.head_dim}) and {kinds.count("-")} MLPs of {s.intermediate_size}; hidden
            size {s.hidden_size}. Embeddings are not tied. dt is not clamped."""
        )
        return checkpoint.model_card(facts, "nemotron-h-tiny", summary, architecture)


if __name__ == "__main__":
    run(NemotronHFamily(), "Trains a small nemotron_h language model.")
