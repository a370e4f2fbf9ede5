"""Train, validation, held-out: near-duplicates stay together, so nothing held out was seen in other words.

Pairs of near-duplicates are joined by union-find. A cluster's key is the smallest name in it, and a hash of
the key alone says which split the cluster goes to; so a split is the same on every run, and other files touch
it only by joining a cluster.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import PurePosixPath

import numpy as np

from training.cache import cached, digest
from training.near_duplicates import near_pairs, signatures
from training.text import Document

SPLITS = ("train", "validation", "held_out")
FAMILY = (
    0.5  # share of a folder's files with a near-duplicate beside them from which the folder is one cluster …
)
FAMILY_LIMIT = 0.25  # … unless it holds more than this share of all documents


def split(
    documents: Sequence[Document],
    validation: float = 0.02,
    held_out: float = 0.03,
    *,
    cache_dir: str | None = None,
) -> dict[str, list[Document]]:
    """Documents by split, each list in the order given; only its cluster's key says where a document goes.

    When the hash leaves nothing to train on (a single file, say), everything trains.
    """
    parts: dict[str, list[Document]] = {name: [] for name in SPLITS}
    for document, key in zip(documents, cluster_keys(documents, cache_dir=cache_dir), strict=True):
        parts[split_of(key, validation, held_out)].append(document)
    return parts if parts["train"] else {**{name: [] for name in SPLITS}, "train": list(documents)}


def split_of(key: str, validation: float, held_out: float) -> str:
    """The split of the cluster with this key; held-out comes first and never moves."""
    place = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64
    return "held_out" if place < held_out else "validation" if place < held_out + validation else "train"


def cluster_keys(documents: Sequence[Document], *, cache_dir: str | None = None) -> list[str]:
    """The key of each document's cluster: the smallest name among its near-duplicates."""
    names = [document.name for document in documents]
    texts = [document.text for document in documents]
    key = digest("clusters", *names, *texts)
    labels = cached(cache_dir, key, lambda: {"labels": clusters(names, texts)})["labels"]
    smallest: dict[int, str] = {}
    for label, name in zip(labels.tolist(), names, strict=True):
        smallest[label] = min(name, smallest.get(label, name))
    return [smallest[label] for label in labels.tolist()]


def clusters(names: Sequence[str], texts: Sequence[str]) -> np.ndarray:
    """A cluster number for every document. # [N] int64"""
    union = _Union(len(texts))
    near = near_pairs(signatures(texts))
    for left, right in near.tolist():
        union.join(left, right)
    for members in _families(names, near):
        for member in members:
            union.join(members[0], member)
    return np.array([union.root(number) for number in range(len(texts))], dtype=np.int64)


def _families(names: Sequence[str], near: np.ndarray) -> list[list[int]]:
    """Folders that hold variations of one file, such as the library's encodings/.

    There even the files that no pair joins (an alias table, a package's front page) are about the same thing.
    """
    folders = [str(PurePosixPath(name).parent) for name in names]
    similar = {number for pair in near.tolist() if folders[pair[0]] == folders[pair[1]] for number in pair}
    share = Counter(folders[number] for number in similar)
    members = defaultdict(list)
    for number, folder in enumerate(folders):
        members[folder].append(number)
    return [
        group
        for folder, group in members.items()
        if folder != "." and FAMILY * len(group) <= share[folder] and len(group) <= FAMILY_LIMIT * len(names)
    ]


class _Union:
    """Disjoint sets of 0 … size − 1."""

    def __init__(self, size: int):
        self.parent = list(range(size))

    def root(self, number: int) -> int:
        while self.parent[number] != number:
            self.parent[number] = self.parent[self.parent[number]]
            number = self.parent[number]
        return number

    def join(self, left: int, right: int) -> None:
        left, right = sorted((self.root(left), self.root(right)))
        self.parent[right] = left


def hashed(document: Document) -> bytes:
    """Documents in the order of this stand in no order of their names."""
    return hashlib.sha256(document.name.encode()).digest()


def first_bytes(documents: Sequence[Document], limit: int) -> list[Document]:
    """Documents in the order of hashes up to `limit` bytes; the last is cut, at a line if it can be."""
    taken: list[Document] = []
    for document in sorted(documents, key=hashed):
        data = document.text.encode()
        if len(data) > limit and document.messages is not None:  # a conversation is taken whole or not at all
            return taken or [document]
        if len(data) > limit:
            text = data[:limit].decode(errors="ignore")
            text = text[: text.rfind("\n") + 1] or text
            return taken + [Document(document.name, text)] if text.strip() else taken or [document]
        taken.append(document)
        limit -= len(data)
    return taken
