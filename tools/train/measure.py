"""Loss and samples of a model on held-out text."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from data import EOS_ID

TEMPERATURE = 0.8
TOP_K = 50


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
def score(model: nn.Module, windows: Windows, mixed: bool) -> Score:
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
def generate(model: nn.Module, tokenizer: Tokenizer, prompt: str, count: int, seed: int) -> str:
    model.eval()
    device = next(model.parameters()).device
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
