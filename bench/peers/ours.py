"""ReplaySSM through the C interface: ctypes on libreplayssm_c.so, the structs from its header."""

import ctypes
import re
from pathlib import Path

import torch

from cases import WINDOW, long_run
from stubs import PeerMissing

SCALARS = {
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "uint8_t": ctypes.c_uint8,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "char": ctypes.c_char,
    "size_t": ctypes.c_size_t,
}


class Header:
    """Structs and enumerators of the header: the layouts are read, not repeated."""

    def __init__(self, path):
        text = re.sub(r"/\*.*?\*/", "", Path(path).read_text(), flags=re.S)
        self.constants = {
            name: int(value) for name, value in re.findall(r"#define (RSSM_\w+) (\d+)\s", text)
        }
        for body in re.findall(r"typedef enum \w+ \{(.*?)\}", text, flags=re.S):
            for name, value in re.findall(r"(RSSM_\w+)\s*=\s*(-?\d+)", body):
                self.constants[name] = int(value)
        self.types = dict(SCALARS)
        pattern = r"typedef struct (\w+) \{(.*?)\n\} \1;"
        for name, body in re.findall(pattern, text, flags=re.S):
            self.types[name] = self.make(name, ctypes.Structure, body)

    def make(self, name, base, body):
        fields = []
        while body.strip():
            union = re.match(r"\s*(union|struct) \{(.*?)\}\s*(\w+);", body, flags=re.S)
            if union:
                kind = ctypes.Union if union[1] == "union" else ctypes.Structure
                fields.append((union[3], self.make(f"{name}.{union[3]}", kind, union[2])))
                body = body[union.end() :]
                continue
            statement, _, body = body.partition(";")
            match = re.match(r"\s*(?:const )?(\w+)\s*(\*?)\s*(.*)", statement, flags=re.S)
            for one in match[3].split(","):
                field = re.match(r"\s*(\w+)\s*(?:\[(\w+)\])?", one)
                kind = ctypes.c_void_p if match[2] else self.types[match[1]]
                if field[2]:
                    count = field[2]
                    kind *= int(count) if count.isdigit() else self.constants[count]
                fields.append((field[1], kind))
        return type(name, (base,), {"_fields_": fields})

    def __getattr__(self, name):
        if name in self.types:
            return self.types[name]
        return self.constants[name]


class Library:
    def __init__(self, path, header):
        self.h = Header(header)
        self.c = ctypes.CDLL(str(Path(path).resolve()))
        self.c.rssm_last_error.restype = ctypes.c_char_p
        self.path = path

    def has(self, name):
        return hasattr(self.c, name)

    def call(self, name, *arguments):
        if not self.has(name):
            raise PeerMissing(f"{name} is not in this library")
        status = getattr(self.c, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name}: {self.c.rssm_last_error().decode()}")

    def made(self, name):
        """A struct with its defaults."""
        value = self.h.types[name]()
        if hasattr(value, "struct_size"):
            init = getattr(self.c, name + "_init", None)
            if init is None:
                raise PeerMissing(f"{name}_init is not in this library")
            # Older libraries take no size; they ignore it.
            init(ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))
            if value.struct_size != ctypes.sizeof(value):
                raise RuntimeError(
                    f"{name} has {ctypes.sizeof(value)} bytes in the header, "
                    f"{value.struct_size} in the library: give the library's own --header"
                )
        return value

    def dtype(self, dtype):
        names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
        return self.h.constants["RSSM_" + names[dtype]]

    def tensor(self, tensor):
        t = self.h.rssm_tensor()
        t.data, t.dtype, t.rank = tensor.data_ptr(), self.dtype(tensor.dtype), tensor.dim()
        for i in range(tensor.dim()):
            t.shape[i], t.strides[i] = tensor.shape[i], tensor.stride(i)
        return t


FAMILIES = {
    "mamba2": ("rssm_mamba2", "RSSM_FAMILY_MAMBA2"),
    "gdn": ("rssm_gated_delta_net", "RSSM_FAMILY_GATED_DELTA_NET"),
    "kda": ("rssm_kimi_delta_attention", "RSSM_FAMILY_KIMI_DELTA_ATTENTION"),
}


