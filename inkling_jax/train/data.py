"""The text a small Inkling learns from: Python sources, held-out files set apart, ids in one long row."""

import hashlib
import platform
import sysconfig
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
from jaxtyping import UInt16
from tokenizers import decoders, models, pre_tokenizers, trainers

END_TOKEN = "<|endoftext|>"
# Code tables and generated files: much text, little language, and in part different on every machine.
SKIPPED_FOLDERS = frozenset({"site-packages", "encodings", "pydoc_data", "__pycache__"})
SKIPPED_PREFIXES = ("_sysconfigdata", "config-")
TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})


class CorpusError(ValueError):
    """A corpus that cannot be read or holds too little."""


@dataclass(frozen=True)
class Corpus:
    """Source files by their path below the corpus's root, in order of path; no two have the same text."""

    name: str
    files: Mapping[str, str]

    @property
    def sha256(self) -> str:
        """One digest over all paths and texts: equal where the corpus is equal, however it was packed."""
        digest = hashlib.sha256()
        for path, text in self.files.items():
            digest.update(f"{path}\0{text}\0".encode())
        return digest.hexdigest()

    def split(self, share: float = 1 / 32) -> tuple[dict[str, str], dict[str, str]]:
        """Files to learn from and files held out. The path alone decides, so that a file never changes sides."""
        held = {path for path in self.files if _fraction(path) < share}
        if not held or len(held) == len(self.files):
            raise CorpusError(f"{self.name}: {len(self.files)} files are too few to hold some out")
        learn = {path: text for path, text in self.files.items() if path not in held}
        return learn, {path: text for path, text in self.files.items() if path in held}


def read_corpus(source: Path | None = None, tests: bool = True) -> Corpus:
    """The .py files of a folder, a tar or zip archive, or by default the running interpreter's standard library.

    An archive of CPython's sources counts from its `Lib` folder, so it gives the same corpus as an installation.
    Test suites may be left out. Raises CorpusError where nothing is found.
    """
    name = str(source.name) if source else f"standard library of Python {platform.python_version()}"
    root = source or Path(sysconfig.get_paths()["stdlib"])
    if not root.exists():
        raise CorpusError(f"{root}: no such corpus; expected a folder, or a .tar.* or .zip archive")
    try:
        found = dict(_below_lib(dict(_folder(root) if root.is_dir() else _archive(root))))
    except (EOFError, zipfile.BadZipFile, tarfile.TarError, zlib.error) as error:
        raise CorpusError(f"{root}: damaged, or not a whole archive: {error}") from None
    files, seen = {}, set()
    for path in sorted(found):
        text = _text(found[path])
        if text and text not in seen and _wanted(path, tests):
            files[path] = text
            seen.add(text)
    if not files:
        raise CorpusError(f"{root}: no .py files")
    return Corpus(name, files)


def _folder(root: Path) -> Iterator[tuple[str, bytes]]:
    for path in root.rglob("*.py"):
        if path.is_file():
            yield path.relative_to(root).as_posix(), path.read_bytes()


def _archive(path: Path) -> Iterator[tuple[str, bytes]]:
    """Members read one by one; nothing is unpacked to disk."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            yield from ((name, archive.read(name)) for name in archive.namelist() if name.endswith(".py"))
    elif tarfile.is_tarfile(path):
        with tarfile.open(path) as archive:
            for member in archive:
                stream = archive.extractfile(member) if member.name.endswith(".py") else None
                if stream:
                    yield member.name, stream.read()
    else:
        raise CorpusError(f"{path}: neither a folder nor a tar or zip archive")


def _below_lib(files: dict[str, bytes]) -> Iterator[tuple[str, bytes]]:
    """Paths from the `Lib` folder of CPython's sources where there is one, else as they are."""
    inside = [path for path in files if "/Lib/" in f"/{path}"]
    for path in inside or files:
        yield f"/{path}".split("/Lib/", 1)[-1].removeprefix("/"), files[path]


def _text(content: bytes) -> str:
    """UTF-8 with Unix line ends; other encodings are test data and count as empty."""
    try:
        return content.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return ""


def _wanted(path: str, tests: bool) -> bool:
    parts = Path(path).parts
    skipped = SKIPPED_FOLDERS if tests else SKIPPED_FOLDERS | TEST_FOLDERS
    return skipped.isdisjoint(parts) and not any(part.startswith(SKIPPED_PREFIXES) for part in parts)


def _fraction(path: str) -> float:
    """A number in [0, 1) that belongs to a path."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") / 2**64


def train_tokenizer(files: Mapping[str, str], size: int) -> tokenizers.Tokenizer:
    """A byte-level BPE of at most `size` ids, the end token last. The same files give the same tokenizer."""
    made = tokenizers.Tokenizer(models.BPE())
    # Digit by digit: else much of a small vocabulary goes to the numbers of a few test tables.
    digits = pre_tokenizers.Digits(individual_digits=True)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size - 1, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(files.values(), trainer)
    made.add_special_tokens([END_TOKEN])
    return made


def tokenize(tokenizer: tokenizers.Tokenizer, files: Mapping[str, str]) -> dict[str, list[int]]:
    """The ids of every file."""
    encoded = tokenizer.encode_batch_fast(list(files.values()))
    return {path: one.ids for path, one in zip(files, encoded, strict=True)}


def join(files: Mapping[str, list[int]], end: int) -> UInt16[np.ndarray, "tokens"]:
    """All files in one row, the end token after each; two bytes an id keep the whole corpus on the device."""
    return np.concatenate([np.array([*ids, end], np.uint16) for ids in files.values()])
