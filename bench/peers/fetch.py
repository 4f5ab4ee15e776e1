#!/usr/bin/env python3
"""Unpacks the few kernel files of the peers' released packages into .peers/ (git-ignored).

Wheels are zip files. Where the package index serves byte ranges only the wanted members travel;
elsewhere pip downloads the whole wheel to a temporary folder. The index, its certificate and its
credentials are pip's own. Standard library and pip only.

  python3 bench/peers/fetch.py [--out .peers] [--only vllm,sglang,fla,flashinfer,tvm_ffi]
"""

import argparse
import fnmatch
import io
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
import zipfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

# Peer -> packages of (name, version, wanted members). A pattern's * crosses slashes; one that
# begins with ! takes members out again.
MAMBA = "vllm/model_executor/layers/mamba/ops/"
SGLANG = "sglang/kernels/ops/attention/"
FLASHINFER = [
    "_build_meta",
    "api_logging",
    "autotune_cache",
    "autotuner/*",
    "compilation_context",
    "fused_moe/utils",
    "jit/_cuda_architecture",
    "jit/core",
    "jit/cpp_ext",
    "jit/env",
    "jit/mamba/*",
    "jit/spdlog",
    "jit/tllm_utils",
    "jit/utils",
    "mamba/checkpointing_ssu",
    "mamba/selective_state_update",
    "tllm_enums",
    "tllm_utils",
    "trace/template",
    "trace/templates/mamba",
    "utils",
    "version",
]
PACKAGES = {
    "vllm": [
        (
            "vllm",
            "0.33.0",
            [
                MAMBA + "mamba_ssm.py",
                MAMBA + "triton_helpers.py",
                MAMBA + "replayssm_config.py",
                MAMBA + "selective_state_update_replayssm_output_only.py",
                MAMBA + "configs/selective_state_update/*NVIDIA_H*",
                "vllm/third_party/flash_linear_attention/LICENSE",
                "vllm/third_party/flash_linear_attention/ops/op.py",
                "vllm/third_party/flash_linear_attention/ops/utils.py",
                "vllm/third_party/flash_linear_attention/ops/fused_recurrent.py",
                "vllm/third_party/flash_linear_attention/ops/fused_sigmoid_gating.py",
                "vllm/models/kimi_k3/nvidia/ops/third_party/kda/fused_recurrent.py",
                "*.dist-info/licenses/LICENSE",
            ],
        )
    ],
    "sglang": [
        (
            "sglang",
            "0.5.23",
            [
                SGLANG + "fla/op.py",
                SGLANG + "fla/utils.py",
                SGLANG + "fla/fused_recurrent.py",
                SGLANG + "linear/fused_recurrent_linear_replayssm.py",
                SGLANG + "linear/gdn_replayssm_spec_decode.py",
                SGLANG + "linear/fused_sigmoid_gating_recurrent.py",
                SGLANG + "linear/kda_replayssm_spec_decode.py",
                "sglang/kernels/jit/csrc/attention/kda_packed_decode.cuh",
                "sglang/kernels/jit/include/sgl_kernel/*",
                "!sglang/kernels/jit/include/sgl_kernel/*/*",
                "*.dist-info/licenses/LICENSE",
            ],
        )
    ],
    "fla": [("fla-core", "0.6.0", ["fla/*.py", "*.dist-info/licenses/LICENSE"])],
    "flashinfer": [
        (
            "flashinfer-python",
            "0.7.4",
            [
                *(f"flashinfer/{name}.py" for name in FLASHINFER),
                "flashinfer/data/csrc/checkpointing_ssu*",
                "flashinfer/data/csrc/selective_state_update*",
                "flashinfer/data/csrc/flashinfer_mamba_binding*",
                "flashinfer/data/csrc/tvm_ffi_utils.h",
                "flashinfer/data/include/flashinfer/*",
                "flashinfer/data/cutlass/include/cute/*",
                "flashinfer/data/cutlass/include/cutlass/*",
                "flashinfer/data/spdlog/include/*",
                "*.dist-info/licenses/LICENSE",
                "!*/cutlass/gemm/*/*",
                "!*/cutlass/conv/*/*",
                "!*/cutlass/epilogue/*",
                "!*/cutlass/transform/*",
                "!*/cutlass/reduction/*",
                "!*/cutlass/experimental/*",
            ],
        ),
    ],
    # What loads compiled libraries of both.
    "tvm_ffi": [("apache-tvm-ffi", "0.1.15", ["tvm_ffi/*", "*.dist-info/*"])],
}