class Ours:
    """One pool of `layers` layers; a step runs begin, launch for every layer, and end."""

    name = "ReplaySSM"
    package = "ours"

    def __init__(self, library, mode, case, parameters, layers, slots, device):
        self.library, self.case, self.p, self.mode = library, case, parameters, mode
        self.device, self.layers = device, layers
        self.pool = None
        h, prefix = library.h, FAMILIES[case.family][0]
        self.op = prefix + "_step"
        if not library.has(self.op):
            raise PeerMissing(f"{self.op} is not in this library")
        self.cuda = device.type == "cuda"
        made = [self.layer() for _ in range(layers)]
        self.layer_array = (h.rssm_layer * layers)(*made)
        options = library.made("rssm_pool_options")
        options.window, options.draft_capacity = WINDOW, case.tokens
        options.checkpoint = library.dtype(case.checkpoint)
        options.activation = library.dtype(case.activation)
        options.device_kind = h.RSSM_DEVICE_CUDA if self.cuda else h.RSSM_DEVICE_CPU
        options.layers = ctypes.addressof(self.layer_array)
        options.layer_count, options.slots = layers, slots
        options.max_rows = case.batch
        options.rewindable = 0
        if mode == "replay, fast flush":
            options.flush = h.RSSM_FLUSH_FAST
        pool = ctypes.c_void_p()
        try:
            library.call("rssm_pool_create", ctypes.byref(options), ctypes.byref(pool))
        except RuntimeError as error:
            if mode == "replay, fast flush":
                raise PeerMissing(str(error)) from error
            raise
        self.pool = pool
        if case.family == "mamba2":
            a = parameters.a.float().cpu().contiguous()
            pointer = ctypes.cast(a.data_ptr(), ctypes.c_void_p)
            for layer in range(layers):
                library.call(
                    *("rssm_pool_set_mamba2_a", pool, ctypes.c_int32(layer)),
                    *(pointer, ctypes.c_int64(case.heads)),
                )
        self.slots = []
        for _ in range(slots):
            slot = ctypes.c_int32()
            context = self.context()
            library.call("rssm_pool_acquire", pool, ctypes.byref(context), ctypes.byref(slot))
            self.slots.append(slot.value)
        self.open = None
        self.prepared = {}

    def layer(self):
        library, case = self.library, self.case
        prefix, family = FAMILIES[case.family]
        if not library.has("rssm_layer_init"):  # Mamba-2 only
            layer = library.h.rssm_layer()
            shape = layer
        else:
            layer = library.made("rssm_layer")
            layer.family = library.h.constants[family]
            shape = getattr(layer.shape, prefix.removeprefix("rssm_"))
        values = {
            "mamba2": dict(
                heads=case.heads,
                head_dim=case.value_dim,
                state_size=case.key_dim,
                groups=case.groups,
            ),
            "gdn": dict(
                key_heads=case.groups,
                value_heads=case.heads,
                key_dim=case.key_dim,
                value_dim=case.value_dim,
            ),
            "kda": dict(heads=case.heads, key_dim=case.key_dim, value_dim=case.value_dim),
        }[case.family]
        for name, value in values.items():
            setattr(shape, name, value)
        return layer

    def context(self):
        context = self.library.made("rssm_context")
        if self.cuda:
            context.device_kind = self.library.h.RSSM_DEVICE_CUDA
            context.device_index = self.device.index or 0
            context.stream = torch.cuda.current_stream().cuda_stream
        return context

    def arguments(self, operands):
        key = id(operands)
        if key in self.prepared:
            return self.prepared[key][0]
        library, p, o = self.library, self.p, operands
        prefix = FAMILIES[self.case.family][0]
        arguments = library.made(prefix + "_args")
        if self.case.family == "mamba2":
            tensors = dict(d=p.d, dt_bias=p.dt_bias, x=o.x, b=o.b, c=o.c, dt=o.dt, y=o.y)
        else:
            tensors = dict(a_log=p.a_log, dt_bias=p.dt_bias, q=o.q, k=o.k, v=o.v, a=o.a, b=o.b)
            tensors["o"] = o.y
        for name, value in tensors.items():
            setattr(arguments, name, library.tensor(value))
        self.prepared[key] = (arguments, operands)
        return arguments

    def begin(self, slots, active=None):
        """`slots`: indices into the slots made; those not in `active` are padding."""
        h, tokens = self.library.h, self.case.tokens
        rows = (h.rssm_row * len(slots))()
        kind = "RSSM_ROW_TENTATIVE" if self.mode != "plain" else "RSSM_ROW_COMMITTED"
        for i, slot in enumerate(slots):
            rows[i].token_begin, rows[i].token_count = i * tokens, tokens
            rows[i].slot = self.slots[slot] if active is None or active[i] else -1
            rows[i].kind = h.constants[kind]
        step, context = ctypes.c_void_p(), self.context()
        self.library.call(
            *("rssm_step_begin", self.pool, ctypes.byref(context), rows),
            *(ctypes.c_int64(len(slots)), ctypes.byref(step)),
        )
        self.open = step

    def launch(self, layer, operands):
        context = self.context()
        self.library.call(
            *(self.op, self.pool, ctypes.byref(context), ctypes.c_int32(layer), self.open),
            ctypes.byref(self.arguments(operands)),
        )
        return operands.y

    def end(self, accepted):
        counts = (ctypes.c_int64 * len(accepted))(*accepted)
        context = self.context()
        self.library.call("rssm_step_commit", self.pool, ctypes.byref(context), self.open, counts)
        self.library.c.rssm_step_destroy(self.open)
        self.open = None

    def cursor(self, slot):
        cursor, context = self.library.h.rssm_cursor(), self.context()
        self.library.call(
            *("rssm_pool_cursor", self.pool, ctypes.byref(context)),
            *(ctypes.c_int32(self.slots[slot]), ctypes.byref(cursor)),
        )
        return cursor

    def finish(self):
        """Nothing follows the layers' launches."""

    def tune(self, measure):
        """The library has chosen."""

    def path(self, live, target, rng):
        """Accepted counts that take a slot through a flush to `target` live records."""
        tokens, counts = self.case.tokens, []
        while live + tokens <= WINDOW:
            counts.append(rng.randint(1, tokens))
            live += counts[-1]
        # The next step flushes; what it accepts is live then.
        counts.append((target - 1) % tokens + 1)
        return counts + [tokens] * ((target - 1) // tokens)

    def spread(self, sets, operands, rng):
        """Takes every slot to the phase of a long run; the share of rows that will flush."""
        if self.mode == "plain":
            return 1.0
        tokens = self.case.tokens
        total = sum(len(s) for s in sets)

        def after(live, accepted):
            return accepted if live + tokens > WINDOW else live + accepted

        targets = iter(long_run(total, tokens, after, rng))
        flushes = 0
        for slots in sets:
            paths = []
            for slot in slots:
                cursor, target = self.cursor(slot), next(targets)[0]
                flushes += target + tokens > WINDOW
                paths.append(self.path(cursor.position - cursor.checkpoint_position, target, rng))
            steps = max(len(path) for path in paths)
            for step in range(steps):
                # A shorter path begins later.
                at = [step - steps + len(path) for path in paths]
                self.begin(slots, [i >= 0 for i in at])
                for layer in range(self.layers):
                    self.launch(layer, operands[layer])
                self.end([path[i] if i >= 0 else 0 for i, path in zip(at, paths, strict=True)])
        return flushes / total

    def explain(self):
        name = FAMILIES[self.case.family][0] + "_explain"
        if not self.library.has(name):
            return ""
        buffer, context = ctypes.create_string_buffer(1000), self.context()
        self.library.call(
            *(name, self.pool, ctypes.byref(context), ctypes.c_int32(0)),
            *(ctypes.c_int64(self.case.batch), buffer, ctypes.c_uint64(1000), None),
        )
        text = buffer.value.decode()
        return text[max(0, text.find("cuda:")) :]  # the shape is the case's

    def check(self):
        """The device's error word."""
        if self.cuda:
            error, context = self.library.h.rssm_device_error(), self.context()
            self.library.call(
                *("rssm_pool_take_device_error", self.pool, ctypes.byref(context)),
                ctypes.byref(error),
            )
            if error.what != 0:
                raise RuntimeError(f"device error {error.what} in row {error.row}")

    def close(self):
        if self.pool is not None:
            self.library.c.rssm_pool_destroy(self.pool)
            self.pool = None
