"""The corpus as the training commands see it: documents, the tokenizer, random windows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PAD, BOS, EOS = "<pad>", "<s>", "</s>"
EOS_ID = 2


@dataclass(frozen=True)
class Document:
    source: str
    text: str


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
    special = [PAD, BOS, EOS]
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

    def batch(self, rows: int, length: int, lookahead: int) -> Tensor:
        """(rows, length + lookahead) token ids."""
        device, generator = self.tokens.device, self.generator
        span = length + lookahead
        source = torch.multinomial(self.weights, rows, replacement=True, generator=generator)
        place = torch.rand(rows, dtype=torch.float64, device=device, generator=generator)
        first = self.starts[source] + (place * (self.sizes[source] - span)).long()
        return self.tokens[first.unsqueeze(1) + torch.arange(span, device=device)].long()

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
