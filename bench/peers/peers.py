"""The peers' kernels behind one face: begin a step for some slots, launch a layer, end it.

mode: plain (one token, the state read and written), native verify (T tokens, a state kept for every
token), fold per step (T tokens recorded, the accepted ones folded into the state behind the step),
replay (records of many steps, the state written at flushes). Cursors are the engine's to keep with
all of these; they are set between steps and are not part of what is timed, nor are ours.
"""

import torch

from cases import WINDOW, long_run
from stubs import PeerMissing

# What no released package has, for the log.
NOT_RELEASED = [
    (
        "mamba2",
        "vLLM replay, verify",
        "vLLM 0.33.0's own kernel takes one token; for more it calls FlashInfer's "
        "checkpointing_ssu. A Triton kernel is in PR #49847",
    ),
    ("gdn", "vLLM replay, one token", "not in vLLM 0.33.0; PR #48792"),
    ("gdn", "vLLM replay, verify", "not in vLLM 0.33.0; PR #49887"),
    ("kda", "vLLM replay", "not in vLLM 0.33.0, and no PR known"),
    (
        "gdn",
        "vLLM fused_gdn_decode_post_conv_mtp (CUDA, its verify kernel where the model allows)",
        "compiled into the package's one extension module; the Triton kernel beside it is timed",
    ),
    (
        "kda",
        "SGLang replay, verify",
        "SGLang 0.5.23 keeps records only until the step's commit and writes the state then (fold "
        "per step): no output is computed from records of earlier steps",
    ),
    ("gdn", "flash-linear-attention replay", "fla-core 0.6.0 has none"),
    ("kda", "flash-linear-attention replay", "fla-core 0.6.0 has none"),
    ("gdn", "flash-linear-attention verify", "fla-core 0.6.0 keeps no state per token for GDN"),
    ("mamba2", "TensorRT-LLM replay", "its kernels come with a package of several GB; not fetched"),
]


class Peer:
    mode = "plain"
    tokens = "one"  # one: T = 1 only; many: T > 1 only; any
    families = ()
    checkpoints = (torch.float32, torch.bfloat16)
    note = ""

    @classmethod
    def fits(cls, case):
        if case.family not in cls.families:
            return False
        if cls.tokens != "any" and (cls.tokens == "many") != (case.tokens > 1):
            return False
        return case.checkpoint in cls.checkpoints

    def __init__(self, peers, case, parameters, layers, slots, device):
        self.case, self.p, self.layers, self.device = case, parameters, layers, device
        self.slots = slots
        self.accepted_before = torch.ones(slots, dtype=torch.int32, device=device)
        self.import_kernels(peers)
        # (layers, slots + 1, heads, P, N): place 0 is what some kernels take for padding.
        places = slots * self.states_per_slot() + 1
        shape = (layers, places, case.heads, case.value_dim, case.key_dim)
        self.states = torch.zeros(shape, dtype=case.checkpoint, device=device)
        self.setup()

    def rings(self, dtype, *shape):
        """A ring for every place of every layer."""
        shape = (self.layers, self.slots + 1, *shape)
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def states_per_slot(self):
        return 1

    def import_kernels(self, peers):
        raise NotImplementedError

    def setup(self):
        pass

    def begin(self, slots, active=None):
        self.index = torch.tensor(slots, device=self.device)
        self.places = (self.index + 1).to(torch.int32)
        self.prepare_step()

    def prepare_step(self):
        pass

    def finish(self):
        """Launches what follows the last layer, once per step, and is part of what is timed."""

    def tune(self, measure):
        """Lets a kernel find its launch shape: measure() is the time of a step of the set begun."""

    def end(self, accepted):
        counts = torch.tensor(accepted, dtype=torch.int32, device=self.device)
        self.commit(counts)
        self.accepted_before[self.index] = counts

    def commit(self, accepted):
        pass

    def randomize(self):
        """States and records of ordinary magnitude: time must not be that of zeros."""
        for name, value in vars(self).items():
            if name in self.random:
                value.uniform_(-0.5, 0.5)

    random = ("states", "rings_x", "rings_b", "rings_d", "rings_k", "rings_v")

    def spread(self, sets, operands, rng):
        self.randomize()
        return self.spread_cursors(sets, rng)

    def spread_cursors(self, sets, rng):
        self.accepted_before.random_(1, self.case.tokens + 1)
        return 1.0

    def phases(self, after, rng):
        """Live records and the counts accepted next for every slot; see long_run."""
        found = long_run(self.slots, self.case.tokens, after, rng)
        return torch.tensor(found, dtype=torch.int32, device=self.device).T.contiguous()

    def spread_windows(self, rng):
        """Cursors of kernels that fold a window with the token that fills it."""
        self.cursor.copy_(self.phases(lambda live, _: (live + 1) % WINDOW, rng)[0])
        return (self.cursor == WINDOW - 1).float().mean().item()

    def check(self):
        pass

    def explain(self):
        return self.note

    def close(self):
        self.__dict__.clear()


