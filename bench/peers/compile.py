#!/usr/bin/env python3
"""Compiles the peers' CUDA kernels into .peers/, for sm_90a; needs nvcc, ninja and PyTorch, no GPU.

  python3 bench/peers/compile.py [--peers .peers] [--jobs N] [--filter TEXT]

A library that is there already is left alone. FlashInfer's replay kernel takes eight minutes of
one core and 3 GB of memory for every combination of types, heads and tokens, and there are five.
"""

import argparse
import concurrent.futures
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
sys.path.insert(0, str(HERE))

# FlashInfer reads both when it is imported.
os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
os.environ.setdefault("MAX_JOBS", "1")


def flashinfer(spec):
    spec.build()
    spec.aot_path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(spec.jit_library_path, spec.aot_path)


def sglang(peers, peer):
    root, tvm_ffi = peers.path("sglang"), peers.path("tvm_ffi")
    out = peer.library(peers)
    source = out.with_suffix(".cu")
    source.write_text(
        f'#include "{root / peer.source}"\n'
        "#include <tvm/ffi/function.h>\n"
        f"TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, ({peer.exported}));\n"
    )
    command = ["nvcc", "-gencode=arch=compute_90a,code=sm_90a", "-DSGL_CUDA_ARCH=900"]
    command += ["-std=c++20", "-O3", "--expt-relaxed-constexpr", "-shared", "-Xcompiler=-fPIC"]
    command += [f"-I{root / 'sglang/kernels/jit/include'}", f"-I{tvm_ffi / 'tvm_ffi/include'}"]
    done = subprocess.run(
        [*command, "-o", str(out), str(source)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr or done.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=Path, default=REPOSITORY / ".peers")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--filter", default="", help="libraries whose name contains it")
    arguments = parser.parse_args()

    import compiled_peers
    from cases import all_cases
    from stubs import PeerMissing, Peers

    peers, jobs = Peers(arguments.peers), {}
    kda = compiled_peers.SglangCuda
    try:
        library = kda.library(peers)
        jobs[library.name] = (library, lambda: sglang(peers, kda))
    except PeerMissing as error:
        print(error, file=sys.stderr)
    try:
        peers.enter("flashinfer")
        for case in all_cases():
            for peer in compiled_peers.PEERS:
                if issubclass(peer, compiled_peers.Flashinfer) and peer.fits(case):
                    spec = peer.spec(case)
                    jobs[spec.name] = (spec.aot_path, lambda spec=spec: flashinfer(spec))
    except PeerMissing as error:
        print(error, file=sys.stderr)

    failed = False
    with concurrent.futures.ThreadPoolExecutor(max(1, arguments.jobs)) as pool:
        started, running = time.monotonic(), {}
        for name, (path, function) in jobs.items():
            if path.exists():
                print(f"{name}: is there")
            elif arguments.filter in name:
                running[pool.submit(function)] = name
        for future in concurrent.futures.as_completed(running):
            error = future.exception()
            failed |= error is not None
            seconds = time.monotonic() - started
            print(f"{running[future]}: {error or 'compiled'} ({seconds:.0f} s)", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
