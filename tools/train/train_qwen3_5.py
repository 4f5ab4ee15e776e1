#!/usr/bin/env python3
"""Trains a small dense qwen3_5 language model with a multi-token prediction head.

As train_nemotron_h.py: reads what prepare_corpus.py wrote and leaves a transformers checkpoint in
--out, with training.json and README.md. The head (qwen3_5_model.MtpHead) is trained along with the
trunk, over chains as long as those it drafts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

import checkpoint
import qwen3_5_mtp
from qwen3_5_model import Qwen35, Shape
from run import Family, run

DEPTHS = 3  # drafts of a chain
MTP_WEIGHT = 0.3  # of the mean loss of the drafts, beside the trunk's
CONTEXT = 256  # tokens before a chain when acceptance is measured
CONTEXT_STRIDE = 64


def config_fields(shape: Shape) -> dict[str, Any]:
    """config.json of a text-only export, with the keys of published checkpoints."""
    kinds = ["linear_attention", "full_attention"]
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 2,
        "full_attention_interval": shape.full_attention_interval,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "layer_types": [kinds[shape.is_attention(i)] for i in range(shape.num_hidden_layers)],
        "linear_conv_kernel_dim": shape.linear_conv_kernel_dim,
        "linear_key_head_dim": shape.linear_key_head_dim,
        "linear_num_key_heads": shape.linear_num_key_heads,
        "linear_num_value_heads": shape.linear_num_value_heads,
        "linear_value_head_dim": shape.linear_value_head_dim,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 4096,
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": shape.num_attention_heads,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_key_value_heads": shape.num_key_value_heads,
        "pad_token_id": 0,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_parameters": {
            # The sections only matter to images; they add up to the pairs that rotate.
            "mrope_interleaved": True,
            "mrope_section": [3, 3, 2],
            "partial_rotary_factor": shape.partial_rotary_factor,
            "rope_theta": shape.rope_theta,
            "rope_type": "default",
        },
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": shape.vocab_size,
    }


@torch.no_grad()
def draft_difference(
    ours: Qwen35, theirs: Qwen3_5ForCausalLM, mtp: dict[str, Tensor], ids: list[int]
) -> float:
    """The largest absolute difference in the logits of a chain of drafts; inf if one differs."""
    layer = qwen3_5_mtp.make_layer(theirs)
    qwen3_5_mtp.load_layer(layer, mtp)
    chosen, drafts, logits = qwen3_5_mtp.draft(theirs, layer, ids, DEPTHS)
    our_chosen, our_drafts, our_logits = ours.draft(torch.tensor([ids]), DEPTHS)
    if [chosen, *drafts] != [int(our_chosen[0]), *our_drafts[0].tolist()]:
        return float("inf")
    return (logits - our_logits[0]).abs().max().item()


@torch.no_grad()
def acceptance(model: Qwen35, heldout: list[tuple[str, list[int]]]) -> dict[str, Any]:
    """How many drafts of a chain the trunk's own greedy choice agrees with.

    After each of many pieces of held-out text the trunk chooses a token and the head drafts DEPTHS
    more. One pass of the trunk over all of it then gives its choice in the place of each draft; a
    draft is accepted if it and all before it are what the trunk chose.
    """
    device = next(model.parameters()).device
    contexts = torch.tensor(
        [
            ids[first : first + CONTEXT]
            for _, ids in heldout
            for first in range(0, len(ids) - CONTEXT + 1, CONTEXT_STRIDE)
        ],
        device=device,
    )
    accepted = torch.zeros(DEPTHS, dtype=torch.int64, device=device)
    for part in contexts.split(64):
        chosen, drafts, _ = model.draft(part, DEPTHS)
        verified = model(torch.cat([part, chosen.unsqueeze(1), drafts[:, :-1]], dim=1))
        agree = drafts == verified[:, CONTEXT:].argmax(-1)
        accepted += agree.long().cumprod(1).sum(0)
    reached = [contexts.shape[0], *accepted.tolist()]
    return {
        "contexts": contexts.shape[0],
        "context_tokens": CONTEXT,
        "accepted": [count / reached[0] for count in reached[1:]],
        "accepted_given_previous": [
            count / max(before, 1) for before, count in zip(reached, reached[1:], strict=False)
        ],
        "mean_accepted": sum(reached[1:]) / reached[0],
    }


class Qwen35Family(Family):
    lookahead = 1 + DEPTHS

    def __init__(self) -> None:
        self.shape = Shape()

    def build(self, dropout: float) -> Qwen35:
        return Qwen35(self.shape, dropout)

    def loss(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        with torch.autocast(batch.device.type, torch.bfloat16):
            logits = model.chained_logits(batch[:, :-1], DEPTHS)
        depths, rows, length, vocab = logits.shape
        targets = batch[:, 1:].unfold(1, length, 1).transpose(0, 1)  # (depths, rows, length)
        each = F.cross_entropy(
            logits.reshape(-1, vocab), targets.reshape(-1), reduction="none"
        ).view(depths, rows * length)
        trunk, *drafts = each.mean(1).unbind()
        parts = {"train": trunk} | {f"mtp_{k + 1}": loss for k, loss in enumerate(drafts)}
        return trunk + MTP_WEIGHT * torch.stack(drafts).mean(), parts

    def check_forward(self) -> dict[str, float]:
        ours = checkpoint.randomised(Qwen35(self.shape)).eval()
        fields = config_fields(self.shape)
        for key in ("model_type", "architectures", "dtype"):
            del fields[key]
        theirs = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**fields)).eval()
        state = ours.state_dict()
        mtp = {name: state.pop(name) for name in list(state) if name.startswith("mtp.")}
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
        theirs.load_state_dict(state, strict=True)
        # Two full chunks and a part of a third.
        ids = torch.randint(0, self.shape.vocab_size, (2, 2 * self.shape.chunk_size + 21))
        difference = checkpoint.max_difference(ours, theirs, ids)
        checkpoint.require_close(difference, "training forward against transformers")
        drafts = draft_difference(ours, theirs, mtp, ids[0].tolist())
        checkpoint.require_close(drafts, "drafts against transformers' layers")
        return {"logits": difference, "draft_logits": drafts}

    def check_saved(self, out: Path, model: nn.Module, ids: list[int]) -> dict[str, float]:
        theirs = Qwen3_5ForCausalLM.from_pretrained(str(out), dtype=torch.float32).eval()
        difference = checkpoint.max_difference(model, theirs, torch.tensor([ids]))
        checkpoint.require_close(difference, "saved checkpoint against transformers")
        saved = load_file(out / "model.safetensors")
        mtp = {name: t.float() for name, t in saved.items() if name.startswith("mtp.")}
        drafts = draft_difference(model, theirs, mtp, ids)
        checkpoint.require_close(drafts, "saved drafts against transformers' layers")
        return {"logits": difference, "draft_logits": drafts}

    def write(self, out: Path, state: dict[str, Tensor]) -> int:
        checkpoint.write_json(out / "config.json", config_fields(self.shape))
        checkpoint.write_json(
            out / "generation_config.json", {"eos_token_id": 2, "pad_token_id": 0}
        )
        return checkpoint.write_weights(out / "model.safetensors", state)

    def measure(self, model: nn.Module, heldout: list[tuple[str, list[int]]]) -> dict[str, Any]:
        return {"mtp": {"weight": MTP_WEIGHT, "depths": DEPTHS} | acceptance(model, heldout)}

    def card(self, facts: dict[str, Any]) -> str:
        s, mtp = self.shape, facts["mtp"]
        attention = sum(s.is_attention(i) for i in range(s.num_hidden_layers))
        summary = """in the dense `qwen3_5` architecture (Gated DeltaNet layers, gated attention,
            SwiGLU MLPs) with a multi-token prediction head"""
        layers = checkpoint.wrapped(
            f"""{s.num_hidden_layers} layers of hidden size {s.hidden_size}, every
            {s.full_attention_interval}th of which is attention:
            {s.num_hidden_layers - attention} Gated DeltaNet layers ({s.linear_num_key_heads} key
            heads of {s.linear_key_head_dim}, {s.linear_num_value_heads} value heads of
            {s.linear_value_head_dim}) and {attention} attention layers ({s.num_attention_heads}
            query and {s.num_key_value_heads} key/value heads of {s.head_dim}, rotary positions on
            {s.rotary_dim} dimensions), each with an MLP of {s.intermediate_size}. Embeddings are
            tied."""
        )
        head = checkpoint.wrapped(
            f"""The multi-token prediction head (`mtp.`) is one attention layer that drafts tokens
            in a chain, fed its own output after its norm. It was trained along with the trunk over
            chains of {mtp["depths"]}, the mean of their losses weighted {mtp["weight"]}. Measured
            by drafting {mtp["depths"]} tokens greedily after each of {mtp["contexts"]:,} pieces of
            held-out text ({mtp["context_tokens"]} tokens each), a draft being accepted if it and
            all drafts before it are the trunk's own greedy choice:"""
        )
        rows = "\n".join(
            f"| {k + 1} | {all_before:.1%} | {given:.1%} |"
            for k, (all_before, given) in enumerate(
                zip(mtp["accepted"], mtp["accepted_given_previous"], strict=True)
            )
        )
        architecture = f"""{layers}

{head}

| draft | accepted | if the one before was |
| --- | --- | --- |
{rows}

That is {mtp["mean_accepted"]:.2f} accepted drafts per chain. transformers leaves the head out."""
        return checkpoint.model_card(facts, "qwen3.5-tiny", summary, architecture)


if __name__ == "__main__":
    run(Qwen35Family(), "Trains a small qwen3_5 language model with multi-token prediction.")