class Snapshots:
    """T places in the state tensor for every slot, as vLLM lays them out."""

    def states_per_slot(self):
        return self.case.tokens

    def prepare_step(self):
        tokens = self.case.tokens
        offsets = torch.arange(tokens, device=self.device)
        self.places = (self.index[:, None] * tokens + offsets + 1).to(torch.int32)
        self.before = self.accepted_before[self.index]
        self.starts = torch.arange(len(self.index) + 1, dtype=torch.int32, device=self.device)
        self.starts *= tokens


# ---- Mamba-2 ----

VLLM_MAMBA = "vllm.model_executor.layers.mamba.ops."


class VllmMamba(Peer):
    name, package, families = "vLLM selective_state_update", "vllm", ("mamba2",)

    def import_kernels(self, peers):
        self.module = peers.get("vllm", VLLM_MAMBA + "mamba_ssm")
        self.kernel = self.module.selective_state_update

    def setup(self):
        h, p, n = self.case.heads, self.case.value_dim, self.case.key_dim
        self.a = self.p.a[:, None, None].expand(h, p, n)
        self.d = self.p.d[:, None].expand(h, p)
        self.dt_bias = self.p.dt_bias[:, None].expand(h, p)

    def common(self, layer, o):
        return dict(
            state=self.states[layer],
            x=o.x,
            dt=o.dt[:, :, None].expand(-1, -1, self.case.value_dim),
            A=self.a,
            B=o.b,
            C=o.c,
            D=self.d,
            dt_bias=self.dt_bias,
            dt_softplus=True,
            out=o.y,
            state_batch_indices=self.places,
        )

    def launch(self, layer, o):
        self.kernel(**self.common(layer, o))
        return o.y

    def explain(self):
        case = self.case
        dtype = str(case.checkpoint).removeprefix("torch.")
        tuned = self.module.get_ssm_configs(case.value_dim, case.key_dim, dtype) is not None
        block, warps = self.module.try_get_optimal_ssm_config(
            case.value_dim, case.key_dim, case.batch, case.heads, dtype, False
        )
        return f"{'tuned table' if tuned else 'no tuned table'}: {block} rows, {warps} warps"


class VllmMambaVerify(Snapshots, VllmMamba):
    name, mode, tokens = "vLLM selective_state_update, verify", "native verify", "many"

    def launch(self, layer, o):
        self.kernel(
            **self.common(layer, o), num_accepted_tokens=self.before, cu_seqlens=self.starts
        )
        return o.y


class VllmMambaReplay(VllmMamba):
    name = "vLLM selective_state_update_replayssm_output_only"
    mode = "replay"

    def import_kernels(self, peers):
        name = "selective_state_update_replayssm_output_only"
        self.kernel = getattr(peers.get("vllm", VLLM_MAMBA + name), name)

    def setup(self):
        super().setup()
        case = self.case

        self.rings_x = self.rings(case.activation, case.heads, WINDOW, case.value_dim)
        self.rings_dt = self.rings(torch.float32, case.heads, WINDOW)
        self.rings_b = self.rings(case.activation, case.groups, WINDOW, case.key_dim)
        self.cursor = torch.zeros(self.slots, dtype=torch.int32, device=self.device)
        # As in the engine, one scratch serves all layers.
        self.scratch = torch.zeros(case.batch, case.groups, WINDOW, device=self.device)

    def prepare_step(self):
        self.write_pos = self.cursor[self.index]
        self.is_flush = (self.write_pos == WINDOW - 1).to(torch.int8)

    def launch(self, layer, o):
        self.kernel(
            **self.common(layer, o),
            x_cache=self.rings_x[layer],
            dt_cache=self.rings_dt[layer],
            B_cache=self.rings_b[layer],
            bc_pre=self.scratch,
            write_pos=self.write_pos,
            is_flush=self.is_flush,
            max_cache_len=WINDOW,
        )
        return o.y

    def commit(self, accepted):
        self.cursor[self.index] = (self.write_pos + 1) % WINDOW

    def spread_cursors(self, sets, rng):
        self.rings_dt.uniform_(0.01, 0.4)
        return self.spread_windows(rng)

    def explain(self):
        return "two launches"


