"""The peers' kernels in CUDA C++: FlashInfer's for Mamba-2, SGLang's for KDA.

Their packages compile them at run time. Here compile.py does, ahead of time and without a GPU: one
library for every combination of types, sizes and window, each of which takes minutes. What it has
not compiled is missing.
"""

import importlib

import torch

from cases import WINDOW
from peers import Delta, VllmMamba
from stubs import PeerMissing

MODULE = "flashinfer.mamba."
NOT_COMPILED = "not compiled: run bench/peers/compile.py"
# Blocks per multiprocessor among which a launch shape is looked for. FlashInfer's autotuner tries
# all of 1 to 32, for seconds.
BLOCKS_PER_SM = (2, 3, 4, 5, 6, 8, 16)


# ---- FlashInfer ----


class Flashinfer(VllmMamba):
    package = "flashinfer"
    families = ("mamba2",)
    file = ""

    def import_kernels(self, peers):
        self.module = peers.get("flashinfer", MODULE + self.file)
        if not self.spec(self.case).is_aot:
            raise PeerMissing(NOT_COMPILED)

    @classmethod
    def spec(cls, case):
        """What compiles the library: a JitSpec of FlashInfer's."""
        raise NotImplementedError

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
    file = "selective_state_update"

    @classmethod
    def spec(cls, case):
        gen = importlib.import_module("flashinfer.jit.mamba.selective_state_update")
        half, index = case.activation, torch.int32
        key = (case.checkpoint, half, half, torch.float32, index, None, case.value_dim)
        key += (case.key_dim, case.tokens, index, torch.int64)
        return gen.gen_selective_state_update_sm90_module(*key)

    def launch(self, layer, o):
        self.module.selective_state_update(**self.common(layer, o), pad_slot_id=0)
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
        self.module.selective_state_update(
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


class Choice:
    """Stands in for FlashInfer's autotuner: answers with a launch shape, its default at first."""

    shape = -1

    def get(self):
        return self

    def choose_one(self, operation, runners, config, inputs):
        return runners[0], self.shape


class FlashinferReplay(Flashinfer):
    name, mode, tokens = "FlashInfer checkpointing_ssu", "replay", "any"
    file = "checkpointing_ssu"

    @classmethod
    def spec(cls, case):
        gen = importlib.import_module("flashinfer.jit.mamba.checkpointing_ssu")
        half, full = case.activation, torch.float32
        key = (case.checkpoint, half, half, half, full, torch.int32, None)
        key += (case.value_dim, case.key_dim, case.tokens, WINDOW)
        key += (case.heads // case.groups, case.groups, 0, False)
        return gen.gen_checkpointing_ssu_module(*key)

    def setup(self):
        super().setup()
        case = self.case
        length = WINDOW + case.tokens

        def scratch(dtype, *shape):
            return torch.zeros(case.batch, case.heads, *shape, dtype=dtype, device=self.device)

        self.choice = Choice()
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

    def tune(self, measure):
        """Takes the fastest of the launch shapes that FlashInfer's autotuner measures."""
        sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.module._CTA_PER_SM_CANDIDATES = BLOCKS_PER_SM
        case, times = self.case, {-1: measure()}
        shapes = (case.heads // case.groups, case.batch, case.heads, sms, (1, 2))
        for shape in self.module._make_tactics(*shapes):
            self.choice.shape = shape
            try:
                times[shape] = measure()
            except Exception:  # noqa: BLE001  (more shared memory than there is, say)
                continue
        self.choice.shape = best = min(times, key=times.get)
        self.note = (
            f"(stages, blocks per SM, heads per block, parts of a head) {best}, the fastest of "
            f"{len(times)}; its default takes {times[-1] / times[best]:.2f} times as long"
        )

    def launch(self, layer, o):
        self.module.AutoTuner = self.choice
        self.module.checkpointing_ssu(
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
        self.rings_dt.uniform_(0.01, 0.4)
        self.start.random_(0, WINDOW + self.case.tokens)
        tokens = self.case.tokens

        def after(live, accepted):
            return accepted if live + tokens > WINDOW else live + accepted

        self.live[1:] = self.phases(after, rng)[0]
        return (self.live[1:] + tokens > WINDOW).float().mean().item()


# ---- SGLang ----


class SglangCuda(Delta):
    """What the packed decode becomes for batches of 8 and more."""

    name, package, families = "SGLang kda_packed_decode (CUDA)", "sglang", ("kda",)
    checkpoints = (torch.float32,)
    source = "sglang/kernels/jit/csrc/attention/kda_packed_decode.cuh"
    exported = "sglang::KdaPackedDecodeKernel<8, true>::run"

    @classmethod
    def fits(cls, case):
        return super().fits(case) and case.batch >= 8

    @staticmethod
    def library(peers):
        return peers.path("sglang") / "kda_packed_decode.so"

    def import_kernels(self, peers):
        peers.enter("sglang")
        library = self.library(peers)
        if not library.exists():
            raise PeerMissing(NOT_COMPILED)
        peers.enter("tvm_ffi")
        self.run = importlib.import_module("tvm_ffi").load_module(str(library)).run

    def launch(self, layer, o):
        self.run(
            o.mixed,
            o.a.flatten(1),
            o.b,
            self.p.a_log,
            self.p.dt_bias.flatten(),
            o.y,
            self.states[layer],
            self.places,
            self.scale,
            0.0,
            False,
            self.case.groups,
        )
        return o.y


PEERS = [FlashinferPlain, FlashinferVerify, FlashinferReplay, SglangCuda]
