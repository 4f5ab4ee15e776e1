#!/usr/bin/env python3
"""Times the peers' decode kernels beside ours, in one process; see README.md.

  python3 bench/peers/bench.py --library build/src/libreplayssm_c.so --commit ID --out DIR [--quick]

A worker process does the work, case by case, and writes down each result. A kernel that raises is
noted; one that takes the process or the device with it ends that worker, and another goes on behind
it.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
sys.path.insert(0, str(HERE))

TITLES = {"mamba2": "Mamba-2", "gdn": "Gated DeltaNet", "kda": "Kimi Delta Attention"}
FLASHINFER_DELTA = (
    "0.7.4 has its decode kernels for this family in CuTe DSL, whose compiler is not among the "
    "packages fetched"
)
DEAD = 17  # a worker's exit status when the device can no longer be used


def one_line(error):
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:220]}" if text else type(error).__name__


# ---- Worker ----


class Bench:
    def __init__(self, arguments):
        import torch

        from ours import Library
        from stubs import Peers

        self.torch, self.arguments = torch, arguments
        self.device = torch.device(arguments.device)
        self.cuda = self.device.type == "cuda"
        self.peers = Peers(arguments.peers)
        self.library = None
        try:
            self.library = Library(arguments.library, arguments.header)
            self.library_error = ""
        except (OSError, KeyError, TypeError) as error:
            self.library_error = one_line(error)
        # Graphs are captured on it; so is everything else run, which spares the waits.
        self.stream = torch.cuda.Stream() if self.cuda else None
        self.journal = open(arguments.journal, "a", encoding="utf-8")  # noqa: SIM115
        self.done = set()
        for line in Path(arguments.journal).read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            if "result" in entry or "failed" in entry:
                self.done.add((entry["case"], entry["kernel"]))

    def write(self, **entry):
        self.journal.write(json.dumps(entry) + "\n")
        self.journal.flush()

    def kernels(self, case):
        """(name, mode, package, make) of everything that serves the case; ours first."""
        import compiled_peers
        import peers
        from ours import Ours

        found = []
        modes = ["replay"]
        known = self.library.h.constants if self.library else {}
        if case.family != "mamba2" and "RSSM_FLUSH_FAST" in known:
            modes.append("replay, fast flush")
        if case.tokens == 1:
            modes.append("plain")
        for mode in modes:

            def make(layers, slots, parameters, mode=mode):
                if self.library is None:
                    raise RuntimeError(self.library_error)
                return Ours(self.library, mode, case, parameters, layers, slots, self.device)

            found.append((f"ReplaySSM {mode}", mode.split(",")[0], "ours", make))
        for peer in peers.PEERS + (compiled_peers.PEERS if self.cuda else []):
            if peer.fits(case):

                def make(layers, slots, parameters, peer=peer):
                    return peer(self.peers, case, parameters, layers, slots, self.device)

                mode = peer.mode
                if mode == "plain" and case.tokens > 1:
                    mode = "native verify"
                found.append((peer.name, mode, peer.package, make))
        return [k for k in found if self.arguments.only in k[0]]

    def generator(self, seed):
        return self.torch.Generator(device=self.device).manual_seed(seed)

    def parity_run(self, case, parameters):
        """A run from a zero state that crosses a flush, with the reference's outputs."""
        from cases import Operands, Reference

        rng, generator = random.Random(5), self.generator(11)
        reference = Reference(case, parameters, case.batch, self.device)
        run = []
        for _ in range(19 if case.tokens == 1 else 9):
            operands = Operands(case, case.batch, self.device, generator)
            accepted = [rng.randint(1, case.tokens) for _ in range(case.batch)]
            y = reference.step(operands, self.torch.tensor(accepted, device=self.device))
            run.append((operands, accepted, y))
        return run

    def parity(self, case, parameters, make, run):
        """|y - reference| / |reference| over the run's outputs."""
        torch = self.torch
        kernel = make(1, case.batch, parameters)
        try:
            slots = list(range(case.batch))
            error = torch.zeros((), device=self.device, dtype=torch.float64)
            size = torch.zeros((), device=self.device, dtype=torch.float64)
            for operands, accepted, want in run:
                operands.y.fill_(float("nan"))
                kernel.begin(slots)
                y = kernel.launch(0, operands).float().view(want.shape)
                error += (y - want).square().sum()
                size += want.square().sum()
                kernel.end(accepted)
            kernel.check()
            return (error / size).sqrt().item()
        finally:
            kernel.close()

    def timing(self, case, parameters, make):
        """Microseconds of one layer, and the share of rows that flush."""
        torch = self.torch
        from cases import Operands

        rng, generator = random.Random(7), self.generator(13)
        layers, slots = case.layers, case.sets * case.batch
        operands = [Operands(case, case.batch, self.device, generator) for _ in range(layers)]
        order = rng.sample(range(slots), slots)
        sets = [order[i : i + case.batch] for i in range(0, slots, case.batch)]
        kernel = make(layers, slots, parameters)
        try:
            # Compiles, and loads.
            kernel.begin(sets[0])
            for layer in range(layers):
                kernel.launch(layer, operands[layer])
            kernel.finish()
            kernel.end([1] * case.batch)
            flush = kernel.spread(sets, operands, rng)
            times = []
            for slots_of_set in sets:
                kernel.begin(slots_of_set)
                if not times:
                    kernel.tune(lambda: self.step(kernel, operands, 3))
                times.append(self.step(kernel, operands, 5 if self.arguments.quick else 9))
                kernel.end([1] * case.batch)
                torch.cuda.synchronize()
            kernel.check()
            return statistics.mean(times), flush, kernel.explain()
        finally:
            kernel.close()

    def step(self, kernel, operands, count):
        """Microseconds of one layer: the median of `count` replays of a step's launches."""
        torch, times = self.torch, []
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="relaxed")
        try:
            for layer, o in enumerate(operands):
                kernel.launch(layer, o)
            kernel.finish()
        finally:
            graph.capture_end()
        for i in range(-2, count):
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(400_000)  # the graph's launch hides behind it
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if i >= 0:
                times.append(1e3 * begin.elapsed_time(end))
        return statistics.median(times) / len(operands)

    def release(self):
        if self.cuda:
            self.torch.cuda.synchronize()
            self.torch.cuda.empty_cache()

    def case(self, case):
        from cases import Parameters
        from stubs import PeerMissing

        kernels = [k for k in self.kernels(case) if (case.label, k[0]) not in self.done]
        if not kernels:
            return
        parameters = Parameters(case, self.device)
        run = self.parity_run(case, parameters)
        missing = set()
        for name, mode, package, make in kernels:
            about = {"case": case.label, "family": case.family, "kernel": name, "mode": mode}
            about["package"] = package
            self.write(start=True, **about)
            started = time.monotonic()
            try:
                error = self.parity(case, parameters, make, run)
                result = {"error": error, "tolerance": case.tolerance}
                if not error <= case.tolerance:
                    raise ValueError(
                        f"outputs differ by {error:.2e} of the reference, {case.tolerance} is "
                        "allowed: not timed"
                    )
                if self.cuda:
                    result["us"], result["flush"], result["note"] = self.timing(
                        case, parameters, make
                    )
                result["seconds"] = time.monotonic() - started
                self.write(result=result, **about)
                us = f"{result['us']:9.2f} us" if "us" in result else ""
                print(f"{case.label} | {name} | {us} error {error:.1e}", flush=True)
            except PeerMissing as error:
                self.write(failed=str(error), **about)
                if name not in missing:
                    print(f"{case.label} | {name} | {error}", flush=True)
                missing.add(name)
            except Exception as error:  # noqa: BLE001  (a peer never ends the run)
                self.write(failed=one_line(error), **about)
                print(f"{case.label} | {name} | FAILED {one_line(error)}", flush=True)
                with open(self.arguments.errors, "a", encoding="utf-8") as file:
                    file.write(f"==== {case.label} | {name}\n{traceback.format_exc()}\n")
            try:
                self.release()
            except Exception as error:  # noqa: BLE001
                print(f"{case.label} | {name} | the device is lost: {one_line(error)}", flush=True)
                self.journal.flush()
                sys.stdout.flush()
                import os

                os._exit(DEAD)  # destructors would wait for the device
        run.clear()
        self.release()