# ---- GDN and KDA ----

VLLM_FLA = "vllm.third_party.flash_linear_attention.ops."
SGLANG = "sglang.kernels.ops.attention."


class Delta(Peer):
    @property
    def scale(self):
        return self.case.key_dim**-0.5


class VllmGdn(Delta):
    name, package = "vLLM fused_recurrent_gated_delta_rule_packed_decode", "vllm"
    families = ("gdn",)

    def import_kernels(self, peers):
        module = peers.get("vllm", VLLM_FLA + "fused_recurrent")
        self.kernel = module.fused_recurrent_gated_delta_rule_packed_decode

    def launch(self, layer, o):
        self.kernel(
            mixed_qkv=o.mixed,
            a=o.a,
            b=o.b,
            A_log=self.p.a_log,
            dt_bias=self.p.dt_bias,
            scale=self.scale,
            initial_state=self.states[layer],
            out=o.y[:, None],
            ssm_state_indices=self.places,
            use_qk_l2norm_in_kernel=True,
        )
        return o.y


class VllmGdnVerify(Snapshots, Delta):
    name, package = "vLLM fused_sigmoid_gating_delta_rule_update, verify", "vllm"
    mode, tokens, families = "native verify", "many", ("gdn",)

    def import_kernels(self, peers):
        module = peers.get("vllm", VLLM_FLA + "fused_sigmoid_gating")
        self.kernel = module.fused_sigmoid_gating_delta_rule_update

    def launch(self, layer, o):
        y, _ = self.kernel(
            A_log=self.p.a_log,
            a=o.a,
            b=o.b,
            dt_bias=self.p.dt_bias,
            q=o.q_packed[None],
            k=o.k_packed[None],
            v=o.v_packed[None],
            scale=self.scale,
            initial_state=self.states[layer],
            inplace_final_state=True,
            cu_seqlens=self.starts,
            ssm_state_indices=self.places,
            num_accepted_tokens=self.before,
            use_qk_l2norm_in_kernel=True,
        )
        return y[0]


class VllmKda(Delta):
    name, package, families = "vLLM fused_recurrent_kda_packed_decode", "vllm", ("kda",)

    def import_kernels(self, peers):
        name = "vllm.models.kimi_k3.nvidia.ops.third_party.kda.fused_recurrent"
        self.module = peers.get("vllm", name)

    def launch(self, layer, o):
        self.module.fused_recurrent_kda_packed_decode(
            mixed_qkv=o.mixed,
            raw_g=o.a[None],
            raw_beta=o.b[None],
            A_log=self.p.a_log,
            dt_bias=self.p.dt_bias,
            lower_bound=None,
            initial_state=self.states[layer],
            state_indices=self.places,
            out=o.y[None],
        )
        return o.y


class VllmKdaVerify(Snapshots, VllmKda):
    name = "vLLM fused_recurrent_kda, verify"
    mode, tokens = "native verify", "many"

    def launch(self, layer, o):
        y, _ = self.module.fused_recurrent_kda(
            q=o.q_packed[None],
            k=o.k_packed[None],
            v=o.v_packed[None],
            raw_g=o.a[None],
            raw_beta=o.b[None],
            A_log=self.p.a_log,
            dt_bias=self.p.dt_bias,
            lower_bound=None,
            initial_state=self.states[layer],
            cu_seqlens=self.starts,
            ssm_state_indices=self.places,
            num_accepted_tokens=self.before,
            out=o.y[None],
        )
        return y[0]


class SglangPlain(Delta):
    name, package = "SGLang packed decode (Triton)", "sglang"
    families = ("gdn", "kda")

    def import_kernels(self, peers):
        module = peers.get("sglang", SGLANG + "fla.fused_recurrent")
        kinds = {"gdn": "gated_delta_rule", "kda": "kda"}
        name = f"fused_recurrent_{kinds[self.case.family]}_packed_decode"
        self.kernel = getattr(module, name)

    def launch(self, layer, o):
        self.kernel(
            mixed_qkv=o.mixed,
            a=o.a.flatten(1),
            b=o.b,
            A_log=self.p.a_log,
            dt_bias=self.p.dt_bias.flatten(),
            scale=self.scale,
            initial_state=self.states[layer],
            out=o.y[:, None],
            ssm_state_indices=self.places,
            use_qk_l2norm_in_kernel=True,
        )
        return o.y


