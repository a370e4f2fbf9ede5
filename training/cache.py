"""Arrays that take long to compute, kept on disk under a hash of what they were computed from."""

import fcntl
import hashlib
import logging
import os
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

log = logging.getLogger(__name__)

Arrays = dict[str, np.ndarray]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time; another waits until this one is done, or has ended in whatever way."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def digest(*parts: str) -> str:
    """One hash for a list of texts; lengths go in too, so that ("ab", "c") differs from ("a", "bc")."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode()
        total.update(len(data).to_bytes(8, "big"))
        total.update(data)
    return total.hexdigest()


def cached(cache_dir: str | None, key: str, compute: Callable[[], Arrays]) -> Arrays:
    """What `compute` returns, from disk when it is there.

    A file that cannot be read is computed anew, and a folder that cannot be written costs only time.
    """
    path = cache_folder(cache_dir) / f"{key}.npz"
    try:
        with np.load(path, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except FileNotFoundError:
        pass
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        log.warning("%s is damaged (%s) and is computed anew", path, error)
    arrays = compute()
    try:
        _store(path, arrays)
    except OSError as error:
        log.warning("cannot write the cache file %s: %s", path, error)
    return arrays


def cache_folder(cache_dir: str | None) -> Path:
    """The folder given, or this project's in the user's cache folder."""
    if cache_dir:
        return Path(cache_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mtp-selfspec"


def _store(path: Path, arrays: Arrays) -> None:
    """Write beside the place and rename, so that a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
        try:
            np.savez(file, allow_pickle=False, **arrays)
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
