#!/usr/bin/env python3
"""Builds the public-domain corpus that the small nemotron_h model is trained on.

Sources: the King James Bible (Debian packages bible-kjv, bible-kjv-text), six novels by Jane
Austen (r-cran-janeaustenr, read with Rscript from r-base-core) and a Tiny Shakespeare file named
on the command line. Written to --out:

  train.txt    documents one after the other, a blank line between them
  heldout.txt  the held-out blocks, in the same form
  corpus.json  sources, licences, sizes, hashes, and where each document starts

Every source is cut into blocks of about 16 KiB at blank lines, within one work, and every 20th
block is held out. What lies between two held-out blocks of a work is one training document.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

BLOCK_BYTES = 16 * 1024
HELDOUT_EVERY = 20
HELDOUT_PHASE = 9  # not 0: a source's opening (title, first chapter) stays in training
SAMPLE_BYTES_PER_SOURCE = 20 * 1024

BIBLE_VERSES = 31102
BIBLE_BOOKS = (
    "Genesis Exodus Leviticus Numbers Deuteronomy Joshua Judges Ruth|1 Samuel|2 Samuel|1 Kings|"
    "2 Kings|1 Chronicles|2 Chronicles|Ezra Nehemiah Esther Job Psalms Proverbs Ecclesiastes|"
    "Song of Solomon|Isaiah Jeremiah Lamentations Ezekiel Daniel Hosea Joel Amos Obadiah Jonah "
    "Micah Nahum Habakkuk Zephaniah Haggai Zechariah Malachi Matthew Mark Luke John Acts Romans|"
    "1 Corinthians|2 Corinthians|Galatians Ephesians Philippians Colossians|1 Thessalonians|"
    "2 Thessalonians|1 Timothy|2 Timothy|Titus Philemon Hebrews James|1 Peter|2 Peter|1 John|"
    "2 John|3 John|Jude Revelation"
)
AUSTEN_NOVELS = (
    ("Sense and Sensibility", "sensesensibility"),
    ("Pride and Prejudice", "prideprejudice"),
    ("Mansfield Park", "mansfieldpark"),
    ("Emma", "emma"),
    ("Northanger Abbey", "northangerabbey"),
    ("Persuasion", "persuasion"),
)
# Words of the electronic editions, not of the author.
AUSTEN_EDITORIAL = re.compile(
    r"\n *\[(?:End volume one|At this point in the first)[^\]]*\]|\nA NOTE ON THE TEXT\n.*",
    re.DOTALL,
)


@dataclass
class Work:
    title: str
    text: str


@dataclass
class Source:
    name: str
    title: str
    origin: str
    licence: str
    works: list[Work]


@dataclass
class Split:
    """One output file under construction."""

    body: bytearray = field(default_factory=bytearray)
    documents: list[dict[str, str | int]] = field(default_factory=list)

    def add(self, source: str, title: str, text: str) -> None:
        if self.body:
            self.body += b"\n"
        data = (text + "\n").encode()
        self.documents.append(
            {"source": source, "title": title, "offset": len(self.body), "bytes": len(data)}
        )
        self.body += data

    def source_bytes(self, name: str) -> int:
        return sum(int(d["bytes"]) for d in self.documents if d["source"] == name)


def bible_books() -> list[str]:
    books: list[str] = []
    for part in BIBLE_BOOKS.split("|"):
        # Only names of one word are separated by blanks.
        multi_word = part[0].isdigit() or part.startswith("Song")
        books += [part] if multi_word else part.split()
    assert len(books) == 66, books
    return books


def run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def read_bible() -> Source:
    """One work per book; a heading per chapter, then a verse a line."""
    verse = re.compile(r"(\S+?)(\d+):(\d+) (.*)")
    names = iter(bible_books())
    works: list[Work] = []
    book, chapter, verses = "", "", 0
    for line in run(["bible", "-f", "gen1:1-rev22:21"]).splitlines():
        match = verse.fullmatch(line.strip())
        if not match:
            continue
        abbreviation, number, _, text = match.groups()
        if abbreviation != book:
            works.append(Work(next(names), ""))
            book, chapter = abbreviation, ""
        if number != chapter:
            separator = "\n" if works[-1].text else ""
            works[-1].text += f"{separator}{works[-1].title} {number}\n\n"
            chapter = number
        works[-1].text += " ".join(text.split()) + "\n"
        verses += 1
    if verses != BIBLE_VERSES:
        raise RuntimeError(f"expected {BIBLE_VERSES} verses, read {verses}")
    return Source(
        "bible",
        "The King James Bible",
        "Debian package bible-kjv-text",
        "public domain (1611; copyright expired)",
        works,
    )


def unwrap(text: str) -> str:
    """Joins the wrapped lines of a paragraph; indented lines (verse, signatures) stay apart."""
    paragraphs = []
    for block in re.split(r"\n\s*\n", text):
        lines: list[str] = []
        indented_before = True
        for raw in block.splitlines():
            indented = raw.startswith("  ")
            line = " ".join(raw.split())
            if not line or set(line) <= {"*", " "}:
                continue
            if lines and not indented and not indented_before:
                lines[-1] += " " + line
            else:
                lines.append(line)
            indented_before = indented
        if lines:
            paragraphs.append("\n".join(lines))
    return "\n\n".join(paragraphs) + "\n"


def read_austen() -> Source:
    works = []
    for title, dataset in AUSTEN_NOVELS:
        expression = f"writeLines(janeaustenr::{dataset}, useBytes = TRUE)"
        text = AUSTEN_EDITORIAL.sub("\n", run(["Rscript", "--vanilla", "-e", expression]))
        # Underscores mark italics in these editions.
        works.append(Work(title, unwrap(text.replace("_", ""))))
    return Source(
        "austen",
        "Six novels by Jane Austen",
        "Debian package r-cran-janeaustenr",
        "public domain (1811-1818; copyright expired)",
        works,
    )


def read_shakespeare(path: Path) -> Source:
    lines = path.read_text(encoding="utf-8").splitlines()
    text = "\n".join(line.rstrip() for line in lines)
    return Source(
        "shakespeare",
        "Tiny Shakespeare (excerpts from the plays of William Shakespeare)",
        "Tiny Shakespeare",
        "public domain (copyright expired)",
        [Work("Plays", re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n")],
    )


def blocks_of(text: str) -> list[str]:
    """Cuts at blank lines into blocks of at least BLOCK_BYTES (the last one may be shorter)."""
    blocks: list[str] = []
    pending: list[str] = []
    size = 0
    for unit in text.strip("\n").split("\n\n"):
        pending.append(unit)
        size += len(unit.encode()) + 2
        if size >= BLOCK_BYTES:
            blocks.append("\n\n".join(pending))
            pending, size = [], 0
    if pending:
        blocks.append("\n\n".join(pending))
    return blocks


def split_source(source: Source, train: Split, heldout: Split) -> None:
    index = 0
    for work in source.works:
        run_of_blocks: list[str] = []
        for block in blocks_of(work.text):
            if index % HELDOUT_EVERY == HELDOUT_PHASE:
                heldout.add(source.name, work.title, block)
                if run_of_blocks:
                    train.add(source.name, work.title, "\n\n".join(run_of_blocks))
                run_of_blocks = []
            else:
                run_of_blocks.append(block)
            index += 1
        if run_of_blocks:
            train.add(source.name, work.title, "\n\n".join(run_of_blocks))


def heldout_sample(heldout: Split, sources: list[Source]) -> str:
    """The middle full-sized held-out block of every source, cut at a line end."""
    pieces = []
    for source in sources:
        own = [d for d in heldout.documents if d["source"] == source.name]
        full = [d for d in own if int(d["bytes"]) >= BLOCK_BYTES] or own
        chosen = full[len(full) // 2]
        start = int(chosen["offset"])
        data = bytes(heldout.body[start : start + int(chosen["bytes"])])
        if len(data) > SAMPLE_BYTES_PER_SOURCE:
            data = data[: data.rindex(b"\n", 0, SAMPLE_BYTES_PER_SOURCE) + 1]
        pieces.append(data.decode())
    return "\n".join(pieces)


def describe(sources: list[Source], train: Split, heldout: Split) -> dict[str, object]:
    def file_facts(split: Split) -> dict[str, object]:
        return {
            "bytes": len(split.body),
            "sha256": hashlib.sha256(split.body).hexdigest(),
            "documents": split.documents,
        }

    return {
        "block_bytes": BLOCK_BYTES,
        "heldout_every": HELDOUT_EVERY,
        "sources": [
            {
                "name": s.name,
                "title": s.title,
                "origin": s.origin,
                "licence": s.licence,
                "works": [w.title for w in s.works],
                "bytes": sum(len(w.text.encode()) for w in s.works),
                "sha256": hashlib.sha256("".join(w.text for w in s.works).encode()).hexdigest(),
                "train_bytes": train.source_bytes(s.name),
                "heldout_bytes": heldout.source_bytes(s.name),
            }
            for s in sources
        ],
        "train": file_facts(train),
        "heldout": file_facts(heldout),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Builds the training corpus.")
    parser.add_argument("--shakespeare", type=Path, required=True, help="Tiny Shakespeare, as text")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--sample", type=Path, help="also write a small held-out sample here")
    args = parser.parse_args()

    sources = [read_bible(), read_austen(), read_shakespeare(args.shakespeare)]
    train, heldout = Split(), Split()
    for source in sources:
        split_source(source, train, heldout)

    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "train.txt").write_bytes(train.body)
    (args.out / "heldout.txt").write_bytes(heldout.body)
    facts = describe(sources, train, heldout)
    (args.out / "corpus.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    if args.sample:
        args.sample.parent.mkdir(parents=True, exist_ok=True)
        args.sample.write_text(heldout_sample(heldout, sources), encoding="utf-8")

    for source in sources:
        print(
            f"{source.name:12} train {train.source_bytes(source.name):8} bytes, "
            f"held out {heldout.source_bytes(source.name):7} bytes"
        )
    print(f"{'total':12} train {len(train.body):8} bytes, held out {len(heldout.body):7} bytes")


if __name__ == "__main__":
    main()
