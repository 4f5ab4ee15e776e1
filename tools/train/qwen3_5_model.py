"""A compact dense qwen3_5 network for training, with its multi-token prediction head.

Parameters of the trunk carry the names of transformers' Qwen3_5ForCausalLM (embeddings tied), the
head's those of published checkpoints (`mtp.`), which transformers leaves out. Gated DeltaNet runs
the chunked form: one triangular solve per chunk and matrix products.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layers import causal_conv, inverse_softplus


@dataclass(frozen=True)
class Shape:
    """The sizes of a model, under the names of config.json where it has them."""

    vocab_size: int = 2304
    hidden_size: int = 160
    intermediate_size: int = 232
    num_hidden_layers: int = 8
    full_attention_interval: int = 4  # every n-th layer is attention
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    partial_rotary_factor: float = 0.25
    rope_theta: float = 100000.0
    rms_norm_eps: float = 1e-6
    chunk_size: int = 64  # of the training forward; no property of the model

    @property
    def key_dim(self) -> int:
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    def is_attention(self, layer: int) -> bool:
        return (layer + 1) % self.full_attention_interval == 0


def gated_delta_chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int
) -> Tensor:
    """Gated delta rule from a zero state, with S of (key, value) per value head:

    S = exp(g) S;  d = beta (v - S^T k);  S = S + k d^T;  y = S^T q

    q and k (batch, length, key heads, key), v (batch, length, value heads, value), g and beta
    (batch, length, value heads), all fp32; value head h reads key head h // (value heads / key
    heads). Returns y shaped as v.

    Within a chunk the d of all its tokens solve (I + A) d = beta (v - exp(G) S_0^T k), where G is
    the running sum of g and A_ij = beta_i exp(G_i - G_j) (k_i . k_j) for j < i.
    """
    batch, length, key_heads = k.shape[:3]
    value_heads = v.shape[2]
    pad = -length % chunk
    if pad:
        # beta = 0 and g = 0 in the padding: no input and no decay.
        q, k, v, g, beta = (F.pad(t, (0, 0) * (t.dim() - 2) + (0, pad)) for t in (q, k, v, g, beta))
    chunks = (length + pad) // chunk

    def split(t: Tensor) -> Tensor:
        """(batch, length, heads, size) -> (chunks, batch, key heads, heads per key, chunk, size)"""
        t = t.reshape(batch, chunks, chunk, key_heads, -1, t.shape[-1])
        return t.permute(1, 0, 3, 4, 2, 5)

    q, k, v = split(q), split(k), split(v)
    beta = split(beta.unsqueeze(-1)).squeeze(-1)
    log_decay = split(g.unsqueeze(-1)).squeeze(-1).cumsum(-1)  # from the chunk's start
    from_start = torch.exp(log_decay)
    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=k.device).tril()
    between = log_decay.unsqueeze(-1) - log_decay.unsqueeze(-2)
    decay = torch.exp(between.masked_fill(~causal, -math.inf))
    scores = (q @ k.transpose(-1, -2)) * decay

    system = (k @ k.transpose(-1, -2)) * decay * beta.unsqueeze(-1)
    identity = torch.eye(chunk, dtype=system.dtype, device=system.device)
    # Only what lies below the diagonal is read.
    inverse = torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True)
    inverse = inverse * beta.unsqueeze(-2)
    fresh = inverse @ v  # d for a zero state
    reads = (inverse * from_start.unsqueeze(-2)) @ k  # d loses reads S_0

    # From chunk to chunk, with the heads in the batch.
    to_end = torch.exp(log_decay[..., -1:] - log_decay)
    writes = (k * to_end.unsqueeze(-1)).transpose(-1, -2).flatten(1, 3)
    total = from_start[..., -1].flatten(1)[..., None, None]
    fresh, reads = fresh.flatten(1, 3), reads.flatten(1, 3)
    state = k.new_zeros(fresh.shape[1], k.shape[-1], v.shape[-1])
    entering, written = [], []
    for u, r, w, e in zip(
        fresh.unbind(), reads.unbind(), writes.unbind(), total.unbind(), strict=True
    ):
        d = torch.baddbmm(u, r, state, alpha=-1)
        entering.append(state)
        written.append(d)
        state = torch.baddbmm(state * e, w, d)

    queries = (q * from_start.unsqueeze(-1)).flatten(1, 3)
    y = queries @ torch.stack(entering) + scores.flatten(1, 3) @ torch.stack(written)
    y = y.unflatten(1, (batch, value_heads)).permute(1, 0, 3, 2, 4)
    return y.reshape(batch, chunks * chunk, value_heads, -1)[:, :length]


def l2_normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class ZeroCentredNorm(nn.Module):
    """RMS norm with a weight of 1 + w."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return x * (1.0 + self.weight)


