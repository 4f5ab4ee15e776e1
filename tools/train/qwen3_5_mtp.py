"""Multi-token prediction of qwen3_5 computed with transformers' own layers, as a reference.

transformers leaves the `mtp.` tensors of these checkpoints out, but has the layer for other
architectures. The definition is that of qwen3_5_model.MtpHead; here every draft comes from one
pass over the whole chain, without a cache.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers.modeling_layers import MtpLayer
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5ForCausalLM,
    Qwen3_5RMSNorm,
)

# Published names, and the layer's.
NAMES = {
    "mtp.pre_fc_norm_embedding.": "enorm.",
    "mtp.pre_fc_norm_hidden.": "hnorm.",
    "mtp.fc.": "eh_proj.",
    "mtp.layers.0.": "mtp_block.",
    "mtp.norm.": "post_norm.",
}


def make_layer(model: Qwen3_5ForCausalLM) -> MtpLayer:
    """A layer of the model's sizes, with random weights."""
    index = model.config.layer_types.index("full_attention")
    return MtpLayer(model.config, Qwen3_5DecoderLayer, Qwen3_5RMSNorm, index).eval()


def published_name(name: str) -> str:
    for published, own in NAMES.items():
        if name.startswith(own):
            return published + name.removeprefix(own)
    raise ValueError(f"{name} has no published name")


def load_layer(layer: MtpLayer, tensors: dict[str, Tensor]) -> None:
    """Takes a checkpoint's `mtp.` tensors, all of which must be there."""
    layer.load_state_dict({name: tensors[published_name(name)] for name in layer.state_dict()})


@torch.no_grad()
def run_layer(model: Qwen3_5ForCausalLM, layer: MtpLayer, ids: Tensor, hidden: Tensor) -> Tensor:
    """Hidden states after the head's norm; ids (1, length), hidden (1, length, hidden size)."""
    embedded = model.model.embed_tokens(ids)
    length = ids.shape[1]
    positions = torch.arange(length, device=ids.device)
    rotary = model.model.rotary_emb(embedded, positions.view(1, 1, -1).expand(3, 1, -1))
    mask = torch.full((length, length), -math.inf, dtype=embedded.dtype, device=ids.device).triu(1)
    return layer(
        embedded,
        hidden,
        position_embeddings=rotary,
        attention_mask=mask[None, None],
        position_ids=None,
        past_key_values=None,
    )


@torch.no_grad()
def draft(
    model: Qwen3_5ForCausalLM, layer: MtpLayer, prompt: list[int], count: int
) -> tuple[int, list[int], Tensor]:
    """The model's own next token, the greedy drafts after it and their logits (count, vocab)."""
    device = model.lm_head.weight.device
    prompt_ids = torch.tensor([prompt], device=device)
    hidden = model.model(input_ids=prompt_ids, use_cache=False).last_hidden_state
    chosen = int(model.lm_head(hidden[0, -1]).argmax())
    ids, drafts, logits = [*prompt[1:], chosen], [], []
    for _ in range(count):
        out = run_layer(model, layer, torch.tensor([ids], device=device), hidden)
        logits.append(model.lm_head(out[0, -1]).float())
        drafts.append(int(logits[-1].argmax()))
        ids.append(drafts[-1])
        hidden = torch.cat([hidden, out[:, -1:]], dim=1)
    return chosen, drafts, torch.stack(logits)
