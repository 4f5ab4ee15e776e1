"""FlashInfer's Mamba-2 kernels. Its package compiles them at run time with nvcc and ninja, one
library for every combination of types, sizes and window, which takes minutes: --flashinfer asks for
them, and `build` compiles all that a run needs side by side."""

import concurrent.futures
import importlib

import torch

from cases import WINDOW
from peers import VllmMamba

MODULE = "flashinfer.mamba."


class Flashinfer(VllmMamba):
    package = "flashinfer"
    families = ("mamba2",)

    def setup(self):
        super().setup()
        # D and dt_bias share dt's type. Their values are exact in it.
        self.d = self.p.d.to(self.case.activation)[:, None].expand_as(self.d)
        self.dt_bias = self.p.dt_bias.to(self.case.activation)[:, None].expand_as(self.dt_bias)

    def rows(self, tensor):
        """(rows, tokens, ...)"""
        return tensor.view(-1, self.case.tokens, *tensor.shape[1:])

    def explain(self):
        return self.note


class FlashinferPlain(Flashinfer):
    name = "FlashInfer selective_state_update"

    def import_kernels(self, peers):
        self.kernel = peers.get("flashinfer", MODULE + "selective_state_update")

    @classmethod
    def job(cls, peers, case, major):
        module = peers.get("flashinfer", MODULE + "selective_state_update")
        half, index = case.activation, torch.int32
        key = (case.checkpoint, half, half, torch.float32, index, case.value_dim, case.key_dim)
        return module._get_module, (*key, case.tokens, index, torch.int64, major, None, 0)

    def launch(self, layer, o):
        self.kernel.selective_state_update(**self.common(layer, o), pad_slot_id=0)
        return o.y


class FlashinferVerify(FlashinferPlain):
    name, mode, tokens = "FlashInfer selective_state_update, verify", "native verify", "many"
    note = "without the copy of the accepted state that follows"

    def setup(self):
        super().setup()
        case = self.case
        shape = (case.batch, case.tokens, case.heads, case.value_dim, case.key_dim)
        self.snapshots = [
            torch.zeros(shape, dtype=case.checkpoint, device=self.device)
            for _ in range(self.layers)
        ]
        self.order = torch.arange(case.batch, dtype=torch.int32, device=self.device)

    def launch(self, layer, o):
        arguments = self.common(layer, o)
        for name in ("x", "B", "C", "out"):
            arguments[name] = self.rows(arguments[name])
        arguments["dt"] = self.rows(o.dt)[..., None].expand(-1, -1, -1, self.case.value_dim)
        self.kernel.selective_state_update(
            **arguments,
            pad_slot_id=0,
            disable_state_update=True,
            intermediate_states_buffer=self.snapshots[layer],
            intermediate_state_indices=self.order,
            cache_steps=self.case.tokens,
        )
        return o.y

    def commit(self, accepted):
        at = (self.order.long(), accepted.long() - 1)
        for state, snapshots in zip(self.states, self.snapshots, strict=True):
            state[self.places.long()] = snapshots[at]


class FlashinferReplay(Flashinfer):
    name, mode, tokens = "FlashInfer checkpointing_ssu", "replay", "any"

    def import_kernels(self, peers):
        self.kernel = peers.get("flashinfer", MODULE + "checkpointing_ssu").checkpointing_ssu

    @classmethod
    def job(cls, peers, case, major):
        peers.get("flashinfer", MODULE + "checkpointing_ssu")
        gen = importlib.import_module("flashinfer.jit.mamba.checkpointing_ssu")
        half, full = case.activation, torch.float32
        key = (case.checkpoint, half, half, half, full, torch.int32, None)
        key += (case.value_dim, case.key_dim, case.tokens, WINDOW)
        key += (case.heads // case.groups, case.groups, 0, False)
        return (lambda *k: gen.gen_checkpointing_ssu_module(*k).build_and_load()), key

    def setup(self):
        super().setup()
        case = self.case
        length = WINDOW + case.tokens

        def scratch(dtype, *shape):
            return torch.zeros(case.batch, case.heads, *shape, dtype=dtype, device=self.device)

        self.rings_x = self.rings(case.activation, case.heads, length, case.value_dim)
        self.rings_b = self.rings(case.activation, case.groups, length, case.key_dim)
        self.rings_dt = self.rings(torch.float32, case.heads, length)
        self.start = torch.zeros(self.slots + 1, dtype=torch.int32, device=self.device)
        self.live = torch.zeros(self.slots + 1, dtype=torch.int32, device=self.device)
        self.scratch = dict(
            cb_scaled=scratch(case.activation, 32, 8),
            cumAdt_vec=scratch(torch.float32, 16),
            cb_old=scratch(case.activation, 32, WINDOW // 2),
        )

    def launch(self, layer, o):
        self.kernel(
            self.states[layer],
            self.rings_x[layer],
            self.rings_b[layer],
            self.rings_dt[layer],
            self.start,
            self.live,
            self.rows(o.x),
            self.rows(o.dt)[..., None].expand(-1, -1, -1, self.case.value_dim),
            self.a,
            self.rows(o.b),
            self.rows(o.c),
            self.rows(o.y),
            D=self.d,
            dt_bias=self.dt_bias,
            dt_softplus=True,
            state_batch_indices=self.places,
            pad_slot_id=0,
            **self.scratch,
        )
        return o.y

    def commit(self, accepted):
        at = self.places.long()
        flushes = self.live[at] + self.case.tokens > WINDOW
        length = WINDOW + self.case.tokens
        moved = (self.start[at] + self.live[at]) % length
        self.start[at] = torch.where(flushes, moved, self.start[at])
        self.live[at] = torch.where(flushes, accepted, self.live[at] + accepted)

    def spread_cursors(self, sets, rng):
        for ring in self.rings_dt:
            ring.uniform_(0.01, 0.4)
        tokens = self.case.tokens
        if tokens == 1:
            self.live[1:] = self.phases(sets, rng) + 1
        else:
            for slots in sets:
                self.begin(slots)
                for _ in range(24):
                    counts = [rng.randint(1, tokens) for _ in slots]
                    self.commit(torch.tensor(counts, dtype=torch.int32, device=self.device))
        return (self.live[1:] + tokens > WINDOW).float().mean().item()


PEERS = [FlashinferPlain, FlashinferVerify, FlashinferReplay]


def build(peers, cases, major, seconds):
    """Compiles what the cases need, side by side; says what came of each. A failure is the kernel's
    own when its turn comes."""
    jobs = {}
    for case in cases:
        for peer in PEERS:
            if peer.fits(case):
                function, key = peer.job(peers, case, major)
                jobs[(peer.job.__qualname__, key)] = (function, key)
    pool = concurrent.futures.ThreadPoolExecutor(max(1, len(jobs)))
    futures = [pool.submit(function, *key) for function, key in jobs.values()]
    done, late = concurrent.futures.wait(futures, timeout=seconds)
    pool.shutdown(wait=False, cancel_futures=True)
    errors = [f.exception() for f in done if f.exception() is not None]
    return len(done) - len(errors), errors, len(late)
