"""The training loop: a schedule by the clock, an average of the weights, the best one so far."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from data import Sampler
from measure import Windows, score

START = time.monotonic()
LONG_WINDOW = 2048
EVALUATIONS = 40
SAVE_SECONDS = 60.0

# Given the model and token ids (rows, length + lookahead): the loss to minimise and its parts by
# name, of which "train" is the loss of the next token.
Loss = Callable[[nn.Module, Tensor], tuple[Tensor, dict[str, Tensor]]]


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


def elapsed() -> float:
    return time.monotonic() - START


def log(message: str) -> None:
    print(f"[{elapsed():6.1f} s] {message}", flush=True)


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
    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        lookahead: int,
        sampler: Sampler,
        heldout: Windows,
        settings: Settings,
        save: Callable[[dict[str, Tensor]], object],
    ) -> None:
        self.model, self.loss, self.lookahead = model, loss, lookahead
        self.sampler, self.heldout, self.settings = sampler, heldout, settings
        self.save = save
        self.average = copy.deepcopy(model).requires_grad_(False)
        self.parameters = list(model.parameters())
        self.averages = list(self.average.parameters())
        self.device = self.parameters[0].device
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

    def train_step(self, lr: float) -> dict[str, Tensor]:
        s = self.settings
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        is_long = s.long_every > 0 and self.step % s.long_every == s.long_every - 1
        length = LONG_WINDOW if is_long else s.seq_len
        batch = self.sampler.batch(s.batch_tokens // length, length, self.lookahead)
        loss, parts = self.loss(self.model, batch)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, s.clip_norm)
        self.optimizer.step()
        self.step += 1
        self.tokens_seen += batch.shape[0] * length
        self.update_average()
        return {name: part.detach() for name, part in parts.items()}

    @torch.no_grad()
    def update_average(self) -> None:
        decay = min(self.settings.ema_decay, (1 + self.step) / (10 + self.step))
        torch._foreach_lerp_(self.averages, self.parameters, 1 - decay)

    def run(self, end: float) -> None:
        """Trains until `end`, in seconds since the command began."""
        # TF32 for what autocast leaves in fp32.
        torch.set_float32_matmul_precision("high")
        begin = elapsed()
        schedule = Schedule(self.settings, begin, end)
        interval = (end - begin) / EVALUATIONS
        next_evaluation, counted = begin + interval, 0
        sums: dict[str, Tensor] = {}
        while schedule.advance(elapsed()):
            self.model.train()
            parts = self.train_step(self.lr_scale * schedule.lr(self.step))
            sums = {name: sums.get(name, 0.0) + part for name, part in parts.items()}
            counted += 1
            if elapsed() >= next_evaluation:
                self.evaluate({k: v.item() / counted for k, v in sums.items()}, schedule)
                next_evaluation, counted, sums = elapsed() + interval, 0, {}
        if counted:
            self.evaluate({k: v.item() / counted for k, v in sums.items()}, schedule)
        torch.set_float32_matmul_precision("highest")

    def evaluate(self, losses: dict[str, float], schedule: Schedule) -> None:
        if not all(math.isfinite(value) for value in losses.values()):
            self.recover()
            return
        seconds, tokens = self.last_evaluation
        rate = (self.tokens_seen - tokens) / (elapsed() - seconds)
        result = score(self.average, self.heldout, mixed=True)
        self.last_evaluation = (elapsed(), self.tokens_seen)
        self.train_loss = losses["train"]
        self.history.append(
            {"seconds": round(elapsed(), 1), "step": self.step}
            | {f"{name}_loss": round(value, 4) for name, value in losses.items()}
            | {"heldout_loss": round(result.loss, 4)}
        )
        log(
            f"step {self.step:6} lr {self.lr_scale * schedule.lr(self.step):.1e} "
            + "".join(f"{name} {value:.4f} " for name, value in losses.items())
            + f"held-out {result.loss:.4f} "
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