class SglangVerify(Delta):
    name, package = "SGLang fused_sigmoid_gating_delta_rule_update, verify", "sglang"
    mode, tokens, families = "native verify", "many", ("gdn", "kda")
    note = "without the copy of the accepted state that follows"

    def import_kernels(self, peers):
        module = peers.get("sglang", SGLANG + "linear.fused_sigmoid_gating_recurrent")
        self.kernel = module.fused_sigmoid_gating_delta_rule_update

    def setup(self):
        case = self.case
        shape = (case.batch, case.tokens, case.heads, case.value_dim, case.key_dim)
        self.snapshots = [
            torch.zeros(shape, dtype=case.checkpoint, device=self.device)
            for _ in range(self.layers)
        ]
        self.rows = torch.arange(case.batch, dtype=torch.int32, device=self.device)
        self.starts = torch.arange(case.batch + 1, dtype=torch.int32, device=self.device)
        self.starts *= case.tokens

    def launch(self, layer, o):
        y = self.kernel(
            A_log=self.p.a_log,
            a=o.a.flatten(1),
            dt_bias=self.p.dt_bias.flatten(),
            softplus_beta=1.0,
            softplus_threshold=20.0,
            q=o.q_packed[None],
            k=o.k_packed[None],
            v=o.v_packed[None],
            b=o.b,
            initial_state_source=self.states[layer],
            initial_state_indices=self.places,
            scale=self.scale,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=self.starts,
            is_kda=self.case.family == "kda",
            disable_state_update=True,
            cache_steps=self.case.tokens,
            **self.outputs(layer),
        )
        return y.reshape(o.y.shape)

    def outputs(self, layer):
        return dict(
            intermediate_states_buffer=self.snapshots[layer],
            intermediate_state_indices=self.rows,
        )

    def commit(self, accepted):
        at = (self.rows.long(), accepted.long() - 1)
        for state, snapshots in zip(self.states, self.snapshots, strict=True):
            state[self.places.long()] = snapshots[at]


class SglangReplay(Delta):
    name, package = "SGLang fused_recurrent_linear_replayssm_decode", "sglang"
    mode, families = "replay", ("gdn", "kda")

    def import_kernels(self, peers):
        module = peers.get("sglang", SGLANG + "linear.fused_recurrent_linear_replayssm")
        self.kernel = module.fused_recurrent_linear_replayssm_decode

    def records(self):
        """Their type; its pool gives them the state's."""
        return self.case.checkpoint

    def setup(self):
        case, records = self.case, self.records()
        self.rings_d = self.rings(records, case.heads, WINDOW, case.value_dim)
        self.rings_k = self.rings(records, case.groups, WINDOW, case.key_dim)
        channels = (case.key_dim,) if case.family == "kda" else ()
        self.rings_g = self.rings(torch.float32, case.heads, WINDOW, *channels)
        self.cursor = torch.zeros(self.slots, dtype=torch.int32, device=self.device)

    def prepare_step(self):
        self.write_pos = self.cursor[self.index]

    def launch(self, layer, o):
        self.kernel(
            mixed_qkv=o.mixed,
            a=o.a,
            b=o.b,
            A_log=self.p.a_log,
            dt_bias=self.p.dt_bias,
            scale=self.scale,
            initial_state=self.states[layer],
            d_cache=self.rings_d[layer],
            k_cache=self.rings_k[layer],
            g_cache=self.rings_g[layer],
            out=o.y[:, None],
            ssm_state_indices=self.places,
            write_pos=self.write_pos,
            use_qk_l2norm_in_kernel=True,
            is_kda=self.case.family == "kda",
        )
        return o.y

    def commit(self, accepted):
        self.cursor[self.index] = (self.write_pos + 1) % WINDOW

    def spread_cursors(self, sets, rng):
        self.rings_g.uniform_(-0.4, -0.01)
        return self.spread_windows(rng)


class SglangReplayNarrow(SglangReplay):
    """Records as ours are. The engine's pool has no such setting; the kernel takes them."""

    name = "SGLang fused_recurrent_linear_replayssm_decode, two-byte records"
    checkpoints = (torch.float32,)

    def records(self):
        return self.case.activation


