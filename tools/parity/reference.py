"""What the reference checkpoints of all architectures have in common."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

GOOD_MARGIN = 0.02


@dataclass(frozen=True)
class Variant(ABC):
    name: str
    sizes: dict[str, Any]
    dtype: torch.dtype = torch.float32
    tied: bool = False
    shards: int = 1
    prompt_lengths: tuple[int, ...] = field(default=(1, 6, 19, 45), kw_only=True)

    def storage(self, name: str) -> torch.dtype:
        """The type in which a parameter is stored."""
        return self.dtype

    @abstractmethod
    def build(self, seed: int) -> nn.Module:
        """A model in float64 whose weights are exact in the variant's storage type."""

    @abstractmethod
    def config(self, model: nn.Module) -> dict[str, Any]:
        """config.json."""

    @abstractmethod
    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """The checkpoint's tensors under their published names, in their storage types."""

    def further(self, model: nn.Module, prompt: list[int]) -> tuple[dict[str, Tensor], float]:
        """More reference tensors for a prompt, and the smallest lead of their choices."""
        return {}, math.inf

    def check(self, folder: Path, model: nn.Module, prompt: list[int]) -> None:
        """Anything to verify of the folder as written."""


class Randomiser:
    """Draws values for parameters, in a fixed order."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def uniform(self, p: Tensor, low: float, high: float) -> Tensor:
        return torch.rand(p.shape, generator=self.generator) * (high - low) + low

    def normal(self, p: Tensor, std: float) -> Tensor:
        return torch.randn(p.shape, generator=self.generator) * std

    def a_log(self, p: Tensor) -> Tensor:
        return self.uniform(p, 0.3, 8.0).log()

    def dt_bias(self, p: Tensor) -> Tensor:
        dt = self.uniform(p, math.log(0.01), math.log(0.7)).exp()
        return dt + torch.log(-torch.expm1(-dt))


@torch.no_grad()
def randomise(
    model: nn.Module,
    storage: Callable[[str], torch.dtype],
    value: Callable[[str, Tensor], Tensor],
) -> None:
    """Gives every parameter the value for its name, rounded to the storage type."""
    for name, p in model.named_parameters():
        p.copy_(value(name, p).to(storage(name)))


def lead(logits: Tensor) -> float:
    """Of the largest logit over the next, the smallest of all rows."""
    best = torch.topk(logits, 2).values
    return (best[..., 0] - best[..., 1]).min().item()


@torch.no_grad()
def full_pass(model: nn.Module, ids: list[int]) -> Tensor:
    """float32 logits (length, vocab), without a cache."""
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()


def greedy(model: nn.Module, prompt: list[int], count: int) -> tuple[list[int], float]:
    """The continuation and the smallest lead of a chosen token over the next best."""
    ids, margin = list(prompt), math.inf
    for _ in range(count):
        logits = full_pass(model, ids)[-1]
        margin = min(margin, lead(logits))
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :], margin


def make_prompts(variant: Variant, generator: torch.Generator) -> list[list[int]]:
    vocab = variant.sizes["vocab_size"]
    return [
        torch.randint(3, vocab, (length,), generator=generator).tolist()
        for length in variant.prompt_lengths
    ]


def reference(
    variant: Variant, model: nn.Module, prompts: list[list[int]], count: int
) -> tuple[dict[str, Tensor], float]:
    tensors: dict[str, Tensor] = {}
    smallest = math.inf
    for i, prompt in enumerate(prompts):
        tokens, margin = greedy(model, prompt, count)
        tensors[f"prompt_{i}"] = torch.tensor(prompt, dtype=torch.int32)
        tensors[f"logits_{i}"] = full_pass(model, prompt).contiguous()
        tensors[f"greedy_{i}"] = torch.tensor(tokens, dtype=torch.int32)
        more, more_margin = variant.further(model, prompt)
        tensors |= {f"{name}_{i}": value for name, value in more.items()}
        smallest = min(smallest, margin, more_margin)
    return tensors, smallest


def save_weights(folder: Path, tensors: dict[str, Tensor], shards: int) -> None:
    metadata = {"format": "pt"}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata=metadata)
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for k in range(shards):
        file = f"model-{k + 1:05}-of-{shards:05}.safetensors"
        # Every k-th tensor, so that each layer is spread over the shards.
        part = {name: tensors[name] for name in names[k::shards]}
        save_file(part, folder / file, metadata=metadata)
        weight_map |= dict.fromkeys(part, file)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / "model.safetensors.index.json", index)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def make_variant(variant: Variant, out: Path, first_seed: int, tries: int, count: int) -> None:
    """Tries a few seeds and keeps the one whose greedy choices are the clearest."""
    best: tuple[float, int, nn.Module, list[list[int]], dict[str, Tensor]] | None = None
    for seed in range(first_seed, first_seed + tries):
        model = variant.build(seed)
        prompts = make_prompts(variant, torch.Generator().manual_seed(seed))
        tensors, margin = reference(variant, model, prompts, count)
        if best is None or margin > best[0]:
            best = (margin, seed, model, prompts, tensors)
        if margin >= GOOD_MARGIN:
            break
    assert best is not None
    margin, seed, model, prompts, tensors = best
    if not all(torch.isfinite(t).all() for t in tensors.values()):
        raise RuntimeError(f"{variant.name}: logits are not finite")

    folder = out / variant.name
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(folder, variant.tensors(model), variant.shards)
    save_file(tensors, folder / "reference.safetensors", metadata={"seed": str(seed)})
    write_json(folder / "config.json", variant.config(model))
    sizes = ", ".join(f"{p.name} {p.stat().st_size}" for p in sorted(folder.iterdir()))
    spread = torch.cat([tensors[f"logits_{i}"].flatten() for i in range(len(prompts))]).std().item()
    distinct = len({t for i in range(len(prompts)) for t in tensors[f"greedy_{i}"].tolist()})
    print(
        f"{variant.name}: seed {seed}, smallest margin {margin:.4f}, {distinct} distinct greedy "
        f"tokens, logits' std {spread:.2f}"
    )
    print(f"  {sizes}")
    variant.check(folder, model, prompts[-1])
