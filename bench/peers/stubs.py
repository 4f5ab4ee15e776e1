"""Imports single files of the peers' packages without the packages.

A package is entered by its path alone, so that its __init__ does not run; the few names that a
kernel file takes from the rest of its package are given here. Nothing of what is timed is.
"""

import importlib
import json
import logging
import os
import sys
import types
from pathlib import Path

import torch


class PeerMissing(Exception):
    """A peer cannot be run, and why."""


def package(name, path):
    """Makes `name` and its parents importable from `path`, running no __init__."""
    if name in sys.modules:
        return sys.modules[name]
    parent, _, child = name.rpartition(".")
    above = package(parent, Path(path).parent) if parent else None
    made = types.ModuleType(name)
    made.__path__ = [str(path)]
    sys.modules[name] = made
    if above is not None:
        setattr(above, child, made)
    return made


def module(name, **names):
    parent, _, child = name.rpartition(".")
    above = package(parent, "/nonexistent/" + parent.replace(".", "/")) if parent else None
    made = sys.modules.get(name) or types.ModuleType(name)
    for key, value in names.items():
        setattr(made, key, value)
    sys.modules[name] = made
    if above is not None:
        setattr(above, child, made)
    return made


def capability():
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def device_name():
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


class Logger(logging.Logger):
    def info_once(self, *args, **_):
        self.info(*args)

    def warning_once(self, *args, **_):
        self.warning(*args)


class Platform:
    def is_xpu(self):
        return False

    def is_rocm(self):
        return False

    def is_cpu(self):
        return False

    def is_cuda(self):
        return True

    def is_cuda_alike(self):
        return True

    def is_device_capability_family(self, family, device_id=0):
        return capability()[0] == family // 10

    def is_device_capability(self, value, device_id=0):
        return capability()[0] * 10 + capability()[1] == value

    def has_device_capability(self, value, device_id=0):
        return capability()[0] * 10 + capability()[1] >= value

    def is_arch_support_pdl(self):
        return capability()[0] >= 9


def interpretable(kernels):
    """Triton's interpreter does not know `exp = tl.exp`; gives the module functions it can run."""
    import triton
    import triton.language as tl

    def exp(x):
        return tl.exp(x)

    def log(x):
        return tl.log(x)

    for name, function in (("exp", exp), ("log", log)):
        if hasattr(kernels, name):
            function.__globals__["tl"] = tl
            setattr(kernels, name, triton.jit(function))


class Peers:
    """The unpacked packages in `root`, each prepared once."""

    def __init__(self, root):
        self.root = Path(root)
        self.ready = set()

    def path(self, peer):
        path = self.root / peer
        if not path.is_dir():
            raise PeerMissing(f"{path} is not there: run bench/peers/fetch.py")
        return path

    def versions(self):
        found = {}
        for path in sorted(self.root.glob("*/versions.json")):
            found.update(json.loads(path.read_text()))
        return found

    def enter(self, peer):
        if peer not in self.ready:
            getattr(self, "prepare_" + peer)(self.path(peer))
            self.ready.add(peer)

    def get(self, peer, name):
        self.enter(peer)
        found = importlib.import_module(name)
        if os.environ.get("TRITON_INTERPRET") == "1":
            interpretable(found)
        return found

    def prepare_vllm(self, path):
        import triton
        import triton.language as tl
        from triton.language.extra import libdevice

        for name in (
            "vllm.model_executor.layers.mamba.ops",
            "vllm.third_party.flash_linear_attention.ops",
            "vllm.models.kimi_k3.nvidia.ops.third_party.kda",
        ):
            package(name, path / name.replace(".", "/"))
        module("vllm.envs", VLLM_TUNED_CONFIG_FOLDER=None)
        module("vllm._custom_ops")
        module("vllm.logger", init_logger=Logger)
        module("vllm.platforms", current_platform=Platform())
        module("vllm.triton_utils", triton=triton, tl=tl, tldevice=libdevice, HAS_TRITON=True)
        module(
            "vllm.utils.platform_utils",
            get_device_name_as_file_name=lambda: device_name().replace(" ", "_"),
        )
        module(
            "vllm.utils.math_utils",
            cdiv=triton.cdiv,
            next_power_of_2=triton.next_power_of_2,
            RCP_LN2=1.4426950408889634,
        )
        module("vllm.v1.attention.backends.utils", NULL_BLOCK_ID=0)

    def prepare_sglang(self, path):
        for name in ("fla", "linear"):
            name = "sglang.kernels.ops.attention." + name
            package(name, path / name.replace(".", "/"))
        major, minor = capability()
        module(
            "sglang.srt.utils",
            is_gfx95_supported=lambda: False,
            is_hip=lambda: False,
            is_cuda=lambda: True,
            is_sm90_supported=lambda: major == 9,
            get_device_sm=lambda: major * 10 + minor,
        )
        sys.modules["sglang.srt.utils"].__path__ = []
        release = tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:3])
        module("sglang.srt.utils.common", torch_release=release)
        module("sglang.kernels.jit.utils", is_arch_support_pdl=lambda: major >= 9)
        # The CUDA kernel in front of the Triton one is a peer of its own.
        module("sglang.kernels.ops.attention.kda_packed_decode", covered=lambda *_: False)

    def prepare_fla(self, path):
        for name in ("fla.ops.gated_delta_rule", "fla.ops.kda", "fla.ops.utils"):
            package(name, path / name.replace(".", "/"))
        versions = json.loads((path / "versions.json").read_text())
        sys.modules["fla"].__version__ = versions["fla-core"]

    def prepare_tvm_ffi(self, path):
        sys.path.insert(0, str(path))

    def prepare_flashinfer(self, path):
        self.enter("tvm_ffi")
        sys.path.insert(0, str(path))  # its metadata
        os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", str(self.root / "build"))
        for name in ("jit", "mamba", "fused_moe", "trace.templates"):
            name = "flashinfer." + name
            package(name, path / name.replace(".", "/"))