class SglangFold(SglangVerify):
    """The verify kernel records its inputs; behind the step one launch folds what was accepted."""

    name = "SGLang fused_sigmoid_gating_delta_rule_update, records and fold"
    mode, families, checkpoints = "fold per step", ("kda",), (torch.float32,)
    note = "the fold of all layers is timed with them"

    def import_kernels(self, peers):
        super().import_kernels(peers)
        module = peers.get("sglang", SGLANG + "linear.kda_replayssm_spec_decode")
        self.fold = module.commit_kda_replayssm_spec_all_layers

    def setup(self):
        case = self.case
        self.rings_v = self.rings(case.activation, case.heads, WINDOW, case.value_dim)
        self.rings_k = self.rings(case.activation, case.groups, WINDOW, case.key_dim)
        self.rings_g = self.rings(torch.float32, case.heads, WINDOW, case.key_dim)
        self.rings_beta = self.rings(torch.float32, case.heads, WINDOW)
        self.starts = torch.arange(case.batch + 1, dtype=torch.int32, device=self.device)
        self.starts *= case.tokens

    def outputs(self, layer):
        return dict(
            intermediate_states_buffer=None,
            cache_ring=True,
            replayssm_rawv=self.rings_v[layer],
            replayssm_rawk=self.rings_k[layer],
            replayssm_g=self.rings_g[layer],
            replayssm_beta=self.rings_beta[layer],
        )

    def prepare_step(self):
        self.before = self.accepted_before[self.index]

    def finish(self):
        self.commit(self.before)

    def commit(self, accepted):
        self.fold(
            checkpoint_state=self.states,
            rawv_cache=self.rings_v,
            rawk_cache=self.rings_k,
            gk_cache=self.rings_g,
            beta_cache=self.rings_beta,
            ssm_state_indices=self.places,
            accept_lens=accepted,
            max_cache_len=WINDOW,
            num_k_heads=self.case.groups,
        )


class NoLaunch:
    """Stands in for a kernel that only moves cursors."""

    def __getitem__(self, grid):
        return lambda *_, **__: None


class SglangReplayVerify(Delta):
    """As the engine runs it: one launch per layer, and behind the step one that folds, in all
    layers, the windows with no room for another two steps."""

    name, package = "SGLang gdn_replayssm_spec_decode", "sglang"
    mode, tokens, families = "replay", "many", ("gdn",)
    note = "the fold of all layers is timed with them"

    def import_kernels(self, peers):
        self.module = peers.get("sglang", SGLANG + "linear.gdn_replayssm_spec_decode")
        self.finish_cursors = self.module._finish_gdn_replayssm_circular_fold_kernel

    def setup(self):
        case, places = self.case, self.slots + 1
        self.rings_d = self.rings(case.activation, case.heads, WINDOW, case.value_dim)
        self.rings_k = self.rings(case.activation, case.groups, WINDOW, case.key_dim)
        self.rings_g = self.rings(torch.float32, case.heads, WINDOW)
        # What the records' type leaves of deltas and keys.
        self.rest_d, self.rest_k = torch.zeros_like(self.rings_d), torch.zeros_like(self.rings_k)

        def cursors(dtype):
            return torch.zeros(places, dtype=dtype, device=self.device)

        self.write_pos, self.is_flush = cursors(torch.int32), cursors(torch.int8)
        self.cache_base = cursors(torch.int32)
        # What the fold behind the step finds, where the step itself is repeated.
        self.next_pos, self.next_flush = cursors(torch.int32), cursors(torch.int8)
        self.starts = torch.arange(case.batch + 1, dtype=torch.int32, device=self.device)
        self.starts *= case.tokens

    def launch(self, layer, o):
        self.module.gdn_replayssm_spec_decode(
            q=o.q_packed,
            k=o.k_packed,
            v=o.v_packed,
            a=o.a,
            b=o.b,
            A_log=self.p.a_log,
            dt_bias=self.p.dt_bias,
            checkpoint_state=self.states[layer],
            d_cache=self.rings_d[layer],
            k_cache=self.rings_k[layer],
            g_cache=self.rings_g[layer],
            rawv_cache=self.rest_d[layer],
            rawk_cache=self.rest_k[layer],
            beta_cache=None,
            out=o.y,
            query_start_loc=self.starts,
            ssm_state_indices=self.places,
            replay_indices=self.places,
            write_pos=self.write_pos,
            cache_base=self.cache_base,
            is_flush=self.is_flush,
            max_cache_len=WINDOW,
            max_spec_len=self.case.tokens,
            scale=self.scale,
            use_qk_l2norm_in_kernel=True,
            null_block_id=0,
            launch_mode="verify",
        )
        return o.y

    def fold(self, write_pos, is_flush, accepted):
        self.module.commit_gdn_replayssm_circular(
            checkpoint_state=self.states,
            d_cache=self.rings_d,
            k_cache=self.rings_k,
            g_cache=self.rings_g,
            d_residual_cache=self.rest_d,
            k_residual_cache=self.rest_k,
            state_batch_indices=self.places,
            replay_indices=self.places,
            write_pos=write_pos,
            cache_base=self.cache_base,
            is_flush=is_flush,
            accept_lens=accepted,
            null_block_id=0,
        )

    def finish(self):
        self.module._finish_gdn_replayssm_circular_fold_kernel = NoLaunch()
        try:
            self.fold(self.next_pos, self.next_flush, self.accepted_before)
        finally:
            self.module._finish_gdn_replayssm_circular_fold_kernel = self.finish_cursors

    def commit(self, accepted):
        self.module.commit_gdn_replayssm_spec(
            self.write_pos,
            self.cache_base,
            self.is_flush,
            accepted,
            self.places,
            WINDOW,
            self.case.tokens,
            null_block_id=0,
        )
        self.fold(self.write_pos, self.is_flush, accepted)

    def spread_cursors(self, sets, rng):
        self.rings_g.uniform_(-0.4, -0.01)
        self.cache_base.random_(0, WINDOW)
        room = WINDOW - 2 * self.case.tokens

        def after(live, accepted):
            return 0 if live + accepted > room else live + accepted

        live, accepted = self.phases(after, rng)
        self.write_pos[1:] = live
        self.next_pos[1:] = live + accepted
        self.next_flush[1:] = (live + accepted > room).to(torch.int8)
        return self.next_flush[1:].float().mean().item()


