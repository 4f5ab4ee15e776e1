"""A compact nemotron_h network for training, in plain PyTorch.

Parameters carry the names of transformers' NemotronHForCausalLM, so a state dict moves between
the two unchanged. The Mamba-2 mixer runs the chunked (state-space dual) form with matrix
products, where transformers' own fallback materialises every outer product. dt is not clamped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layers import causal_conv, inverse_softplus


@dataclass(frozen=True)
class Shape:
    """The sizes of a model; the pattern has one letter per block (M mamba, * attention, - MLP)."""

    vocab_size: int = 2304
    hidden_size: int = 160
    pattern: str = "MM-M*-MM-M*-"
    mamba_num_heads: int = 8
    mamba_head_dim: int = 64
    ssm_state_size: int = 128
    n_groups: int = 2
    conv_kernel: int = 4
    chunk_size: int = 64
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 704
    eps: float = 1e-5

    @property
    def d_inner(self) -> int:
        return self.mamba_num_heads * self.mamba_head_dim

    @property
    def conv_dim(self) -> int:
        return self.d_inner + 2 * self.n_groups * self.ssm_state_size


def ssd_chunked(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, chunk: int) -> Tensor:
    """Mamba-2 scan from a zero state: h = exp(dt a) h + dt x b^T, y = h c.

    x (batch, length, heads, dim), dt (batch, length, heads) fp32 after softplus, a (heads) fp32
    and negative, b and c (batch, length, groups, state). Returns y shaped as x.
    """
    batch, length, heads, dim = x.shape
    groups, state = b.shape[2:]
    per_group = heads // groups
    pad = -length % chunk
    if pad:
        # dt = 0 in the padding: no decay and no input.
        x, dt, b, c = (F.pad(t, (0, 0) * (t.dim() - 2) + (0, pad)) for t in (x, dt, b, c))
    chunks = (length + pad) // chunk

    xdt = (x * dt.unsqueeze(-1)).reshape(batch, chunks, chunk, groups, per_group, dim)
    b = b.reshape(batch, chunks, chunk, groups, state).transpose(2, 3)
    c = c.reshape(batch, chunks, chunk, groups, state).transpose(2, 3)
    # Log of the decay from the chunk's start: (batch, chunks, groups, per_group, chunk)
    log_decay = (dt * a).reshape(batch, chunks, chunk, groups, per_group)
    log_decay = log_decay.permute(0, 1, 3, 4, 2).cumsum(-1)

    # Within a chunk: masked attention, weighted by the decay between source and target.
    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).tril()
    between = log_decay.unsqueeze(-1) - log_decay.unsqueeze(-2)
    weights = torch.exp(between.masked_fill(~causal, -math.inf))
    scores = c @ b.transpose(-1, -2)  # (batch, chunks, groups, chunk, chunk)
    y = (scores.unsqueeze(3) * weights) @ xdt.permute(0, 1, 3, 4, 2, 5)
    y = y.transpose(3, 4)  # (batch, chunks, groups, chunk, per_group, dim)

    if chunks > 1:
        # What each chunk adds to the state by its own end: (batch, chunks, groups, state, p*dim)
        to_end = torch.exp(log_decay[..., -1:] - log_decay).permute(0, 1, 4, 2, 3)
        inputs = (xdt * to_end.unsqueeze(-1)).flatten(4).transpose(2, 3)
        added = b.transpose(-1, -2) @ inputs
        entering = chunk_states(added, log_decay[..., -1])
        carried = (c @ entering).unflatten(-1, (per_group, dim))
        y = y + carried * torch.exp(log_decay).transpose(-1, -2).unsqueeze(-1)

    y = y.transpose(2, 3).reshape(batch, chunks * chunk, heads, dim)
    return y[:, :length]


def chunk_states(added: Tensor, log_total: Tensor) -> Tensor:
    """The state that enters each chunk, given what every chunk adds and its total log decay.

    added (batch, chunks, groups, state, per_group * dim), log_total (batch, chunks, groups,
    per_group). Returns a tensor shaped as added.
    """
    batch, chunks, groups, state, width = added.shape
    per_group = log_total.shape[-1]
    total = log_total.cumsum(1)
    before = total - log_total  # log decay of all chunks before this one
    earlier = torch.ones(chunks, chunks, dtype=torch.bool, device=added.device).tril(-1)
    between = before.unsqueeze(2) - total.unsqueeze(1)  # (batch, to, from, groups, per_group)
    weights = torch.exp(between.masked_fill(~earlier[:, :, None, None], -math.inf))
    weights = weights.permute(0, 3, 4, 1, 2)  # (batch, groups, per_group, to, from)
    per_head = added.unflatten(-1, (per_group, width // per_group)).permute(0, 2, 4, 1, 3, 5)
    entering = weights @ per_head.flatten(4)  # (batch, groups, per_group, to, state * dim)
    entering = entering.unflatten(-1, (state, width // per_group))
    return entering.permute(0, 3, 1, 4, 2, 5).flatten(4)


class RmsNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


class GatedGroupNorm(nn.Module):
    """RMS over each of `groups` parts of y * silu(z), then a weight per channel."""

    def __init__(self, size: int, groups: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.groups = groups
        self.eps = eps

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        u = (y.float() * F.silu(z.float())).unflatten(-1, (self.groups, -1))
        u = u * torch.rsqrt(u.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * u.flatten(-2)


class Mamba2Mixer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        heads, conv_dim = shape.mamba_num_heads, shape.conv_dim
        self.in_proj = nn.Linear(shape.hidden_size, shape.d_inner + conv_dim + heads, bias=False)
        # Holds the parameters under transformers' names; causal_conv does the work.
        self.conv1d = nn.Conv1d(conv_dim, conv_dim, shape.conv_kernel, groups=conv_dim)
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.A_log = nn.Parameter(torch.empty(heads))
        self.D = nn.Parameter(torch.ones(heads))
        self.norm = GatedGroupNorm(shape.d_inner, shape.n_groups, shape.eps)
        self.out_proj = nn.Linear(shape.d_inner, shape.hidden_size, bias=False)

    def forward(self, u: Tensor) -> Tensor:
        s = self.shape
        grouped = s.n_groups * s.ssm_state_size
        z, xbc, dt = self.in_proj(u).split([s.d_inner, s.conv_dim, s.mamba_num_heads], dim=-1)
        xbc = F.silu(causal_conv(xbc, self.conv1d.weight, self.conv1d.bias))
        x, b, c = xbc.split([s.d_inner, grouped, grouped], dim=-1)
        x = x.unflatten(-1, (s.mamba_num_heads, s.mamba_head_dim))
        b = b.unflatten(-1, (s.n_groups, s.ssm_state_size))
        c = c.unflatten(-1, (s.n_groups, s.ssm_state_size))
        dt = F.softplus(dt.float() + self.dt_bias)
        y = ssd_chunked(x, dt, -torch.exp(self.A_log), b, c, s.chunk_size)
        y = y + self.D.unsqueeze(-1) * x
        return self.out_proj(self.norm(y.flatten(-2), z))


class Attention(nn.Module):
    """Causal grouped-query attention without positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.queries_per_key = shape.num_attention_heads // shape.num_key_value_heads
        q_size = shape.num_attention_heads * shape.head_dim
        kv_size = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, shape.hidden_size, bias=False)

    def forward(self, u: Tensor) -> Tensor:
        q = self.q_proj(u).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        k = self.k_proj(u).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        v = self.v_proj(u).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        k = k.repeat_interleave(self.queries_per_key, dim=1)
        v = v.repeat_interleave(self.queries_per_key, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, u: Tensor) -> Tensor:
        return self.down_proj(F.relu(self.up_proj(u)).square())