class GatedHeadNorm(nn.Module):
    """RMS norm of every head, a plain weight that the heads share, then silu of the gate."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * y * F.silu(z.float())


class GatedDeltaNet(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        hidden, value_heads = shape.hidden_size, shape.linear_num_value_heads
        conv_dim = 2 * shape.key_dim + shape.value_dim
        self.in_proj_qkv = nn.Linear(hidden, conv_dim, bias=False)
        self.in_proj_z = nn.Linear(hidden, shape.value_dim, bias=False)
        self.in_proj_b = nn.Linear(hidden, value_heads, bias=False)
        self.in_proj_a = nn.Linear(hidden, value_heads, bias=False)
        # Holds the weight under transformers' name; causal_conv does the work.
        self.conv1d = nn.Conv1d(
            conv_dim, conv_dim, shape.linear_conv_kernel_dim, groups=conv_dim, bias=False
        )
        self.dt_bias = nn.Parameter(torch.empty(value_heads))
        self.A_log = nn.Parameter(torch.empty(value_heads))
        self.norm = GatedHeadNorm(shape.linear_value_head_dim, shape.rms_norm_eps)
        self.out_proj = nn.Linear(shape.value_dim, hidden, bias=False)

    def forward(self, u: Tensor) -> Tensor:
        s = self.shape
        qkv = F.silu(causal_conv(self.in_proj_qkv(u), self.conv1d.weight))
        q, k, v = qkv.float().split([s.key_dim, s.key_dim, s.value_dim], dim=-1)
        q = l2_normalised(q.unflatten(-1, (-1, s.linear_key_head_dim)))
        k = l2_normalised(k.unflatten(-1, (-1, s.linear_key_head_dim)))
        v = v.unflatten(-1, (-1, s.linear_value_head_dim))
        beta = torch.sigmoid(self.in_proj_b(u).float())
        g = -torch.exp(self.A_log) * F.softplus(self.in_proj_a(u).float() + self.dt_bias)
        with torch.autocast(u.device.type, enabled=False):
            y = gated_delta_chunked(q * s.linear_key_head_dim**-0.5, k, v, g, beta, s.chunk_size)
        z = self.in_proj_z(u).unflatten(-1, (-1, s.linear_value_head_dim))
        return self.out_proj(self.norm(y, z).flatten(-2))


@dataclass
class Chain:
    """What the attention layer of a multi-token prediction chain has seen: (batch, heads, length,
    head_dim) per depth. Entry i of every depth belongs to the chain that starts at i."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


def chained_attention(q: Tensor, chain: Chain) -> Tensor:
    """Query i sees the first depth up to i, and of later depths only its own chain's entry."""
    length, scale = q.shape[2], q.shape[-1] ** -0.5
    causal = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    first = (q @ chain.keys[0].transpose(-1, -2)).float().masked_fill(~causal, -math.inf)
    later = [(q * k).sum(-1, keepdim=True).float() for k in chain.keys[1:]]
    weights = torch.softmax(torch.cat([first, *later], -1) * scale, -1).to(q.dtype)
    out = weights[..., :length] @ chain.values[0]
    for depth, v in enumerate(chain.values[1:]):
        out = out + weights[..., length + depth, None] * v
    return out


