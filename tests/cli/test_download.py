"""`kt model download` against a hub on loopback, complete and interrupted; `kt model verify` against every kind of
damage.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

from ktransformers.checkpoint import hub as client
from ktransformers.checkpoint.verify import Verified, local_hashes, verify
from ktransformers.ground import model_registry
from ktransformers.ground.errors import KTError
from tests.support.cli import RunKt, model_files, safetensors_bytes, write_model
from tests.support.hub import COMMIT, Hub

BIG = os.urandom(6 << 20)


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1 << 16)
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)


def big_model() -> dict[str, bytes]:
    return {
        "config.json": b"{}",
        "tokenizer.json": b"{}",
        "model.safetensors": safetensors_bytes({"a": ("U8", [len(BIG)], BIG)}),
    }


def test_download_registers_and_verifies(kt: RunKt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extra = {"pytorch_model.bin": b"a pickle", "original/consolidated.00.pth": b"another", "docs/card.md": b"text"}
    with Hub(model_files() | extra) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        listed = kt("model", "download", hub.repo, "--dry-run", "--json").json
        assert "docs/card.md" in listed["files"] and not any("bin" in name or "pth" in name for name in listed["files"])
        assert hub.asked == []
        done = kt("model", "download", hub.repo, "--json").json
        assert (done["name"], done["fetched"], done["kept"], done["revision"]) == ("tiny-moe", 6, 0, COMMIT)
        assert done["check"]["whole"] and Path(done["path"]).is_relative_to(tmp_path / "xdg" / "data")
        again = kt("model", "download", hub.repo, "--json").json
        assert (again["fetched"], again["kept"]) == (0, 6)
        assert {name for name, _ in hub.asked} == set(listed["files"])
        online = kt("model", "verify", "tiny-moe", "--hub", "--json").json
        assert online["whole"] and online["hashed"] == 6
    directory = Path(done["path"])
    assert model_registry.resolve("someone/tiny-moe") == model_registry.resolve("tiny-moe") == str(directory)
    checked = kt("model", "verify", "tiny-moe", "--json").json  # the hashes are noted: no hub is needed
    assert (checked["whole"], checked["hashed"], checked["unknown"]) == (True, 6, 0)
    shard = directory / "model-00002-of-00002.safetensors"
    body = bytearray(shard.read_bytes())
    body[-1] ^= 1
    shard.write_bytes(body)
    rotten = kt("model", "verify", "tiny-moe")
    assert rotten.code == 1 and "its hash is not the one" in rotten.out and "damaged" in rotten.out
    assert kt("model", "verify", "tiny-moe", "--no-hash").code == 0


def test_lost_connection_resumes_in_the_same_run(tmp_path: Path) -> None:
    files = big_model()
    with Hub(files, cut=2 << 20, cuts=2) as hub:
        listing = client.select_files(client.list_files(hub.repo, endpoint=hub.url))
        seen: list[tuple[int, int]] = []
        done = client.download(listing, tmp_path / "m", endpoint=hub.url, progress=lambda *news: seen.append(news))
    ranges = [asked for name, asked in hub.asked if name == "model.safetensors"]
    assert ranges[0] is None and len(ranges) == 3 and all(asked for asked in ranges[1:])
    assert hub.sent < listing.size + (1 << 18)  # nothing is fetched twice but what was in flight
    assert seen[-1] == (listing.size, listing.size) and done.fetched == 3
    assert {name: (tmp_path / "m" / name).read_bytes() for name in files} == files
    assert sorted(file.name for file in (tmp_path / "m").iterdir()) == sorted([client.RECORD_FILE, *files])  # no parts


def test_killed_run_resumes_in_the_next(tmp_path: Path) -> None:
    """The first run is another process and is killed in the middle of the shard."""
    target = tmp_path / "m"
    code = (
        "import sys, time; from pathlib import Path; from ktransformers.checkpoint import hub\n"
        "import huggingface_hub.constants, huggingface_hub.file_download\n"
        "huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE, wait = 1 << 16, time.sleep\n"
        "huggingface_hub.file_download.time.sleep = lambda _: wait(60)\n"
        "listing = hub.select_files(hub.list_files(sys.argv[1], endpoint=sys.argv[2]))\n"
        "hub.download(listing, Path(sys.argv[3]), endpoint=sys.argv[2])\n"
    )
    with Hub(big_model(), cut=4 << 20, cuts=1) as hub:
        first = subprocess.Popen([sys.executable, "-c", code, hub.repo, hub.url, str(target)])
        end = time.monotonic() + 60
        parts: list[Path] = []
        while time.monotonic() < end and not parts:
            time.sleep(0.05)
            with contextlib.suppress(FileNotFoundError):  # a small file that has got its name meanwhile
                files = target.glob(f"{client.PARTIAL_DIRECTORY}/*")
                parts = [file for file in files if file.stat().st_size >= 3 << 20]
        first.send_signal(signal.SIGKILL)  # which waits to try again
        first.wait()
        assert hub.cuts == 0 and not (target / "model.safetensors").exists()
        (part,) = parts
        had = part.stat().st_size
        damaged = verify(target)
        assert not damaged.whole and any("cut off" in finding.text for finding in damaged.findings)
        hub.asked.clear()
        listing = client.select_files(client.list_files(hub.repo, endpoint=hub.url))
        done = client.download(listing, target, endpoint=hub.url)
        assert ("model.safetensors", f"bytes={had}-") in hub.asked
        assert done.resumed >= had >= 3 << 20
        assert verify(target, listing.files).whole


def test_new_revision_with_equal_sizes_is_downloaded(tmp_path: Path) -> None:
    files = model_files()
    shard = "model-00002-of-00002.safetensors"
    with Hub(files) as hub:
        client.download(client.list_files(hub.repo, endpoint=hub.url), tmp_path / "m", endpoint=hub.url)
        hub.asked.clear()
        hub.files = files | {shard: files[shard][:-1] + b"!", "tokenizer.json": b"[]"}
        listing = client.list_files(hub.repo, endpoint=hub.url)
        done = client.download(listing, tmp_path / "m", endpoint=hub.url)
        assert sorted(name for name, _ in hub.asked) == [shard, "tokenizer.json"] and done.kept == 3
        assert verify(tmp_path / "m", listing.files).whole
        hub.asked.clear()
        (tmp_path / "m" / client.RECORD_FILE).unlink()  # files without a record are hashed
        (tmp_path / "m" / "tokenizer.json").write_bytes(b"{}")
        client.download(listing, tmp_path / "m", endpoint=hub.url)
        assert [name for name, _ in hub.asked] == ["tokenizer.json"]


def test_hub_without_ranges_and_with_wrong_hashes(tmp_path: Path) -> None:
    with Hub(big_model(), cut=1 << 20, cuts=1, ignores_ranges=True) as hub:
        listing = client.select_files(client.list_files(hub.repo, endpoint=hub.url))
        client.download(listing, tmp_path / "m", endpoint=hub.url)
        assert verify(tmp_path / "m", listing.files).whole
        hub.lies = {"model.safetensors": bytes(listing.files["model.safetensors"].size or 0)}
        with pytest.raises(KTError, match=r"model\.safetensors: the downloaded file has another hash"):
            client.download(listing, tmp_path / "n", endpoint=hub.url)
        assert not (tmp_path / "n" / "model.safetensors").exists()
        assert not list((tmp_path / "n" / client.PARTIAL_DIRECTORY).glob("*.part"))


def test_large_files_use_the_hub_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_DIRECT_BYTES", 50)
    with Hub(model_files()) as hub:
        listing = client.select_files(client.list_files(hub.repo, endpoint=hub.url))
        client.download(listing, tmp_path / "m", endpoint=hub.url)
        assert verify(tmp_path / "m", listing.files).whole


def test_invalid_downloads_are_refused_before_fetching(
    kt: RunKt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "OWNER/NAME" in kt("model", "download", "just-a-name").error
    assert "REPO" in kt("model", "download").error  # no terminal
    assert "huggingface, modelscope" in kt("model", "download", "a/b", "--source", "elsewhere").error
    with Hub({"a-Q4.gguf": b"1", "a-Q8.gguf": b"2"}) as hub:
        kt("config", "set", "download.endpoint", hub.url)
        assert "--include" in kt("model", "download", hub.repo).error
        assert "no/such" in kt("model", "download", "no/such").error
        hub.files = {"pytorch_model.bin": b"a pickle", "config.json": b"{}"}
        assert "pickles" in kt("model", "download", hub.repo).error
        hub.files = {"../escape.safetensors": b""}
        assert "escape" in kt("model", "download", hub.repo).error
        hub.files = model_files()
        monkeypatch.setattr(client.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=10))
        assert "--local-dir" in kt("model", "download", hub.repo).error
    assert hub.asked == [] and model_registry.entries() == []


def test_modelscope_downloads_and_registers(kt: RunKt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stub of its client, which is not a dependency, checks the calls."""
    monkeypatch.setitem(sys.modules, "modelscope", None)
    assert "pip install modelscope" in kt("model", "download", "a/b", "--source", "modelscope").error
    calls: list[dict[str, Any]] = []

    def snapshot_download(repo: str, **words: Any) -> str:
        calls.append({"repo": repo, **words})
        if repo == "a/none":
            raise ValueError("no such model")
        write_model(Path(words["local_dir"]))
        return str(words["local_dir"])

    monkeypatch.setitem(sys.modules, "modelscope", types.SimpleNamespace(snapshot_download=snapshot_download))
    kt("config", "set", "download.source", "modelscope")
    kt("config", "set", "paths.downloads", str(tmp_path / "models"))
    done = kt("model", "download", "a/b", "--revision", "v1", "--json").json
    assert done["path"] == calls[0]["local_dir"] == str(tmp_path / "models" / "b")
    assert calls[0]["revision"] == "v1" and "*.bin" in calls[0]["ignore_patterns"] and done["check"]["whole"]
    assert model_registry.get("b").source == "modelscope"
    assert "no such model" in kt("model", "download", "a/none").error


