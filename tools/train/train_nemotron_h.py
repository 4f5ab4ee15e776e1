#!/usr/bin/env python3
"""Trains a small nemotron_h language model and its tokenizer within a time budget.

Reads what prepare_corpus.py wrote and leaves a transformers checkpoint in --out, with
training.json (the facts of the run) and README.md (the model card). --smoke takes the same path
in a few steps.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
import torch.nn.functional as F
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

import checkpoint
from nemotron_h_model import NemotronH, Shape

START = time.monotonic()
GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
EOS_ID = 2
LONG_WINDOW = 2048
EVALUATIONS = 40
SAVE_SECONDS = 60.0
SMOKE_SECONDS = 8.0
PROMPTS = (
    "It is a truth universally acknowledged, that",
    "And it came to pass in those days, that",
    "KING RICHARD:\n",
    "She had never",
)
TEMPERATURE = 0.8
TOP_K = 50


@dataclass(frozen=True)
class Settings:
    minutes: float
    seq_len: int
    batch_tokens: int
    long_every: int  # every n-th step uses windows of LONG_WINDOW tokens; 0: none does
    peak_lr: float
    weight_decay: float
    dropout: float
    source_temperature: float  # a source is drawn in proportion to its tokens to this power
    warmup_steps: int = 300
    lr_floor: float = 0.01
    ema_decay: float = 0.999
    clip_norm: float = 1.0
    seed: int = 1


@dataclass(frozen=True)
class Document:
    source: str
    text: str


def elapsed() -> float:
    return time.monotonic() - START


def log(message: str) -> None:
    print(f"[{elapsed():6.1f} s] {message}", flush=True)


# ---------------------------------------------------------------------------------------- data


def load_documents(corpus: Path, split: str, facts: dict[str, Any]) -> list[Document]:
    body = (corpus / f"{split}.txt").read_bytes()
    return [
        Document(d["source"], body[d["offset"] : d["offset"] + d["bytes"]].decode())
        for d in facts[split]["documents"]
    ]


def shortened(documents: list[Document], per_source: int, characters: int) -> list[Document]:
    """The first few documents of every source, cut short (for --smoke)."""
    kept: list[Document] = []
    for document in documents:
        if sum(d.source == document.source for d in kept) < per_source:
            kept.append(Document(document.source, document.text[:characters]))
    return kept


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(GPT2_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [checkpoint.PAD, checkpoint.BOS, checkpoint.EOS]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise RuntimeError(f"the tokenizer has {tokenizer.get_vocab_size()} tokens")
    if [tokenizer.token_to_id(text) for text in special] != [0, 1, EOS_ID]:
        raise RuntimeError("the special tokens are not 0, 1 and 2")
    return tokenizer


def encode(tokenizer: Tokenizer, documents: list[Document]) -> list[tuple[str, list[int]]]:
    encoded = tokenizer.encode_batch([d.text for d in documents], add_special_tokens=False)
    return [(d.source, e.ids) for d, e in zip(documents, encoded, strict=True)]


def token_sizes(tokenizer: Tokenizer) -> list[int]:
    """Bytes per token: a byte-level token's text has one character per byte."""
    texts = [tokenizer.id_to_token(i) or "" for i in range(tokenizer.get_vocab_size())]
    return [0 if i <= EOS_ID else len(text) for i, text in enumerate(texts)]


class Sampler:
    """Draws random windows on the device; each source is one stream, eos between documents."""

    def __init__(
        self,
        encoded: list[tuple[str, list[int]]],
        temperature: float,
        device: torch.device,
        seed: int,
    ) -> None:
        streams: dict[str, list[int]] = {}
        for source, ids in encoded:
            streams.setdefault(source, []).extend([*ids, EOS_ID])
        self.sources = list(streams)
        sizes = [len(ids) for ids in streams.values()]
        self.total = sum(sizes)
        self.tokens = torch.tensor(
            [i for ids in streams.values() for i in ids], dtype=torch.int32, device=device
        )
        self.sizes = torch.tensor(sizes, dtype=torch.float64, device=device)
        self.starts = torch.tensor(
            [sum(sizes[:k]) for k in range(len(sizes))], dtype=torch.int64, device=device
        )
        self.weights = self.sizes**temperature / (self.sizes**temperature).sum()
        self.generator = torch.Generator(device).manual_seed(seed)

    def batch(self, rows: int, length: int) -> Tensor:
        """(rows, length + 1) token ids."""
        device, generator = self.tokens.device, self.generator
        source = torch.multinomial(self.weights, rows, replacement=True, generator=generator)
        place = torch.rand(rows, dtype=torch.float64, device=device, generator=generator)
        first = self.starts[source] + (place * (self.sizes[source] - length - 1)).long()
        return self.tokens[first.unsqueeze(1) + torch.arange(length + 1, device=device)].long()

    def probe(self, per_source: int, length: int) -> list[tuple[str, list[int]]]:
        """Evenly spaced pieces of every source's training text."""
        pieces = []
        for source, start, size in zip(
            self.sources, self.starts.tolist(), self.sizes.long().tolist(), strict=True
        ):
            for k in range(per_source):
                first = start + (size - length) * k // per_source
                pieces.append((source, self.tokens[first : first + length].tolist()))
        return pieces