MIXERS: dict[str, type[nn.Module]] = {"M": Mamba2Mixer, "*": Attention, "-": Mlp}


class Block(nn.Module):
    def __init__(self, shape: Shape, kind: str, dropout: float) -> None:
        super().__init__()
        self.norm = RmsNorm(shape.hidden_size, shape.eps)
        self.mixer = MIXERS[kind](shape)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.mixer(self.norm(x)), self.dropout, self.training)


class Backbone(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList([Block(shape, kind, dropout) for kind in shape.pattern])
        self.norm_f = RmsNorm(shape.hidden_size, shape.eps)
        self.dropout = dropout

    def forward(self, ids: Tensor) -> Tensor:
        x = F.dropout(self.embeddings(ids), self.dropout, self.training)
        for layer in self.layers:
            x = layer(x)
        return self.norm_f(x)


class NemotronH(nn.Module):
    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape = shape
        self.model = Backbone(shape, dropout)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        self.reset_parameters()

    def forward(self, ids: Tensor) -> Tensor:
        """ids (batch, length) -> fp32 logits (batch, length, vocab)."""
        return self.lm_head(self.model(ids)).float()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        residual_scale = len(self.shape.pattern) ** -0.5
        for name, p in self.named_parameters():
            leaf = name.rsplit(".", 1)[-1]
            if leaf == "A_log":
                p.uniform_(1.0, 16.0).log_()
            elif leaf == "dt_bias":
                dt = p.uniform_(math.log(1e-3), math.log(1e-1)).exp()
                p.copy_(inverse_softplus(dt))
            elif leaf == "D" or name.endswith(("norm.weight", "norm_f.weight")):
                p.fill_(1.0)
            elif name.endswith("conv1d.bias"):
                p.zero_()
            elif name.endswith("conv1d.weight"):
                bound = self.shape.conv_kernel**-0.5
                p.uniform_(-bound, bound)
            elif name.endswith(("embeddings.weight", "lm_head.weight")):
                p.normal_(std=0.02)
            elif name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
                p.normal_(std=residual_scale * p.shape[1] ** -0.5)
            else:
                p.normal_(std=p.shape[1] ** -0.5)