def texts(found: Verified) -> str:
    return " | ".join(f"{finding.level} {finding.file}: {finding.text}" for finding in found.findings)


def test_verify_detects_damage(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m")
    first, second = (directory / f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    whole = {file: file.read_bytes() for file in (first, second)}
    assert verify(directory).findings == []

    second.write_bytes(whole[second][:-7])
    assert "7 bytes too short" in texts(verify(directory))
    second.write_bytes(whole[second] + b"tail")
    assert "4 bytes too long" in texts(verify(directory))
    second.write_bytes(b"<html>a proxy's page</html>")
    assert "error model-00002-of-00002.safetensors: a header that cannot be" in texts(verify(directory))
    second.write_bytes(b"")
    assert "a header that cannot be" in texts(verify(directory))
    second.write_bytes(safetensors_bytes({"c": ("F32", [100], b"\2" * 100)}))
    assert "its shape [100] does not" in texts(verify(directory))
    second.write_bytes(safetensors_bytes({"d": ("F8_E4M3", [100], b"\2" * 100)}))
    actual = texts(verify(directory))
    assert "1 tensors of the index are missing in it: c" in actual and "warning model.safetensors.index.json" in actual
    second.unlink()
    assert "the index names it, and it is missing" in texts(verify(directory))
    second.write_bytes(whole[second])
    (directory / "left-over.safetensors").write_bytes(whole[first])
    left = verify(directory)
    assert left.whole and "the index does not name" in texts(left)
    (directory / "model.safetensors.index.json").write_text("{}")
    assert "no index: KeyError" in texts(verify(directory))
    (directory / "model.safetensors.index.json").unlink()
    (directory / "config.json").write_text("{")
    (directory / "tokenizer.json").unlink()
    actual = texts(verify(directory))
    assert "config.json: no JSON" in actual and "neither it nor" in actual and "tokenizer: no tokenizer file" in actual


def test_hashes_beside_a_model_are_used(tmp_path: Path) -> None:
    """Metadata of `hf download --local-dir` and of the hub's cache."""
    import hashlib

    directory = write_model(tmp_path / "m")
    shard = directory / "model-00001-of-00002.safetensors"
    records = directory / ".cache" / "huggingface" / "download"
    records.mkdir(parents=True)
    git = hashlib.sha1(b"blob 2\0{}").hexdigest()
    (records / "tokenizer.json.metadata").write_text(f"{COMMIT}\n{git}\n1.0\n")
    blob = tmp_path / "blobs" / hashlib.sha256(shard.read_bytes()).hexdigest()
    blob.parent.mkdir()
    shard.rename(blob)
    shard.symlink_to(blob)
    assert set(local_hashes(directory)) == {"tokenizer.json", shard.name}
    actual = verify(directory)
    assert (actual.whole, actual.hashed, actual.unknown) == (True, 2, 1)
    (directory / "tokenizer.json").write_text("[]")
    assert "tokenizer.json: its hash" in texts(verify(directory))


def test_hashes_are_stored_by_model_add(kt: RunKt, tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m")
    kt("model", "add", str(directory), "--hash")
    assert kt("model", "verify", "--json").json[0]["hashed"] == 5
    (directory / "tokenizer.json").write_text("[]")
    assert kt("model", "verify", "m", "--json").code == 1
    (directory / "tokenizer.json").unlink()
    assert "it is missing" in kt("model", "verify", "m").out
    assert "--repo" in kt("model", "verify", "m", "--hub").error


def test_gguf_is_verified(kt: RunKt, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    import numpy

    file = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_tensor("token_embd.weight", numpy.ones((4, 32), dtype=numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert kt("model", "add", str(file), "--json").json["format"] == "gguf"
    checked = kt("model", "verify", "small", "--json").json
    assert (checked["whole"], checked["tensors"], checked["dtypes"]) == (True, 1, {"F32": 128})
    file.write_bytes(file.read_bytes()[:-200])
    assert kt("model", "verify", "small").code == 1
    file.write_bytes(b"no model")
    assert "no whole GGUF" in kt("model", "verify", "small").out
    (tmp_path / "split-00001-of-00002.gguf").write_bytes(b"")
    assert "a part of the model is missing" in texts(verify(tmp_path / "split-00001-of-00002.gguf"))
    assert json.loads(kt("model", "list", "--json").out)[0]["name"] == "small"
