"""The nemotron_h reference checkpoints.

transformers' PyTorch path clamps dt to at least time_step_min, which is 0 here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import (
    NemotronHForCausalLM,
    NemotronHMamba2Mixer,
)

from reference import Randomiser, Variant, randomise

BLOCK_TYPES = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}


@dataclass(frozen=True)
class NemotronHVariant(Variant):
    pattern: str = field(kw_only=True)
    # True: config.json as transformers 5 writes it, and its own names (`model.`) for tensors.
    # False: both as published checkpoints have them, with tensors under `backbone.`.
    transformers_spelling: bool = field(default=False, kw_only=True)

    def build(self, seed: int) -> NemotronHForCausalLM:
        config = NemotronHConfig(
            layers_block_type=[BLOCK_TYPES[kind] for kind in self.pattern],
            tie_word_embeddings=False,
            conv_kernel=4,
            use_conv_bias=True,
            layer_norm_epsilon=1e-5,
            mlp_hidden_act="relu2",
            max_position_embeddings=512,
            **self.sizes,
        )
        # The initialiser takes the logarithm of time_step_min, so it becomes 0 only afterwards.
        model = NemotronHForCausalLM(config)
        model.config.time_step_min = 0.0
        for module in model.modules():
            if isinstance(module, NemotronHMamba2Mixer):
                module.time_step_limit = (0.0, float("inf"))
        draw = Randomiser(seed)
        randomise(model, self.storage, lambda name, p: self.value(draw, name, p))
        if self.tied:
            # transformers does not tie this architecture, whatever its config says.
            model.lm_head.weight = model.model.embeddings.weight
        return model.double().eval()

    def value(self, draw: Randomiser, name: str, p: Tensor) -> Tensor:
        """One that no default could stand in for."""
        leaf = name.rsplit(".", 1)[-1]
        if leaf == "A_log":
            return draw.a_log(p)
        if leaf == "dt_bias":
            return draw.dt_bias(p)
        if leaf == "D":
            return draw.normal(p, 1.0)
        if p.dim() == 1 and leaf == "weight":
            return draw.uniform(p, 0.5, 1.5)
        if leaf == "bias":
            return draw.normal(p, 0.3)
        if name.endswith("conv1d.weight"):
            return draw.normal(p, 0.6)
        if name in ("model.embeddings.weight", "lm_head.weight"):
            # Large logits: greedy choices then differ by much more than rounding.
            return draw.normal(p, 4.0 * self.sizes["hidden_size"] ** -0.5)
        return draw.normal(p, p.shape[1] ** -0.5)

    def config(self, model: NemotronHForCausalLM) -> dict[str, Any]:
        fields = json.loads(model.config.to_json_string(use_diff=True))
        fields["architectures"] = ["NemotronHForCausalLM"]
        dtype = str(self.dtype).removeprefix("torch.")
        if self.transformers_spelling:
            return fields | {"dtype": dtype}
        for name in ("layers_block_type", "time_step_limit", "mtp_layers_block_type", "dtype"):
            fields.pop(name, None)
        return fields | {
            "torch_dtype": dtype,
            "hybrid_override_pattern": self.pattern,
            "num_hidden_layers": len(self.pattern),
            "tie_word_embeddings": self.tied,
        }

    def tensors(self, model: NemotronHForCausalLM) -> dict[str, Tensor]:
        tensors = {}
        for name, value in model.state_dict().items():
            if self.tied and name == "lm_head.weight":
                continue
            if not self.transformers_spelling and name.startswith("model."):
                name = "backbone." + name.removeprefix("model.")
            tensors[name] = value.to(self.dtype).contiguous()
        return tensors


VARIANTS = (
    NemotronHVariant(
        "nemotron-h-a",
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
        pattern="M-M*-M*",
        transformers_spelling=True,
    ),
    NemotronHVariant(
        "nemotron-h-b",
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
        pattern="M*-M",
    ),
    NemotronHVariant(
        "nemotron-h-c",
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
        pattern="M*-M-M*-",
        dtype=torch.bfloat16,
        tied=True,
        shards=2,
    ),
)
