"""Faults of the files, and a directory that is whole whenever a save stops."""

import contextlib
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rlds_jax.models import safetensors_dir

NAMES = ("a", "b", "c", "d")
SHAPES = dict.fromkeys(NAMES, (4, 6))
SIZES = dict.fromkeys(NAMES, 96)
WHOLE = (slice(None), slice(None))


def tensors(offset=0):
    for i, name in enumerate(NAMES):
        yield name, np.arange(24, dtype=np.float32).reshape(4, 6) + 100 * i + offset


def write(directory, shard_bytes, offset=0):
    beside = {"config.json": str(offset).encode()}
    safetensors_dir.write(directory, tensors(offset), SIZES, shard_bytes, beside)


def held(directory):
    """Every value, through `TensorFiles`."""
    files = safetensors_dir.TensorFiles(directory)
    files.check(SHAPES)
    return np.stack([files.read(name, WHOLE) for name in NAMES])


def values(offset=0):
    return np.stack([value for _, value in tensors(offset)])


@pytest.mark.parametrize("shard_bytes", [1, 200, 10**6])
def test_what_was_written_is_read(tmp_path, shard_bytes):
    write(tmp_path, shard_bytes)
    np.testing.assert_array_equal(held(tmp_path), values())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) == {1: 4, 200: 2, 10**6: 1}[shard_bytes]
    assert max(path.stat().st_mode & 0o777 for path in tmp_path.iterdir()) == 0o644
    for path in files:
        load_file(tmp_path / path)


def test_a_slice_is_a_new_array(tmp_path):
    write(tmp_path, 200)
    files = safetensors_dir.TensorFiles(tmp_path)
    part = files.read("b", (slice(1, 3), slice(2, 5)))
    np.testing.assert_array_equal(part, values()[1, 1:3, 2:5])
    part[:] = 0
    np.testing.assert_array_equal(files.read("b", WHOLE), values()[1])


class Crash(Exception):
    pass


@contextlib.contextmanager
def crash_at(monkeypatch, moment):
    """The `moment`-th file that is created, renamed or removed is not."""
    left = [moment]

    def counting(function):
        def counted(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                raise Crash
            return function(*args, **kwargs)

        return counted

    with monkeypatch.context() as patch:
        for name in ("replace", "unlink", "write_text", "write_bytes", "rmdir"):
            patch.setattr(Path, name, counting(getattr(Path, name)))
        patch.setattr(safetensors_dir, "save_file", counting(save_file))
        yield


@pytest.mark.parametrize("before", [1, 200, 10**6])
@pytest.mark.parametrize("after", [1, 200, 10**6])
def test_a_save_that_stops_leaves_the_old_or_the_new(tmp_path, monkeypatch, before, after):
    seen = set()
    for moment in range(100):
        directory = tmp_path / str(moment)
        write(directory, before)
        try:
            with crash_at(monkeypatch, moment):
                write(directory, after, offset=0.5)
        except Crash:
            now = held(directory)
            old = np.array_equal(now, values())
            assert old or np.array_equal(now, values(0.5))
            seen.add(old)
            write(directory, after, offset=0.25)  # and it can be saved again
            np.testing.assert_array_equal(held(directory), values(0.25))
        else:
            break
    np.testing.assert_array_equal(held(directory), values(0.5))
    count = {1: 4, 200: 2, 10**6: 1}[after]
    assert len(list(directory.iterdir())) == count + 1 + (count > 1)
    assert seen == {True, False}


def test_a_shard_that_is_absent_is_named_with_its_tensors(tmp_path):
    write(tmp_path, 200)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"00002-of-00002\.safetensors does not exist") as error:
        safetensors_dir.TensorFiles(tmp_path)
    assert "lost: c\n  lost: d" in str(error.value)


def test_truncated_shards_are_all_named_with_the_tensors_lost(tmp_path):
    write(tmp_path, 200)
    for i, cut in ((1, 4), (2, 190)):
        path = tmp_path / f"model-0000{i}-of-00002.safetensors"
        path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(ValueError, match="damaged") as error:
        safetensors_dir.TensorFiles(tmp_path)
    lost = [line for line in str(error.value).splitlines() if "lost" in line]
    assert lost == ["  lost: b", "  lost: c", "  lost: d"]


@pytest.mark.parametrize("content", [b"", b"\xff" * 40, b"\x02" + bytes(7) + b"[]"])
def test_without_a_header_the_index_tells_what_is_lost(tmp_path, content):
    write(tmp_path, 200)
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="lost: a\n  lost: b"):
        safetensors_dir.TensorFiles(tmp_path)


def test_all_that_does_not_match_is_named(tmp_path):
    write(tmp_path, 200)
    path = tmp_path / "model-00001-of-00002.safetensors"
    eighth = np.zeros((4, 6), ml_dtypes.float8_e4m3fn)
    save_file({"a": eighth, "b": np.zeros((6, 4), np.float32), "x": eighth}, path)
    index = json.loads((tmp_path / safetensors_dir.INDEX).read_text())
    del index["weight_map"]["b"]  # what a shard holds beside the index counts
    index["weight_map"]["e"] = path.name
    (tmp_path / safetensors_dir.INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match="does not match its config") as error:
        safetensors_dir.TensorFiles(tmp_path).check(SHAPES | {"e": (1,)})
    assert str(error.value).splitlines()[1:] == [
        "  missing: e",
        "  unexpected: x",
        "  dtype: a is F8_E4M3, which is none of F16, BF16, F32",
        "  shape: b is (6, 4), config.json says (4, 6)",
    ]
