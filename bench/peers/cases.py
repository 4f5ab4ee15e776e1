"""Cases, their operands, and the recurrences in fp32 that every kernel is held against."""

import dataclasses
import math

import torch
import torch.nn.functional as F

WINDOW = 16


@dataclasses.dataclass(frozen=True)
class Case:
    family: str  # mamba2, gdn, kda
    name: str
    heads: int  # mamba2 heads; value heads
    groups: int  # mamba2 groups; key heads
    value_dim: int  # mamba2 head_dim
    key_dim: int  # mamba2 state_size
    batch: int
    tokens: int = 1
    checkpoint: torch.dtype = torch.float32
    activation: torch.dtype = torch.bfloat16

    @property
    def label(self):
        types = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
        what = "one token" if self.tokens == 1 else f"verify T={self.tokens}"
        state, activation = types[self.checkpoint], types[self.activation]
        return f"{self.name} {state}/{activation} {what} batch {self.batch}"

    @property
    def state_elements(self):
        return self.heads * self.value_dim * self.key_dim

    @property
    def state_bytes(self):
        return self.state_elements * self.checkpoint.itemsize

    @property
    def layers(self):
        """Layers one step runs through: 400 MB of state between two uses of a slot, if 128 do."""
        return max(2, min(128, math.ceil(400e6 / (self.batch * self.state_bytes))))

    @property
    def sets(self):
        """Sets of `batch` slots, so that the rows timed are many enough to meet every phase."""
        return max(1, min(16, 64 // self.batch))

    @property
    def tolerance(self):
        """Of |y - reference| / |reference| (Frobenius) over a run that crosses a flush. Outputs are
        in the activation type, and a state of two bytes is rounded once a token."""
        return 1.5e-2 if self.checkpoint == torch.float32 else 3e-2


def all_cases():
    bf16 = torch.bfloat16

    def super_(**more):
        return Case("mamba2", "Super", 128, 8, 64, 128, **more)

    def nano(**more):
        return Case("mamba2", "Nano-30B", 64, 8, 64, 128, **more)

    def delta(family, heads, key_heads, **more):
        name = f"GDN {key_heads}:{heads}" if family == "gdn" else f"KDA {heads}"
        return Case(family, name, heads, key_heads, 128, 128, **more)

    cases = [
        super_(batch=256),
        super_(batch=256, checkpoint=bf16),
        super_(batch=256, tokens=4),
    ]
    for batch in (1, 8, 64):
        cases += [nano(batch=batch), nano(batch=batch, tokens=4)]
    for shape in (("gdn", 64, 16), ("gdn", 32, 16), ("kda", 32, 32)):
        cases += [delta(*shape, batch=256), delta(*shape, batch=256, tokens=4)]
    cases += [delta("gdn", 32, 16, batch=256, checkpoint=bf16)]
    for batch in (1, 8, 64):
        cases += [delta("gdn", 32, 16, batch=batch), delta("gdn", 32, 16, batch=batch, tokens=4)]
    for batch in (1, 8):
        cases += [delta("kda", 32, 32, batch=batch), delta("kda", 32, 32, batch=batch, tokens=4)]
    return cases


def quick_cases():
    keep = {
        "Super f32/bf16 one token batch 256",
        "Super f32/bf16 verify T=4 batch 256",
        "Nano-30B f32/bf16 one token batch 8",
        "GDN 16:32 f32/bf16 one token batch 256",
        "GDN 16:32 f32/bf16 verify T=4 batch 256",
        "KDA 32 f32/bf16 one token batch 256",
    }
    return [c for c in all_cases() if c.label in keep]


def small_cases():
    """For a machine without a GPU: what Triton's interpreter can do in a minute."""
    shapes = [("mamba2", "Mamba-2 2:4", 4, 2, 32, 64), ("gdn", "GDN 2:4", 4, 2, 64, 64)]
    shapes += [("kda", "KDA 2", 2, 2, 64, 64)]
    f32 = torch.float32
    return [Case(*s, batch=2, tokens=t, activation=f32) for s in shapes for t in (1, 4)]


def long_run(total, tokens, after, rng):
    """`total` pairs of live records and tokens accepted next, as often as in a long run, in random
    order. after(live, accepted): the live records a step later. Counts are even in 1..tokens."""
    share = {0: 1.0}
    for _ in range(1000):
        moved = {}
        for live, p in share.items():
            for accepted in range(1, tokens + 1):
                there = after(live, accepted)
                moved[there] = moved.get(there, 0.0) + p / tokens
        # Half of it stays, or one token's period would never settle.
        share = {k: 0.5 * (share.get(k, 0.0) + moved.get(k, 0.0)) for k in share | moved}
    pairs = [(k, a, share[k] / tokens) for k in sorted(share) for a in range(1, tokens + 1)]
    found, reached = [], 0.0
    for live, accepted, p in pairs:
        reached += p
        # Ends are rounded, so that shares of 1/16 meet sets of 16.
        while len(found) < total and (len(found) + 0.5) / total < reached + 1e-9:
            found.append((live, accepted))
    found += found[-1:] * (total - len(found))
    rng.shuffle(found)
    return found


class Parameters:
    """A layer's parameters, f32 of values that are exact in bf16."""

    def __init__(self, case, device):
        generator = torch.Generator(device="cpu").manual_seed(3)

        def uniform(low, high, *shape):
            values = low + (high - low) * torch.rand(*shape, generator=generator)
            return values.bfloat16().float().to(device)

        h, k = case.heads, case.key_dim
        if case.family == "mamba2":
            self.a = uniform(-2.0, -0.2, h)
            self.d = uniform(-1.0, 1.0, h)
            self.dt_bias = uniform(-3.0, -1.0, h)
        else:
            self.a_log = uniform(-2.0, 0.5, h)
            per_channel = (h, k) if case.family == "kda" else (h,)
            self.dt_bias = uniform(-3.0, -1.0, *per_channel)


class Operands:
    """The inputs of one layer and step: `rows` times `tokens` packed tokens."""

    def __init__(self, case, rows, device, generator):
        tokens = rows * case.tokens
        h, g, p, n = case.heads, case.groups, case.value_dim, case.key_dim

        def normal(scale, *shape):
            values = torch.randn(*shape, device=device, generator=generator)
            return (scale * values).to(case.activation)

        self.rows, self.tokens = rows, tokens
        if case.family == "mamba2":
            self.x = normal(1.0, tokens, h, p)
            self.b = normal(1.0, tokens, g, n)
            self.c = normal(n**-0.5, tokens, g, n)
            self.dt = normal(0.5, tokens, h)
        else:
            # One projection, as the convolution leaves it; q, k and v are slices.
            self.mixed = normal(1.0, tokens, 2 * g * n + h * p)
            self.q = self.mixed[:, : g * n].view(tokens, g, n)
            self.k = self.mixed[:, g * n : 2 * g * n].view(tokens, g, n)
            self.v = self.mixed[:, 2 * g * n :].view(tokens, h, p)
            # For kernels that want them apart.
            self.q_packed = self.q.contiguous()
            self.k_packed = self.k.contiguous()
            self.v_packed = self.v.contiguous()
            gates = (h, n) if case.family == "kda" else (h,)
            self.a = normal(0.5, tokens, *gates)
            self.b = normal(1.0, tokens, h)
        self.y = torch.empty(tokens, h, p, device=device, dtype=case.activation)


def normalized(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


class Reference:
    """The recurrence in fp32, token by token, from a zero state. State: (rows, heads, P, N)."""

    def __init__(self, case, parameters, rows, device):
        self.case, self.p = case, parameters
        shape = (rows, case.heads, case.value_dim, case.key_dim)
        self.state = torch.zeros(shape, device=device)

    def token(self, state, o, at):
        case, p = self.case, self.p
        repeat = case.heads // case.groups
        if case.family == "mamba2":
            dt = F.softplus(o.dt[at].float() + p.dt_bias)
            x = o.x[at].float()
            b = o.b[at].float().repeat_interleave(repeat, 1)
            c = o.c[at].float().repeat_interleave(repeat, 1)
            state = state * torch.exp(dt * p.a)[..., None, None]
            state += (dt[..., None] * x)[..., None] * b[:, :, None, :]
            y = torch.einsum("bhpn,bhn->bhp", state, c) + p.d[:, None] * x
            return state, y
        q = normalized(o.q[at].float()).repeat_interleave(repeat, 1) * case.key_dim**-0.5
        k = normalized(o.k[at].float()).repeat_interleave(repeat, 1)
        v = o.v[at].float()
        gate = F.softplus(o.a[at].float() + p.dt_bias)
        a_log = p.a_log[:, None] if case.family == "kda" else p.a_log
        alpha = torch.exp(-torch.exp(a_log) * gate)
        alpha = alpha[:, :, None, :] if case.family == "kda" else alpha[..., None, None]
        beta = torch.sigmoid(o.b[at].float())
        state = state * alpha
        delta = beta[..., None] * (v - torch.einsum("bhpn,bhn->bhp", state, k))
        state += delta[..., None] * k[:, :, None, :]
        return state, torch.einsum("bhpn,bhn->bhp", state, q)

    def step(self, operands, accepted):
        """Outputs of all tokens; the state moves on by accepted[i] of row i's."""
        tokens = self.case.tokens
        rows = torch.arange(operands.rows, device=self.state.device) * tokens
        state, outputs, kept = self.state, [], self.state
        for t in range(tokens):
            state, y = self.token(state, operands, rows + t)
            outputs.append(y)
            if tokens == 1:
                kept = state
            else:
                kept = torch.where((accepted == t + 1)[:, None, None, None], state, kept)
        self.state = kept
        return torch.stack(outputs, 1).flatten(0, 1)
