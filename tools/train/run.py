"""What every training command does, whatever the architecture: one run from corpus to folder."""

from __future__ import annotations

import argparse
import json
import math
import platform
import shutil
from abc import ABC, abstractmethod
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tokenizers
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer
from torch import Tensor, nn

import checkpoint
from data import (
    Document,
    Sampler,
    encode,
    load_documents,
    shortened,
    token_sizes,
    train_tokenizer,
)
from measure import TEMPERATURE, TOP_K, generate, make_windows, score
from trainer import LONG_WINDOW, Settings, Trainer, elapsed, log

SMOKE_SECONDS = 8.0
PROMPTS = (
    "It is a truth universally acknowledged, that",
    "And it came to pass in those days, that",
    "KING RICHARD:\n",
    "She had never",
)


class Family(ABC):
    """What a run needs to know of an architecture."""

    shape: Any  # a dataclass with vocab_size
    lookahead = 1  # tokens of a batch beyond its windows

    @abstractmethod
    def build(self, dropout: float) -> nn.Module: ...

    @abstractmethod
    def check_forward(self) -> dict[str, float]:
        """Differences in logits from transformers on random weights; raises if they are large."""

    @abstractmethod
    def check_saved(self, out: Path, model: nn.Module, ids: list[int]) -> dict[str, float]:
        """The same for the folder as it was written."""

    @abstractmethod
    def write(self, out: Path, state: dict[str, Tensor]) -> int:
        """Writes weights and configuration; returns the size of the weights file."""

    @abstractmethod
    def card(self, facts: dict[str, Any]) -> str: ...

    def loss(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        with torch.autocast(batch.device.type, torch.bfloat16):
            logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        return loss, {"train": loss}

    def measure(self, model: nn.Module, heldout: list[tuple[str, list[int]]]) -> dict[str, Any]:
        """Further facts of the finished model."""
        return {}


def rounded_model(family: Family, state: dict[str, Tensor], device: torch.device) -> nn.Module:
    """The model as it is saved: bf16 weights, here computed with in fp32."""
    model = family.build(0.0).to(device)
    model.load_state_dict({k: v.to(torch.bfloat16).float() for k, v in state.items()})
    return model.eval().requires_grad_(False)


def architecture_facts(family: Family, model: nn.Module) -> dict[str, Any]:
    return asdict(family.shape) | {"parameters": sum(p.numel() for p in model.parameters())}


def run_facts(trainer: Trainer, settings: Settings, minutes: float) -> dict[str, Any]:
    is_cuda = trainer.device.type == "cuda"
    return {
        "steps": trainer.step,
        "best_step": trainer.best_step,
        "tokens": trainer.tokens_seen,
        "epochs": trainer.tokens_seen / trainer.sampler.total,
        "source_weights": dict(
            zip(trainer.sampler.sources, trainer.sampler.weights.tolist(), strict=True)
        ),
        "train_minutes": minutes,
        "device": torch.cuda.get_device_name() if is_cuda else "CPU",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
    } | asdict(settings)


def data_facts(facts: dict[str, Any]) -> dict[str, Any]:
    kept = ("name", "title", "origin", "licence", "train_bytes", "heldout_bytes", "sha256")
    return {
        "sources": [{key: source[key] for key in kept} for source in facts["sources"]],
        "train_bytes": facts["train"]["bytes"],
        "train_sha256": facts["train"]["sha256"],
        "heldout_bytes": facts["heldout"]["bytes"],
        "heldout_sha256": facts["heldout"]["sha256"],
        "heldout_every": facts["heldout_every"],
    }


def sample_facts(
    model: nn.Module, tokenizer: Tokenizer, path: Path, sizes: list[int]
) -> dict[str, Any]:
    """Perplexity of a file over windows of 512 tokens side by side, for others to compare with."""
    device = next(model.parameters()).device
    encoded = encode(tokenizer, [Document("sample", path.read_text(encoding="utf-8"))])
    result = score(model, make_windows(encoded, sizes, 512, 512, device), mixed=False)
    return {
        "file": path.name,
        "window": 512,
        "stride": 512,
        "scored_tokens": result.windows.tokens[0],
        "nats": result.nats[0],
        "perplexity": math.exp(result.loss),
        "bits_per_byte": result.bits_per_byte()["all"],
    }


def parse_arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--corpus", type=Path, required=True, help="folder from prepare_corpus.py")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--sample", type=Path, help="a text file whose perplexity to record")
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="when training ends, counted from the start"
    )
    parser.add_argument("--smoke", action="store_true", help="a few steps through the whole path")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--batch-tokens", type=int, default=16384)
    parser.add_argument("--long-every", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.5)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--source-temperature", type=float, default=0.8)
    return parser.parse_args()