class Attention(nn.Module):
    """Causal grouped-query attention with normalised queries and keys, rotary positions on the
    first dimensions of a head, and a gate on its output."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        hidden, q_size = shape.hidden_size, shape.num_attention_heads * shape.head_dim
        kv_size = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(hidden, 2 * q_size, bias=False)  # per head: query, then gate
        self.k_proj = nn.Linear(hidden, kv_size, bias=False)
        self.v_proj = nn.Linear(hidden, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, hidden, bias=False)
        self.q_norm = ZeroCentredNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = ZeroCentredNorm(shape.head_dim, shape.rms_norm_eps)

    def rotate(self, x: Tensor, start: int) -> Tensor:
        """x (batch, heads, length, head_dim) in fp32, at the positions from `start` on."""
        s = self.shape
        pairs = torch.arange(0, s.rotary_dim, 2, dtype=torch.float32, device=x.device)
        frequency = s.rope_theta ** (-pairs / s.rotary_dim)
        position = torch.arange(start, start + x.shape[2], dtype=torch.float32, device=x.device)
        angle = position.unsqueeze(-1) * frequency
        cos, sin = angle.cos(), angle.sin()
        a, b, rest = x.split(
            [s.rotary_dim // 2, s.rotary_dim // 2, s.head_dim - s.rotary_dim], dim=-1
        )
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)

    def forward(self, u: Tensor, chain: Chain | None = None) -> Tensor:
        """With a chain, one more depth of it, each entry a position later than the last depth's."""
        s = self.shape
        start = len(chain.keys) if chain is not None else 0
        q, gate = self.q_proj(u).unflatten(-1, (-1, 2 * s.head_dim)).chunk(2, dim=-1)
        k = self.k_proj(u).unflatten(-1, (-1, s.head_dim))
        v = self.v_proj(u).unflatten(-1, (-1, s.head_dim)).transpose(1, 2)
        q = self.rotate(self.q_norm(q).transpose(1, 2), start).to(v.dtype)
        k = self.rotate(self.k_norm(k).transpose(1, 2), start).to(v.dtype)
        per_key = s.num_attention_heads // s.num_key_value_heads
        k, v = k.repeat_interleave(per_key, dim=1), v.repeat_interleave(per_key, dim=1)
        if chain is not None:
            chain.keys.append(k)
            chain.values.append(v)
        if start == 0:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            out = chained_attention(q, chain)
        return self.o_proj(out.transpose(1, 2).flatten(-2) * torch.sigmoid(gate.flatten(-2)))


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, u: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(u)) * self.up_proj(u))


class DecoderLayer(nn.Module):
    def __init__(self, shape: Shape, is_attention: bool, dropout: float) -> None:
        super().__init__()
        self.input_layernorm = ZeroCentredNorm(shape.hidden_size, shape.rms_norm_eps)
        if is_attention:
            self.self_attn = Attention(shape)
        else:
            self.linear_attn = GatedDeltaNet(shape)
        self.post_attention_layernorm = ZeroCentredNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Mlp(shape)
        self.is_attention = is_attention
        self.dropout = dropout

    def forward(self, x: Tensor, chain: Chain | None = None) -> Tensor:
        u = self.input_layernorm(x)
        mixed = self.self_attn(u, chain) if self.is_attention else self.linear_attn(u)
        x = x + F.dropout(mixed, self.dropout, self.training)
        u = self.mlp(self.post_attention_layernorm(x))
        return x + F.dropout(u, self.dropout, self.training)