class FlaGdn(Delta):
    name, package = "fla fused_recurrent_gated_delta_rule", "fla"
    families, checkpoints = ("gdn",), (torch.float32,)
    note = "no slots: states lie in the order of the rows, and the new ones are another tensor"

    def import_kernels(self, peers):
        module = peers.get("fla", "fla.ops.gated_delta_rule.fused_recurrent")
        self.kernel = module.fused_recurrent_gated_delta_rule_fwd

    def begin(self, slots, active=None):
        super().begin(slots, active)
        first = (slots[0] // len(slots)) * len(slots)
        self.range = slice(1 + first, 1 + first + len(slots))
        self.after = [None] * self.layers

    def launch(self, layer, o):
        y, self.after[layer] = self.kernel(
            q=o.q_packed[:, None],
            k=o.k_packed[:, None],
            v=o.v_packed[:, None],
            g=o.a[:, None],
            beta=o.b[:, None],
            A_log=self.p.a_log,
            dt_bias=self.p.dt_bias,
            scale=self.scale,
            initial_state=self.states[layer][self.range],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            state_v_first=True,
        )
        return y[:, 0]

    def commit(self, accepted):
        for state, after in zip(self.states, self.after, strict=True):
            state[self.range] = after
        self.after = None


class FlaKda(Snapshots, Delta):
    name, package = "fla fused_recurrent_kda", "fla"
    families, tokens = ("kda",), "any"

    def import_kernels(self, peers):
        self.module = peers.get("fla", "fla.ops.kda.fused_recurrent")
        self.kernel = self.module.fused_recurrent_kda_fwd
        if self.case.tokens > 1:
            self.mode = "native verify"

    def launch(self, layer, o):
        rows, tokens = len(self.index), self.case.tokens

        def apart(x):
            return x.view(rows, tokens, *x.shape[1:])

        self.kernel(
            q=apart(o.q_packed),
            k=apart(o.k_packed),
            v=apart(o.v_packed),
            g=apart(o.a),
            beta=apart(o.b),
            A_log=self.p.a_log,
            dt_bias=self.p.dt_bias,
            scale=self.scale,
            initial_state=self.states[layer],
            inplace_final_state=True,
            state_v_first=True,
            ssm_state_indices=self.places,
            num_accepted_tokens=self.before if tokens > 1 else None,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            out=apart(o.y),
        )
        return o.y


PEERS = [
    VllmMamba,
    VllmMambaVerify,
    VllmMambaReplay,
    VllmGdn,
    VllmGdnVerify,
    VllmKda,
    VllmKdaVerify,
    SglangPlain,
    SglangVerify,
    SglangFold,
    SglangReplay,
    SglangReplayNarrow,
    SglangReplayVerify,
    FlaGdn,
    FlaKda,
]


def missing(family):
    return [(name, why) for of, name, why in NOT_RELEASED if of == family]


__all__ = ["PEERS", "PeerMissing", "missing"]