def chosen_cases(arguments):
    import cases

    if arguments.device == "cpu":
        found = cases.small_cases()
    else:
        found = cases.quick_cases() if arguments.quick else cases.all_cases()
    families = arguments.families.split(",")
    return [c for c in found if c.family in families and arguments.filter in c.label]


def work(arguments):
    bench = Bench(arguments)
    torch = bench.torch
    import platform

    import triton

    about = {
        "device": torch.cuda.get_device_name() if bench.cuda else "CPU",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "peers": bench.peers.versions(),
        "library": bench.library_error or "loaded",
    }
    bench.write(about=about)
    if bench.library is None:
        print(f"our library: {bench.library_error}", flush=True)
    cases = chosen_cases(arguments)
    if bench.cuda:
        torch.cuda.set_stream(bench.stream)
    for case in cases:
        try:
            bench.case(case)
        except Exception as error:  # noqa: BLE001
            print(f"{case.label} | FAILED {one_line(error)}", flush=True)
            with open(arguments.errors, "a", encoding="utf-8") as file:
                file.write(f"==== {case.label}\n{traceback.format_exc()}\n")
            bench.release()
    return 0


# ---- Driver ----


def entries(journal):
    if not journal.exists():
        return []
    return [json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines()]


def drive(arguments):
    deadline = time.monotonic() + arguments.limit
    for _ in range(12):
        command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--worker"]
        command += ["--journal", str(arguments.journal), "--errors", str(arguments.errors)]
        left = deadline - time.monotonic()
        if left <= 0:
            print("out of time", flush=True)
            break
        try:
            status = subprocess.run(command, timeout=left, check=False).returncode
        except subprocess.TimeoutExpired:
            print("out of time", flush=True)
            break
        if status == 0:
            break
        # Whoever was at it when the worker died is not tried again.
        found = entries(arguments.journal)
        keys = ("case", "family", "kernel", "mode", "package")
        ended = {(e["case"], e["kernel"]) for e in found if "result" in e or "failed" in e}
        open_ = [e for e in found if "start" in e and (e["case"], e["kernel"]) not in ended]
        if not open_ and status != DEAD:
            print(f"the worker ended with status {status}", flush=True)
            break
        with open(arguments.journal, "a", encoding="utf-8") as file:
            for entry in open_:
                entry = {k: entry[k] for k in keys}
                entry["failed"] = f"ended the process (status {status})"
                file.write(json.dumps(entry) + "\n")