def pip(*arguments):
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def pip_setting(name):
    """A setting of pip: the environment's, else the configuration files'."""
    value = os.environ.get("PIP_" + name.upper().replace("-", "_"))
    if value:
        return value
    for section in ("download", "global", "install"):
        found = pip("config", "get", f"{section}.{name}")
        if found.returncode == 0 and found.stdout.strip():
            return found.stdout.strip()
    return None


def index_url():
    configured = pip_setting("index-url")
    if configured:
        return configured
    # What pip itself would ask.
    program = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
    found = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
    )
    return found.stdout.strip()


class Client:
    def __init__(self):
        self.context = ssl.create_default_context(cafile=pip_setting("cert"))
        self.received = 0

    def open(self, url, headers):
        parts = urllib.parse.urlsplit(url)
        if parts.username:  # urllib leaves credentials of the index's address to its caller
            raise OSError("the index asks for credentials; leaving it to pip")
        request = urllib.request.Request(url, headers=headers)
        return urllib.request.urlopen(request, context=self.context, timeout=120)

    def files(self, package):
        """(file name, address, size or None) of what the index has of a package."""
        page = index_url().rstrip("/") + "/" + re.sub(r"[-_.]+", "-", package).lower() + "/"
        kinds = "application/vnd.pypi.simple.v1+json, text/html;q=0.1"
        with self.open(page, {"Accept": kinds}) as reply:
            text = reply.read().decode()
            kind = reply.headers.get("Content-Type", "")
        if "json" in kind:
            return [
                (f["filename"], urllib.parse.urljoin(page, f["url"]), f.get("size"))
                for f in json.loads(text)["files"]
            ]
        links = re.findall(r'<a[^>]*href="([^"#]+)[^"]*"[^>]*>([^<]+)</a>', text)
        return [(name.strip(), urllib.parse.urljoin(page, link), None) for link, name in links]

    def size(self, url):
        with self.open(url, {"Range": "bytes=0-0"}) as reply:
            return int(reply.headers["Content-Range"].rsplit("/", 1)[1])


class Remote(io.RawIOBase):
    """A file on a server, read by ranges of one block."""

    BLOCK = 1 << 20

    def __init__(self, client, url, size):
        super().__init__()
        self.client, self.url, self.length = client, url, size
        self.position, self.blocks = 0, {}

    def readable(self):
        return True

    def seekable(self):
        return True

    def tell(self):
        return self.position

    def seek(self, offset, whence=0):
        self.position = {0: 0, 1: self.position, 2: self.length}[whence] + offset
        return self.position

    def block(self, number):
        if number not in self.blocks:
            first = number * self.BLOCK
            last = min(self.length, first + self.BLOCK) - 1
            with self.client.open(self.url, {"Range": f"bytes={first}-{last}"}) as reply:
                if reply.status != 206:
                    raise OSError("the server does not serve ranges")
                self.blocks[number] = reply.read()
            self.client.received += len(self.blocks[number])
        return self.blocks[number]

    def read(self, count=-1):
        count = self.length - self.position if count is None or count < 0 else count
        count = min(count, self.length - self.position)
        parts = []
        while count > 0:
            number, offset = divmod(self.position, self.BLOCK)
            part = self.block(number)[offset : offset + count]
            parts.append(part)
            self.position += len(part)
            count -= len(part)
        return b"".join(parts)


def version_key(name):
    version = name.split("-")[1]
    return [int(n) if n.isdigit() else -1 for n in re.split(r"[.]", version)]