def run(family: Family, description: str) -> None:
    args = parse_arguments(description)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = Settings(
        minutes=args.minutes,
        seq_len=args.seq_len,
        batch_tokens=args.batch_tokens,
        long_every=args.long_every,
        peak_lr=args.lr,
        weight_decay=args.weight_decay,
        dropout=args.dropout,
        source_temperature=args.source_temperature,
        seed=args.seed,
    )
    torch.manual_seed(settings.seed)
    args.out.mkdir(parents=True, exist_ok=True)

    log(f"device {device}")
    facts = json.loads((args.corpus / "corpus.json").read_text(encoding="utf-8"))
    train_documents = load_documents(args.corpus, "train", facts)
    heldout_documents = load_documents(args.corpus, "heldout", facts)
    if args.smoke:
        train_documents = shortened(train_documents, 4, 100_000)
        heldout_documents = shortened(heldout_documents, 2, 8_000)
    tokenizer = train_tokenizer([d.text for d in train_documents], family.shape.vocab_size)
    sizes = token_sizes(tokenizer)
    log("tokenizer trained")
    differences = family.check_forward()

    sampler = Sampler(
        encode(tokenizer, train_documents), settings.source_temperature, device, settings.seed
    )
    heldout = encode(tokenizer, heldout_documents)
    steering = make_windows(heldout, sizes, 512, 512, device)
    log(f"{sampler.total} training tokens, {sum(steering.tokens)} held-out tokens")

    model = family.build(settings.dropout).to(device)

    def save(state: dict[str, Tensor]) -> int:
        checkpoint.write_tokenizer(args.out, tokenizer)
        return family.write(args.out, state)

    # Now rather than after training: a problem with the folder or the size shows at once.
    save(model.state_dict())
    trainer = Trainer(model, family.loss, family.lookahead, sampler, steering, settings, save)
    begin = elapsed()
    trainer.run(begin + SMOKE_SECONDS if args.smoke else settings.minutes * 60)
    train_minutes = (elapsed() - begin) / 60

    size = save(trainer.best_state)
    final = rounded_model(family, trainer.best_state, device)
    log(f"checkpoint written ({size} bytes of weights)")
    long_windows = make_windows(heldout, sizes, LONG_WINDOW, LONG_WINDOW // 2, device)
    probe = make_windows(sampler.probe(8, 4096), sizes, 512, 256, device)
    windows_512 = make_windows(heldout, sizes, 512, 256, device)
    heldout_score = score(final, windows_512, mixed=False)
    result = {
        "smoke": args.smoke,
        "architecture": architecture_facts(family, final),
        "data": data_facts(facts),
        "run": run_facts(trainer, settings, train_minutes),
        "weight_bytes": size,
        "weight_licence": "Apache-2.0",
        "loss": {
            "train_last": trainer.train_loss,
            "train_probe": score(final, probe, mixed=False).loss,
            "heldout": heldout_score.loss,
        },
        "heldout_bits_per_byte": heldout_score.bits_per_byte(),
        "heldout_bits_per_byte_2048": score(final, long_windows, mixed=False).bits_per_byte(),
        "transformers_difference": {"forward": differences},
        "history": trainer.history,
        "sampling": {"temperature": TEMPERATURE, "top_k": TOP_K},
    }
    result |= family.measure(final, heldout)
    if args.sample:
        result["sample"] = sample_facts(final, tokenizer, args.sample, sizes)
        if args.sample.resolve().parent != args.out.resolve():
            shutil.copyfile(args.sample, args.out / args.sample.name)
    log("held-out bits per byte " + json.dumps(result["heldout_bits_per_byte"]))
    result["samples"] = [
        generate(final, tokenizer, prompt, 20 if args.smoke else 120, settings.seed)
        for prompt in PROMPTS
    ]
    for text in result["samples"]:
        print(f"---\n{text}", flush=True)
    write_report(family, args.out, result)
    saved = family.check_saved(args.out, final.cpu(), heldout[0][1][:200])
    result["transformers_difference"]["saved"] = saved
    result["wall_minutes"] = elapsed() / 60
    write_report(family, args.out, result)
    log("done")


def write_report(family: Family, out: Path, result: dict[str, Any]) -> None:
    checkpoint.write_json(out / "training.json", result)
    (out / "README.md").write_text(family.card(result), encoding="utf-8")