# -------------------------------------------------------------------------------- measurement


@dataclass
class Windows:
    """Fixed-size windows that score every token but a sequence's first exactly once."""

    inputs: Tensor  # (windows, length)
    targets: Tensor  # (windows, length)
    scored: Tensor  # (windows, length) bool
    group: Tensor  # (windows) index into groups
    groups: list[str]
    bytes: list[int]  # per group, of the scored tokens
    tokens: list[int]


def make_windows(
    encoded: list[tuple[str, list[int]]],
    sizes: list[int],
    length: int,
    stride: int,
    device: torch.device,
) -> Windows:
    groups = list(dict.fromkeys(source for source, _ in encoded))
    n_bytes, n_tokens = [0] * len(groups), [0] * len(groups)
    inputs, targets, scored, group = [], [], [], []
    for source, ids in encoded:
        index = groups.index(source)
        first, done = 0, 0
        while done < len(ids) - 1:
            end = min(first + length, len(ids) - 1)
            # Padding goes to the right, where a causal model never sees it.
            pad = [0] * (first + length - end)
            inputs.append(ids[first:end] + pad)
            targets.append(ids[first + 1 : end + 1] + pad)
            scored.append([first + k >= done and first + k < end for k in range(length)])
            group.append(index)
            n_bytes[index] += sum(sizes[i] for i in ids[done + 1 : end + 1])
            n_tokens[index] += end - done
            done = end
            first += stride
    return Windows(
        torch.tensor(inputs, device=device),
        torch.tensor(targets, device=device),
        torch.tensor(scored, device=device),
        torch.tensor(group, device=device),
        groups,
        n_bytes,
        n_tokens,
    )


@dataclass
class Score:
    nats: list[float]
    windows: Windows

    @property
    def loss(self) -> float:
        return sum(self.nats) / sum(self.windows.tokens)

    def bits_per_byte(self) -> dict[str, float]:
        w = self.windows
        result = {
            name: nats / math.log(2) / size
            for name, nats, size in zip(w.groups, self.nats, w.bytes, strict=True)
        }
        result["all"] = sum(self.nats) / math.log(2) / sum(w.bytes)
        return result


@torch.no_grad()
def score(model: NemotronH, windows: Windows, mixed: bool) -> Score:
    """Total nats per group; `mixed` computes in bf16, which is fast and close enough to steer."""
    model.eval()
    device = windows.inputs.device
    nats = torch.zeros(len(windows.groups), dtype=torch.float64, device=device)
    rows = max(1, 32768 // windows.inputs.shape[1])
    for first in range(0, windows.inputs.shape[0], rows):
        part = slice(first, first + rows)
        with torch.autocast(device.type, torch.bfloat16, enabled=mixed):
            logits = model(windows.inputs[part])
        each = F.cross_entropy(logits.transpose(1, 2), windows.targets[part], reduction="none")
        each = torch.where(windows.scored[part], each, 0.0)
        nats.index_add_(0, windows.group[part], each.double().sum(1))
    return Score(nats.tolist(), windows)


@torch.no_grad()
def generate(model: NemotronH, tokenizer: Tokenizer, prompt: str, count: int, seed: int) -> str:
    model.eval()
    device = model.lm_head.weight.device
    generator = torch.Generator().manual_seed(seed)
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    for _ in range(count):
        logits = model(torch.tensor([ids[-512:]], device=device))[0, -1].cpu()
        values, indices = torch.topk(logits / TEMPERATURE, TOP_K)
        choice = torch.multinomial(torch.softmax(values, -1), 1, generator=generator)
        token = int(indices[choice])
        if token == EOS_ID:
            break
        ids.append(token)
    return tokenizer.decode(ids)


# ----------------------------------------------------------------------------------- training


class Schedule:
    """Cosine over the wall clock, from a linear warm-up; `speed` shortens what is left of it."""

    def __init__(self, settings: Settings, begin: float, end: float) -> None:
        self.settings = settings
        self.span = max(end - begin, 1e-3)
        self.last = begin
        self.progress = 0.0
        self.speed = 1.0

    def advance(self, now: float) -> bool:
        """False once the schedule has run out."""
        self.progress += self.speed * (now - self.last) / self.span
        self.last = now
        return self.progress < 1.0

    def lr(self, step: int) -> float:
        s = self.settings
        warm = min(1.0, (step + 1) / s.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(self.progress, 1.0)))
        return s.peak_lr * warm * (s.lr_floor + (1 - s.lr_floor) * cosine)