class Trunk(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(
            [
                DecoderLayer(shape, shape.is_attention(i), dropout)
                for i in range(shape.num_hidden_layers)
            ]
        )
        self.norm = ZeroCentredNorm(shape.hidden_size, shape.rms_norm_eps)
        self.dropout = dropout

    def embed(self, ids: Tensor) -> Tensor:
        return F.dropout(self.embed_tokens(ids), self.dropout, self.training)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class MtpHead(nn.Module):
    """Multi-token prediction: one attention layer that drafts tokens, each from the last draft.

    With RMS0 the zero-centred norm (weight 1 + w), E the trunk's embedding, W its output head and
    h_i the trunk's hidden state of token x_i AFTER the final norm (what W is applied to), entry i
    of the head takes h_i and the token after it:

        e_i = fc [ RMS0(E(x_{i+1}); pre_fc_norm_embedding) | RMS0(h_i; pre_fc_norm_hidden) ]
        m_i = RMS0(layer(e_i); norm)

    The embedding is the first half of fc's input, the hidden state the second. `layer` is a full
    attention layer with its MLP as in the trunk, with residuals around both, and with a KV cache
    of its own, where entry i stands at rotary position i (any constant shift is equivalent).
    W m_i are the logits of x_{i+2}.

    A draft after the tokens x_0 .. x_{n-1}: x_n is what the trunk chose from W h_{n-1}. Entries
    0 .. n-1 of the head are made of the trunk's h_0 .. h_{n-1} and x_1 .. x_n, and the first draft
    is x'_{n+1} = argmax W m_{n-1}. Every later draft is one more entry, made of the head's OWN
    output, after its norm, in the place of the hidden state:

        e_{i+1} = fc [ RMS0(E(x'_{i+2}); ...) | RMS0(m_i; ...) ],  x'_{i+3} = argmax W m_{i+1}

    for i = n-1, n, ... at rotary position i+1, attending to all entries before it. Once the trunk
    has verified drafts, the entries made of the head's own output are dropped, and those of the
    accepted tokens are made anew from the trunk's hidden states.
    """

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        self.pre_fc_norm_embedding = ZeroCentredNorm(hidden, eps)
        self.pre_fc_norm_hidden = ZeroCentredNorm(hidden, eps)
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([DecoderLayer(shape, True, dropout)])
        self.norm = ZeroCentredNorm(hidden, eps)

    def forward(self, hidden: Tensor, embedded: Tensor, chain: Chain) -> Tensor:
        """One depth of the chains from all positions at once.

        hidden (batch, length, hidden): at the first depth the trunk's, later what this returned
        for the depth before. embedded: of the token that follows, at depth k that of i + k.
        """
        pair = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        return self.norm(self.layers[0](self.fc(torch.cat(pair, dim=-1)), chain))


class Qwen35(nn.Module):
    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape, dropout)
        self.mtp = MtpHead(shape, dropout)
        self.reset_parameters()

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight).float()

    def forward(self, ids: Tensor) -> Tensor:
        """ids (batch, length) -> fp32 logits (batch, length, vocab)."""
        return self.logits(self.model(ids))

    def chained_logits(self, ids: Tensor, depths: int) -> Tensor:
        """ids (batch, length + depths) -> logits (1 + depths, batch, length, vocab): at i of depth
        k those of token i + k + 1, given all tokens up to i + k. Depth 0 is the trunk."""
        length = ids.shape[1] - depths
        hidden = [self.model(ids[:, :length])]
        embedded = self.model.embed(ids[:, 1:])
        chain = Chain()
        for k in range(depths):
            hidden.append(self.mtp(hidden[-1], embedded[:, k : k + length], chain))
        return self.logits(torch.stack(hidden))

    @torch.no_grad()
    def draft(self, ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Greedy drafts after ids (batch, length): the trunk's own next token (batch), the drafts
        that follow it (batch, count) and their logits (batch, count, vocab)."""
        hidden = self.model(ids)
        chosen = self.logits(hidden[:, -1]).argmax(-1)
        following = torch.cat([ids[:, 1:], chosen.unsqueeze(1)], dim=1)
        chain, drafts, logits = Chain(), [], []
        for _ in range(count):
            # The chains from earlier positions go along unused.
            hidden = self.mtp(hidden, self.model.embed(following), chain)
            logits.append(self.logits(hidden[:, -1]))
            drafts.append(logits[-1].argmax(-1))
            following = torch.cat([following[:, 1:], drafts[-1].unsqueeze(1)], dim=1)
        return chosen, torch.stack(drafts, 1), torch.stack(logits, 1)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        residual_scale = (2 * self.shape.num_hidden_layers) ** -0.5
        for name, p in self.named_parameters():
            leaf = name.rsplit(".", 1)[-1]
            if leaf == "A_log":
                p.uniform_(1.0, 16.0).log_()
            elif leaf == "dt_bias":
                dt = p.uniform_(math.log(1e-3), math.log(1e-1)).exp()
                p.copy_(inverse_softplus(dt))
            elif p.dim() == 1:
                p.fill_(1.0 if name.endswith("linear_attn.norm.weight") else 0.0)
            elif name.endswith("conv1d.weight"):
                bound = self.shape.linear_conv_kernel_dim**-0.5
                p.uniform_(-bound, bound)
            elif name.endswith("embed_tokens.weight"):
                p.normal_(std=0.02)
            elif name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
                p.normal_(std=residual_scale * p.shape[1] ** -0.5)
            else:
                p.normal_(std=p.shape[1] ** -0.5)