def timed(found, case):
    """Entries of a case that have a time, fastest first."""
    rows = [e for e in found if e["case"] == case and "us" in e.get("result", {})]
    return sorted(rows, key=lambda e: e["result"]["us"])


def fastest(rows, replays):
    """The first peer that replays, or that does not."""
    fits = (e for e in rows if e["package"] != "ours" and (e["mode"] == "replay") == replays)
    return next(fits, None)


def summary(found, cases):
    """Ours by replay beside the fastest peer of each kind."""
    lines = [
        "\n## Replay of ours beside the fastest peer\n",
        "| case | us | fastest peer that does not replay | us | times as fast as it "
        "| fastest peer that replays | us | times as fast as it |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for case in cases:
        rows = timed(found, case)
        ours = next((e for e in rows if e["kernel"] == "ReplaySSM replay"), None)
        if ours is None:
            continue
        us = ours["result"]["us"]
        line = f"| {case} | {us:.2f} |"
        for peer in (fastest(rows, False), fastest(rows, True)):
            if peer is None:
                line += " - | - | - |"
            else:
                theirs = peer["result"]["us"]
                line += f" {peer['kernel']} | {theirs:.2f} | {theirs / us:.2f} |"
        lines.append(line)
    return lines


def table(found, cases):
    """Markdown: a table for each case."""
    lines = []
    for case in cases:
        rows = timed(found, case)
        if not rows:
            continue
        base = fastest(rows, False)
        lines += [f"\n## {case}\n"]
        lines += [
            "| kernel | mode | us | times as fast as the fastest peer that does not replay "
            "| rows that write the state | error |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for e in rows:
            r = e["result"]
            speed = f"{base['result']['us'] / r['us']:.2f}" if base else "-"
            lines.append(
                f"| {e['kernel']} | {e['mode']} | {r['us']:.2f} | {speed} | {r['flush']:.3f} | "
                f"{r['error']:.1e} |"
            )
    return lines


def remarks(found, text_of):
    """A line for every kernel and text, with its cases where they are not all the kernel has."""
    texts, cases = {}, {}
    for e in found:
        cases.setdefault(e["kernel"], []).append(e["case"])
        text = text_of(e)
        if text:
            texts.setdefault((e["kernel"], text), []).append(e["case"])
    lines = []
    for (kernel, text), of in texts.items():
        where = "" if len(of) == len(cases[kernel]) else f" ({'; '.join(of)})"
        lines.append(f"* {kernel}{where}: {text}")
    return lines


def report(arguments, family):
    from peers import missing

    found = [e for e in entries(arguments.journal)]
    about = next((e["about"] for e in found if "about" in e), {})
    found = [e for e in found if e.get("family") == family]
    if not found:
        return None
    cases = list(dict.fromkeys(e["case"] for e in found))
    day = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    packages = ", ".join(f"{k} {v}" for k, v in about.get("peers", {}).items())
    lines = [
        f"# {TITLES[family]} step on CUDA beside its peers",
        "",
        f"{about.get('device')}, commit {arguments.commit}, {day}",
        "",
        f"PyTorch {about.get('torch')}, Triton {about.get('triton')}, {packages}",
        "",
        "Microseconds of one layer: CUDA-graph replay, slots in random order, cold L2, rows at the "
        "phases of a long run, window 16, medians. Error: |y - reference| / |reference| against "
        "the recurrence in fp32, over a run from a zero state that crosses a flush; a kernel "
        f"beyond {1.5e-2} (f32 states) or {3e-2} is not timed. Cursors are kept outside of what "
        "is timed, for all alike; a fold behind the last layer is timed.",
    ]
    lines += summary(found, cases)
    lines += table(found, cases)
    found = [e for e in found if "start" not in e]
    notes = remarks(found, lambda e: e.get("result", {}).get("note"))
    if notes:
        lines += ["\n## Notes\n", *notes]
    lines += ["\n## Not run, and why\n"]
    lines += remarks(found, lambda e: e.get("failed"))
    lines += [f"* {name}: {why}" for name, why in missing(family)]
    if family != "mamba2":
        lines += [f"* FlashInfer: {FLASHINFER_DELTA}"]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", default="build/src/libreplayssm_c.so")
    parser.add_argument(
        "--header", default=str(REPOSITORY / "include/replayssm/replayssm.h"), help="the library's"
    )
    parser.add_argument("--peers", type=Path, default=REPOSITORY / ".peers")
    parser.add_argument("--families", default="mamba2,gdn,kda")
    parser.add_argument("--filter", default="", help="cases whose label contains it")
    parser.add_argument("--only", default="", help="kernels whose name contains it")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", default="cuda", help="cpu: small shapes, parity only")
    parser.add_argument("--limit", type=float, default=540, help="seconds, for everything")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument(
        "--out", type=Path, default=None, help="folder of the dated logs; default: print"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--journal", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--errors", type=Path, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return work(arguments)
    import tempfile

    folder = arguments.out or Path(tempfile.mkdtemp(prefix="peers-"))
    folder.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y-%m-%d", time.gmtime())
    arguments.journal = folder / f"peers-{stamp}.jsonl"
    arguments.errors = folder / f"peers-{stamp}-errors.log"
    for path in (arguments.journal, arguments.errors):
        path.unlink(missing_ok=True)
    drive(arguments)
    for family in arguments.families.split(","):
        text = report(arguments, family)
        if text is None:
            continue
        print("\n" + text)
        if arguments.out is not None and arguments.device != "cpu":
            (folder / f"{family}-peers-{stamp}.md").write_text(text, encoding="utf-8")
    if arguments.errors.exists():
        print(f"tracebacks: {arguments.errors}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
