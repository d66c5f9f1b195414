"""A tiny checkpoint on disk, with and without a tokenizer, and a way to run the command in this process."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from inkling_jax import Inkling, load, save
from inkling_jax.cli import chat, generate, main
from inkling_jax.nn import abstract_parameters
from pallas_kernels import Implementation
from tests.checkpoint.tiny import CONFIG

TEXT_CONFIG = replace(
    CONFIG,
    num_layers=2,
    local_layers=(0,),
    mtp_depths=1,
    mtp_local=(),
    vocab_size=272,
    real_vocab_size=256,
    max_context=512,
    eos_token_ids=(0,),
)


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


@cache
def loaded(path: str, dtype: str, implementation: Implementation | None = None) -> Inkling:
    return load(path, dtype, progress=False, implementation=implementation)


@pytest.fixture(autouse=True)
def load_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a checkpoint again would compile everything again."""

    def again(path: str, dtype: str, implementation: Implementation | None, **_: object) -> Inkling:
        return loaded(path, dtype, implementation)

    for module in (generate, chat):
        monkeypatch.setattr(module, "load", again)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Runs `inkling-jax` with these arguments and returns the exit code and what it printed."""

    def run(*arguments: object) -> Outcome:
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = int(stop.code or 0)
        return Outcome(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def model() -> Inkling:
    rng = np.random.default_rng(3)
    params = {
        path: jnp.asarray(0.5 * rng.normal(size=spec.shape), spec.dtype)
        for path, spec in abstract_parameters(TEXT_CONFIG).items()
    }
    # The first 94 tokens of the tokenizer below are the printable ASCII letters: the likeliest token is one of them.
    params["unembed.weight"] = params["unembed.weight"].at[94:].set(0)
    return Inkling(TEXT_CONFIG, params)


@pytest.fixture(scope="session")
def ids_only(model: Inkling, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without a tokenizer."""
    directory = tmp_path_factory.mktemp("cli") / "ids"
    save(model, directory)
    return directory


@pytest.fixture(scope="session")
def checkpoint(model: Inkling, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same checkpoint with a tokenizer in which every byte is a token."""
    directory = tmp_path_factory.mktemp("cli") / "text"
    save(model, directory)
    letters = sorted(ByteLevel.alphabet())
    library = tokenizers.Tokenizer(BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    library.pre_tokenizer = ByteLevel(add_prefix_space=False)
    library.decoder = ByteLevelDecoder()
    library.save(str(directory / "tokenizer.json"))
    return directory