class Trainer:
    """The training loop, the moving average of the weights and the best average so far."""

    def __init__(
        self,
        model: NemotronH,
        sampler: Sampler,
        heldout: Windows,
        settings: Settings,
        save: Callable[[dict[str, Tensor]], object],
    ) -> None:
        self.model, self.sampler, self.heldout, self.settings = model, sampler, heldout, settings
        self.save = save
        self.device = model.lm_head.weight.device
        self.average = copy.deepcopy(model).requires_grad_(False)
        self.parameters = list(model.parameters())
        self.averages = list(self.average.parameters())
        self.optimizer = self.make_optimizer()
        self.step = 0
        self.best_loss, self.best_step = math.inf, 0
        self.best_state = copy.deepcopy(self.average.state_dict())
        self.worse_in_a_row = 0
        self.lr_scale = 1.0
        self.train_loss = math.nan
        self.history: list[dict[str, float]] = []
        self.tokens_seen = 0
        self.last_evaluation = (elapsed(), 0)  # when, and tokens seen by then
        self.last_save = elapsed()

    def make_optimizer(self) -> torch.optim.AdamW:
        decayed = [p for p in self.parameters if p.dim() > 1]
        plain = [p for p in self.parameters if p.dim() <= 1]
        groups = [
            {"params": decayed, "weight_decay": self.settings.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        fused = self.device.type == "cuda"
        return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), fused=fused)

    def train_step(self, lr: float) -> Tensor:
        s = self.settings
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        is_long = s.long_every > 0 and self.step % s.long_every == s.long_every - 1
        length = LONG_WINDOW if is_long else s.seq_len
        batch = self.sampler.batch(s.batch_tokens // length, length)
        with torch.autocast(self.device.type, torch.bfloat16):
            logits = self.model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, s.clip_norm)
        self.optimizer.step()
        self.step += 1
        self.tokens_seen += batch.shape[0] * length
        self.update_average()
        return loss.detach()

    @torch.no_grad()
    def update_average(self) -> None:
        decay = min(self.settings.ema_decay, (1 + self.step) / (10 + self.step))
        torch._foreach_lerp_(self.averages, self.parameters, 1 - decay)

    def run(self, end: float) -> None:
        """Trains until `end`, in seconds since the command began."""
        begin = elapsed()
        schedule = Schedule(self.settings, begin, end)
        interval = (end - begin) / EVALUATIONS
        next_evaluation, losses, counted = begin + interval, torch.zeros((), device=self.device), 0
        while schedule.advance(elapsed()):
            self.model.train()
            losses += self.train_step(self.lr_scale * schedule.lr(self.step))
            counted += 1
            if elapsed() >= next_evaluation:
                self.evaluate(losses.item() / counted, schedule)
                next_evaluation, counted = elapsed() + interval, 0
                losses.zero_()
        if counted:
            self.evaluate(losses.item() / counted, schedule)

    def evaluate(self, train_loss: float, schedule: Schedule) -> None:
        if not math.isfinite(train_loss):
            self.recover()
            return
        seconds, tokens = self.last_evaluation
        rate = (self.tokens_seen - tokens) / (elapsed() - seconds)
        result = score(self.average, self.heldout, mixed=True)
        self.last_evaluation = (elapsed(), self.tokens_seen)
        self.train_loss = train_loss
        self.history.append(
            {
                "seconds": round(elapsed(), 1),
                "step": self.step,
                "train_loss": round(train_loss, 4),
                "heldout_loss": round(result.loss, 4),
            }
        )
        log(
            f"step {self.step:6} lr {self.lr_scale * schedule.lr(self.step):.1e} "
            f"train {train_loss:.4f} held-out {result.loss:.4f} "
            f"bits/byte {result.bits_per_byte()['all']:.4f} tokens {self.tokens_seen / 1e6:.1f} M "
            f"at {rate / 1e6:.2f} M/s"
        )
        if result.loss < self.best_loss:
            self.best_loss, self.best_step = result.loss, self.step
            self.best_state = copy.deepcopy(self.average.state_dict())
            self.worse_in_a_row = 0
            if elapsed() - self.last_save > SAVE_SECONDS:
                # Something to show even if the command is stopped before its end.
                self.save(self.best_state)
                self.last_save = elapsed()
            return
        self.worse_in_a_row += 1
        if self.worse_in_a_row == 4 and schedule.speed == 1.0:
            # Overfitting at a high rate: what is left to gain comes from lowering it.
            schedule.speed = 5.0
            log("held-out loss stopped falling: shortening the schedule")

    def recover(self) -> None:
        """Goes back to the best average, at half the rate, after a loss that is not a number."""
        log("the loss is not finite: going back to the best weights at half the rate")
        self.model.load_state_dict(self.best_state)
        self.average.load_state_dict(self.best_state)
        self.optimizer = self.make_optimizer()
        self.lr_scale *= 0.5


