"""Names of checkpoints: directories, the bundled one, and hub ids out of a cache or with a clear refusal."""

from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from inkling_jax.checkpoint import CheckpointError, hub, resolve


def test_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve(tmp_path) == resolve(str(tmp_path)) == tmp_path
    assert resolve("owner/name") == Path("owner/name")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/owner") == tmp_path / "owner"


def test_bundled() -> None:
    assert resolve("nano").parts[-2:] == ("inkling_jax", "nano")
    assert resolve(Path("nano")) == resolve("nano")


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: no such directory"):
        resolve(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file: expected the directory of a checkpoint, found a file"):
        resolve(tmp_path / "file")


@pytest.mark.parametrize("path", ["./nowhere", "../nowhere"])
def test_a_path_is_no_hub_id(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(CheckpointError, match="nowhere: no such directory$"):
        resolve(path)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache as the hub's client lays it out, and a client that cannot reach the hub."""
    snapshot = tmp_path / "models--owner--name" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "models--owner--name" / "refs").mkdir()
    (tmp_path / "models--owner--name" / "refs" / "main").write_text("a" * 40)
    offline = partial(huggingface_hub.snapshot_download, cache_dir=tmp_path, local_files_only=True)
    monkeypatch.setattr(hub, "snapshot_download", offline)
    return snapshot


def test_offline_cache(cache: Path) -> None:
    assert resolve("owner/name") == cache
    with pytest.raises(CheckpointError, match="owner/other: no such directory here; .*not in the local cache"):
        resolve("owner/other")


def _error(kind: type[Exception]) -> Exception:
    error = kind.__new__(kind)
    Exception.__init__(error, "the reason\nmore")
    return error


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (errors.GatedRepoError, "asks for permission"),
        (errors.RepositoryNotFoundError, "no such repository"),
        (errors.LocalEntryNotFoundError, "cannot be reached"),
        (errors.HfHubHTTPError, "the reason"),
        (ConnectionError, "the reason"),
    ],
)
def test_failures_are_told(monkeypatch: pytest.MonkeyPatch, kind: type[Exception], message: str) -> None:
    def fail(*args: Any, **kwargs: Any) -> str:
        raise _error(kind)

    monkeypatch.setattr(hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match=f"owner/name: .*{message}"):
        resolve("owner/name")


def test_only_safetensors_and_json_are_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def fake(repository: str, **kwargs: Any) -> str:
        asked.update(kwargs, repository=repository)
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", fake)
    assert resolve("owner/name") == tmp_path
    assert asked == {"repository": "owner/name", "allow_patterns": ["*.json", "*.safetensors"]}
    resolve("owner/name", weights=False)
    assert asked["allow_patterns"] == ["*.json"]