def choose(files, version, python):
    """A wheel for x86-64 Linux. Its Python matters only where it is no pure one."""
    wheels = [f for f in files if f[0].endswith(".whl")]
    if version is not None:
        wheels = [f for f in wheels if f[0].split("-")[1] == version]
    else:
        wheels = [f for f in wheels if re.fullmatch(r"[0-9.]+", f[0].split("-")[1])]
        newest = max((version_key(f[0]) for f in wheels), default=None)
        wheels = [f for f in wheels if version_key(f[0]) == newest]
    tag = "cp" + python.replace(".", "")
    for fits in (
        lambda n: n.endswith("none-any.whl"),
        lambda n: "x86_64" in n and "linux" in n and (tag + "-" in n or "abi3" in n),
        lambda n: "x86_64" in n and "linux" in n,
    ):
        for wheel in wheels:
            if fits(wheel[0]):
                return wheel
    raise LookupError("the index has no wheel of that version for x86-64 Linux")


def wanted(name, patterns):
    include = [p for p in patterns if not p.startswith("!")]
    exclude = [p[1:] for p in patterns if p.startswith("!")]
    return (
        not name.endswith("/")
        and any(fnmatch.fnmatchcase(name, p) for p in include)
        and not any(fnmatch.fnmatchcase(name, p) for p in exclude)
    )


def unpack(archive, patterns, out):
    root = out.resolve()
    count = size = 0
    # In the order of the file, so that each block is read once.
    for info in sorted(archive.infolist(), key=lambda i: i.header_offset):
        if not wanted(info.filename, patterns):
            continue
        target = (root / info.filename).resolve()
        if not target.is_relative_to(root):
            raise ValueError(f"{info.filename} would leave {out}")
        target.parent.mkdir(parents=True, exist_ok=True)
        data = archive.read(info)
        target.write_bytes(data)
        count += 1
        size += len(data)
    return count, size


def from_pip(package, version, python, folder):
    requirement = package if version is None else f"{package}=={version}"
    platforms = [f"manylinux_2_{n}_x86_64" for n in (28, 34, 17, 24, 31, 35)]
    flags = [f for p in platforms + ["manylinux2014_x86_64"] for f in ("--platform", p)]
    done = pip(
        *("download", "-q", "--no-deps", "--only-binary=:all:", "--python-version", python),
        *("--implementation", "cp", *flags, "-d", str(folder), requirement),
    )
    if done.returncode != 0:
        raise OSError(done.stderr.strip().splitlines()[-1])
    return next(Path(folder).glob("*.whl"))


def fetch(client, package, version, patterns, python, out):
    client.received = 0
    try:
        name, url, size = choose(client.files(package), version, python)
        with zipfile.ZipFile(Remote(client, url, size or client.size(url))) as archive:
            count, unpacked = unpack(archive, patterns, out)
        how = f"{client.received / 1e6:.1f} MB received"
    except (OSError, zipfile.BadZipFile) as error:
        print(f"  by ranges: {error}; downloading the wheel", file=sys.stderr)
        with tempfile.TemporaryDirectory() as folder:
            wheel = from_pip(package, version, python, folder)
            name = wheel.name
            with zipfile.ZipFile(wheel) as archive:
                count, unpacked = unpack(archive, patterns, out)
        how = "the whole wheel received"
    if count == 0:
        raise LookupError("the wheel has none of the wanted files")
    print(f"  {name}: {count} files, {unpacked / 1e6:.2f} MB, {how}")
    return name.split("-")[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=REPOSITORY / ".peers")
    parser.add_argument("--only", default="vllm,sglang,fla", help="the rest has to be compiled")
    parser.add_argument("--python", default="3.12", help="Python of the machine that will run them")
    arguments = parser.parse_args()
    client = Client()
    failed = False
    for peer in arguments.only.split(","):
        out = arguments.out / peer
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        versions = {}
        for package, version, patterns in PACKAGES[peer]:
            print(f"{package} {version or '(newest)'}")
            try:
                versions[package] = fetch(client, package, version, patterns, arguments.python, out)
            except (OSError, LookupError) as error:
                print(f"  not to be had: {error}", file=sys.stderr)
                failed = True
        (out / "versions.json").write_text(json.dumps(versions) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
