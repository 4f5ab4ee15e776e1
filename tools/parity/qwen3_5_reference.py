"""The qwen3_5 reference checkpoints, with their multi-token prediction heads.

reference.safetensors also holds mtp_logits_i (float32, (3, vocab)) and mtp_tokens_i (int32): the
chain of greedy drafts that follows greedy_i[0] after prompt i (qwen3_5_model.MtpHead has the
definition).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpLayer
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

import qwen3_5_mtp
from reference import Randomiser, Variant, full_pass, lead, randomise

DRAFTS = 3


class WithMtp(nn.Module):
    """A model, and the layer that drafts for it."""

    def __init__(self, model: Qwen3_5ForCausalLM, layer: MtpLayer) -> None:
        super().__init__()
        self.model = model
        self.layer = layer

    def forward(self, **arguments: Any) -> Any:
        return self.model(**arguments)


@dataclass(frozen=True)
class Qwen35Variant(Variant):
    rope: dict[str, Any] = field(kw_only=True)  # keys of config.json
    # True: `text_config` within a configuration with vision, tensors under `language_model.`.
    nested: bool = field(default=False, kw_only=True)
    # Decay and output norm in fp32, whatever the other tensors are in.
    wide_state: bool = field(default=False, kw_only=True)

    def storage(self, name: str) -> torch.dtype:
        wide = self.wide_state and name.endswith(("A_log", "linear_attn.norm.weight"))
        return torch.float32 if wide else self.dtype

    def text_config(self) -> dict[str, Any]:
        return {
            "attention_bias": False,
            "attn_output_gate": True,
            "dtype": str(self.dtype).removeprefix("torch."),
            "hidden_act": "silu",
            "linear_conv_kernel_dim": 4,
            "mamba_ssm_dtype": "float32",
            "max_position_embeddings": 512,
            "model_type": "qwen3_5_text",
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": self.tied,
            **self.sizes,
            **self.rope,
        }

    def config(self, model: nn.Module) -> dict[str, Any]:
        if not self.nested:
            return {"architectures": ["Qwen3_5ForCausalLM"]} | self.text_config()
        return {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "image_token_id": 1,
            "model_type": "qwen3_5",
            "text_config": self.text_config(),
            "tie_word_embeddings": self.tied,
            "video_token_id": 2,
            "vision_config": {
                "depth": 1,
                "hidden_size": 8,
                "intermediate_size": 8,
                "model_type": "qwen3_5",
                "num_heads": 1,
                "out_hidden_size": self.sizes["hidden_size"],
            },
        }

    def build(self, seed: int) -> WithMtp:
        fields = copy.deepcopy(self.text_config())
        for key in ("model_type", "dtype"):
            del fields[key]
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**fields))
        both = WithMtp(model, qwen3_5_mtp.make_layer(model))
        draw = Randomiser(seed)
        randomise(both, self.storage, lambda name, p: self.value(draw, name, p))
        return both.double().eval()

    def value(self, draw: Randomiser, name: str, p: Tensor) -> Tensor:
        """One that no default could stand in for."""
        leaf = name.rsplit(".", 1)[-1]
        if leaf == "A_log":
            return draw.a_log(p)
        if leaf == "dt_bias":
            return draw.dt_bias(p)
        if name.endswith("linear_attn.norm.weight"):
            return draw.uniform(p, 0.5, 1.5)
        if p.dim() == 1:
            return draw.uniform(p, -0.5, 0.5)  # about 1, once 1 is added
        if name.endswith("conv1d.weight"):
            return draw.normal(p, 0.6)
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            # Large logits: greedy choices then differ by much more than rounding.
            return draw.normal(p, 4.0 * self.sizes["hidden_size"] ** -0.5)
        return draw.normal(p, p.shape[1] ** -0.5)

    def tensors(self, model: WithMtp) -> dict[str, Tensor]:
        tensors = {}
        for name, value in model.state_dict().items():
            if name.startswith("layer."):
                published = qwen3_5_mtp.published_name(name.removeprefix("layer."))
            else:
                published = name.removeprefix("model.")
            if self.tied and published == "lm_head.weight":
                continue
            if self.nested and published.startswith("model."):
                published = "model.language_model." + published.removeprefix("model.")
            tensors[published] = value.to(self.storage(name)).contiguous()
        if self.nested:
            # A text engine has to pass over the rest of a wrapper's tensors.
            tensors["model.visual.patch_embed.proj.bias"] = torch.ones(8, dtype=self.dtype)
        return tensors

    def further(self, model: WithMtp, prompt: list[int]) -> tuple[dict[str, Tensor], float]:
        _, drafts, logits = qwen3_5_mtp.draft(model.model, model.layer, prompt, DRAFTS)
        tokens = torch.tensor(drafts, dtype=torch.int32)
        return {"mtp_logits": logits.contiguous(), "mtp_tokens": tokens}, lead(logits)

    def check(self, folder: Path, model: WithMtp, prompt: list[int]) -> None:
        try:
            loaded = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float64).eval()
            difference = (full_pass(loaded, prompt) - full_pass(model, prompt)).abs().max().item()
            print(f"  loaded by transformers: largest logit difference {difference:.2e}")
        except Exception as error:  # the reference does not depend on it
            print(f"  not loaded by transformers: {type(error).__name__}: {error}")


VARIANTS = (
    Qwen35Variant(
        "qwen3_5-a",
        {
            "vocab_size": 152,
            "hidden_size": 24,
            "intermediate_size": 32,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
        tied=True,
        rope={
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [1, 1, 0],
                "partial_rotary_factor": 0.5,
                "rope_theta": 10000000,
                "rope_type": "default",
            }
        },
    ),
    Qwen35Variant(
        "qwen3_5-b",
        {
            "vocab_size": 131,
            "hidden_size": 30,
            "intermediate_size": 44,
            "num_hidden_layers": 5,
            "full_attention_interval": 2,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 20,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
        },
        dtype=torch.bfloat16,
        shards=2,
        nested=True,
        rope={
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [2, 2, 1],
                "partial_rotary_factor": 0.5,
                "rope_theta": 10000,
                "rope_type": "default",
            }
        },
    ),
    Qwen35Variant(
        "qwen3_5-c",
        {
            "vocab_size": 144,
            "hidden_size": 28,
            "intermediate_size": 40,
            "num_hidden_layers": 5,
            "layer_types": [
                "full_attention",
                "linear_attention",
                "linear_attention",
                "full_attention",
                "linear_attention",
            ],
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 24,
            "linear_value_head_dim": 8,
        },
        dtype=torch.bfloat16,
        wide_state=True,
        rope={"rope_theta": 500000.0, "partial_rotary_factor": 0.75},
    ),
)
