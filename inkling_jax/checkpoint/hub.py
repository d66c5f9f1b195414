"""Where a checkpoint is: a directory, the bundled model, or a repository of the Hugging Face hub."""

import os
import re
from importlib import resources
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from inkling_jax.errors import CheckpointError

BUNDLED = "nano"


def resolve(path: str | os.PathLike[str], *, weights: bool = True) -> Path:
    """The directory of a checkpoint.

    `path` is a directory, "nano" for the bundled model, or a hub id ("owner/name"), which is downloaded (safetensors
    and JSON only; without `weights` just the JSON) or taken from the local cache. Raises `CheckpointError`.
    """
    if os.fspath(path) == BUNDLED:
        return Path(str(resources.files("inkling_jax") / BUNDLED))
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory
    if directory.exists():
        raise CheckpointError(f"{directory}: expected the directory of a checkpoint, found a file")
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(path)):
        raise CheckpointError(f"{directory}: no such directory")
    return _download(str(path), ["*.json", "*.safetensors"] if weights else ["*.json"])


def _download(repository: str, patterns: list[str]) -> Path:
    try:
        return Path(snapshot_download(repository, allow_patterns=patterns))
    except GatedRepoError:
        reason = "the repository asks for permission; request it on its page and log in with `hf auth login`"
    except RepositoryNotFoundError:
        reason = "no such repository, or a private one without `hf auth login`"
    except LocalEntryNotFoundError:
        reason = "not in the local cache, and the hub cannot be reached"
    except (EntryNotFoundError, HFValidationError, HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
    raise CheckpointError(f"{repository}: no such directory here; and on the hub: {reason}")
