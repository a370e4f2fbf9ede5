"""Near-duplicate texts: MinHash over shingles of five tokens, candidates by locality-sensitive hashing.

Broder 1997; Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, chapter 3. All in numpy, some 12 MB a
second on one core.

Letters: N texts, K = BANDS · ROWS hash functions, S shingles of one block.
"""

from collections.abc import Iterator, Sequence

import numpy as np

THRESHOLD = 0.5  # estimated Jaccard similarity from which two texts are near-duplicates
SHINGLE = 5  # tokens: a word (a run of letters, digits, _ and non-ASCII bytes) or one punctuation mark
BANDS, ROWS = (
    32,
    3,
)  # a pair at similarity s becomes a candidate with probability 1 - (1 - s^3)^32: .986 at .5
WINDOW = 32  # neighbours in a band's bucket compared with each other; bigger buckets are chained
BLOCK = 1 << 22  # bytes hashed at a time

_rng = np.random.default_rng(20240501)
_MULTIPLIERS = _rng.integers(0, 1 << 32, BANDS * ROWS, dtype=np.uint32) | np.uint32(1)
_OFFSETS = _rng.integers(0, 1 << 32, BANDS * ROWS, dtype=np.uint32)
_BYTES = _rng.integers(0, 1 << 63, 256, dtype=np.uint64)
_PLACES = _rng.integers(0, 1 << 63, SHINGLE, dtype=np.uint64) | np.uint64(1)
_STEP = np.uint64(0x9E3779B97F4A7C15)

_KINDS = np.full(256, 2, np.uint8)  # 0 space, 1 word, 2 punctuation
_KINDS[:33] = 0
_KINDS[128:] = 1
_KINDS[[*range(48, 58), *range(65, 91), *range(97, 123), 95]] = 1


def near_pairs(signature: np.ndarray, threshold: float = THRESHOLD) -> np.ndarray:
    """Pairs of documents whose signatures agree in at least `threshold` of their places. # [pairs, 2]"""
    candidates = [_candidates(signature[:, band * ROWS : (band + 1) * ROWS]) for band in range(BANDS)]
    pairs = np.unique(np.concatenate(candidates), axis=0)
    similarity = np.concatenate(
        [
            (signature[part[:, 0]] == signature[part[:, 1]]).mean(1)
            for part in np.array_split(pairs, len(pairs) // 65536 + 1)
        ]
    )
    return pairs[similarity >= threshold]


def _candidates(band: np.ndarray) -> np.ndarray:
    """Pairs of documents that agree in one band, (smaller, larger). # [pairs, 2]"""
    order = np.lexsort(band.T)  # stable, so equal rows stand in the order of their numbers
    rows, pairs = band[order], [np.empty((0, 2), np.int64)]
    for shift in range(1, min(WINDOW, len(order))):
        same = (rows[shift:] == rows[:-shift]).all(1)
        if not same.any():
            break
        pairs.append(np.stack([order[:-shift][same], order[shift:][same]], axis=1))
    return np.concatenate(pairs)


def signatures(texts: Sequence[str]) -> np.ndarray:
    """MinHash of every text: the share of places where two rows agree estimates their similarity. # [N, K]"""
    result = np.full((len(texts), BANDS * ROWS), np.iinfo(np.uint32).max, np.uint32)
    # A text without a single token resembles nothing: its row is its number, hashed.
    result[:] = (np.arange(len(texts), dtype=np.uint32)[:, None] ^ _OFFSETS) * _MULTIPLIERS
    seen = np.zeros(len(texts), bool)
    for numbers, pieces in _blocks(texts):
        shingles, starts, present = _shingles(pieces)
        if not len(starts):
            continue
        minima = np.stack([_minima(shingles, starts, k) for k in range(BANDS * ROWS)], axis=1)
        for number, row in zip(np.array(numbers)[present].tolist(), minima, strict=True):
            result[number] = np.minimum(result[number], row) if seen[number] else row
            seen[number] = True
    return result


def _blocks(texts: Sequence[str]) -> Iterator[tuple[list[int], list[bytes]]]:
    """Numbers and bytes of texts, a block at a time; a text longer than a block comes in pieces."""
    numbers: list[int] = []
    pieces: list[bytes] = []
    size = 0
    for number, text in enumerate(texts):
        data = text.encode()
        for start in range(0, max(len(data), 1), BLOCK):
            pieces.append(data[start : start + BLOCK])
            numbers.append(number)
            size += len(pieces[-1])
            if size >= BLOCK:
                yield numbers, pieces
                numbers, pieces, size = [], [], 0
    if pieces:
        yield numbers, pieces


def _shingles(pieces: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Hashes of all shingles [S], where in them each piece with tokens starts, which pieces have tokens."""
    data = np.frombuffer(b"\n".join([*pieces, b""]), np.uint8)
    kinds = _KINDS[data]
    begins = (kinds == 2) | (kinds == 1) & (np.concatenate([[0], kinds[:-1]]) != 1)
    first = np.flatnonzero(begins)  # where each token begins
    ends = np.cumsum([len(piece) + 1 for piece in pieces])
    bounds = np.searchsorted(
        first, np.concatenate([[0], ends])
    )  # tokens of piece i: bounds[i] … bounds[i + 1]
    present = bounds[1:] > bounds[:-1]
    if not len(first):
        return np.empty(0, np.uint32), np.empty(0, np.int64), present
    words = _token_hashes(data, kinds, begins, first)
    stops = np.repeat(bounds[1:], np.diff(bounds))  # where the token's own piece stops
    total = np.zeros(len(words), np.uint64)
    for place, factor in enumerate(_PLACES):
        inside = np.arange(len(words)) + place < stops
        total[inside] += words[np.flatnonzero(inside) + place] * factor
    total ^= total >> np.uint64(29)
    return ((total * _STEP) >> np.uint64(32)).astype(np.uint32), bounds[:-1][present], present


def _token_hashes(data: np.ndarray, kinds: np.ndarray, begins: np.ndarray, first: np.ndarray) -> np.ndarray:
    """A hash of every token's bytes and their places; white space counts nothing. # [S] uint64"""
    offset = np.arange(len(data)) - first[np.maximum(np.cumsum(begins) - 1, 0)]
    value = _BYTES[data] * (_STEP * (offset.astype(np.uint64) * np.uint64(2) + np.uint64(1)))
    value[kinds == 0] = 0
    total = np.add.reduceat(value, first)
    return (total ^ (total >> np.uint64(31))) * _STEP


def _minima(shingles: np.ndarray, starts: np.ndarray, k: int) -> np.ndarray:
    """The smallest value of hash function k in each piece; every step is a bijection of 32-bit integers."""
    mixed = (shingles ^ _OFFSETS[k]) * _MULTIPLIERS[k]
    mixed ^= mixed >> np.uint32(15)
    return np.minimum.reduceat(mixed, starts)