# --------------------------------------------------------------------------------------- main


def rounded_model(shape: Shape, state: dict[str, Tensor], device: torch.device) -> NemotronH:
    """The model as it is saved: bf16 weights, here computed with in fp32."""
    model = NemotronH(shape).to(device)
    model.load_state_dict({k: v.to(torch.bfloat16).float() for k, v in state.items()})
    return model.eval().requires_grad_(False)


def architecture_facts(shape: Shape, model: NemotronH) -> dict[str, Any]:
    return asdict(shape) | {"parameters": sum(p.numel() for p in model.parameters())}


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
    model: NemotronH, tokenizer: Tokenizer, path: Path, sizes: list[int]
) -> dict[str, Any]:
    """Perplexity of a file over windows of 512 tokens side by side, for others to compare with."""
    device = model.lm_head.weight.device
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


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a small nemotron_h language model.")
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


def main() -> None:
    args = parse_arguments()
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
    shape = Shape()
    args.out.mkdir(parents=True, exist_ok=True)

    log(f"device {device}")
    facts = json.loads((args.corpus / "corpus.json").read_text(encoding="utf-8"))
    train_documents = load_documents(args.corpus, "train", facts)
    heldout_documents = load_documents(args.corpus, "heldout", facts)
    if args.smoke:
        train_documents = shortened(train_documents, 4, 100_000)
        heldout_documents = shortened(heldout_documents, 2, 8_000)
    tokenizer = train_tokenizer([d.text for d in train_documents], shape.vocab_size)
    sizes = token_sizes(tokenizer)
    log("tokenizer trained")
    forward_difference = checkpoint.check_forward(shape)

    sampler = Sampler(
        encode(tokenizer, train_documents), settings.source_temperature, device, settings.seed
    )
    heldout = encode(tokenizer, heldout_documents)
    steering = make_windows(heldout, sizes, 512, 512, device)
    log(f"{sampler.total} training tokens, {sum(steering.tokens)} held-out tokens")

    model = NemotronH(shape, settings.dropout).to(device)

    def save(state: dict[str, Tensor]) -> int:
        return checkpoint.write_checkpoint(args.out, state, shape, tokenizer)

    # Now rather than after training: a problem with the folder or the size shows at once.
    save(model.state_dict())
    trainer = Trainer(model, sampler, steering, settings, save)
    begin = elapsed()
    trainer.run(begin + SMOKE_SECONDS if args.smoke else settings.minutes * 60)
    train_minutes = (elapsed() - begin) / 60

    size = save(trainer.best_state)
    final = rounded_model(shape, trainer.best_state, device)
    log(f"checkpoint written ({size} bytes of weights)")
    long_windows = make_windows(heldout, sizes, LONG_WINDOW, LONG_WINDOW // 2, device)
    probe = make_windows(sampler.probe(8, 4096), sizes, 512, 256, device)
    windows_512 = make_windows(heldout, sizes, 512, 256, device)
    heldout_score = score(final, windows_512, mixed=False)
    result = {
        "smoke": args.smoke,
        "architecture": architecture_facts(shape, final),
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
        "transformers_difference": {"forward": forward_difference},
        "history": trainer.history,
        "sampling": {"temperature": TEMPERATURE, "top_k": TOP_K},
    }
    if args.sample:
        result["sample"] = sample_facts(final, tokenizer, args.sample, sizes)
    log("held-out bits per byte " + json.dumps(result["heldout_bits_per_byte"]))
    result["samples"] = [
        generate(final, tokenizer, prompt, 20 if args.smoke else 120, settings.seed)
        for prompt in PROMPTS
    ]
    for text in result["samples"]:
        print(f"---\n{text}", flush=True)
    write_report(args.out, result)
    saved = checkpoint.check_saved(args.out, final, heldout[0][1][:200])
    result["transformers_difference"]["saved"] = saved
    result["wall_minutes"] = elapsed() / 60
    write_report(args.out, result)
    log("done")


def write_report(out: Path, result: dict[str, Any]) -> None:
    checkpoint.write_json(out / "training.json", result)
    (out / "README.md").write_text(checkpoint.model_card(result), encoding="utf-8")


if __name__ == "__main__":
    main()
