"""What the client does when a sidecar fails, against the scripted one. DESIGN "Engines"."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from small_engine import CONFIG, PARAMS
from vllm_doubles import (
    FAKE,
    HERE,
    expect_counting,
    make_engine,
    sample,
    sample_many,
)

from rlds_jax.rollouts.engines.base import PromptTooLong
from rlds_jax.rollouts.engines.vllm import EngineStopped, RequestRefused, RequestTimedOut
from rlds_jax.rollouts.engines.vllm_process import SidecarFailed
from rlds_jax.rollouts.engines.vllm_transport import OutOfSharedMemory, SharedMemory


@pytest.fixture
def engine(faults, tmp_path):
    engine = make_engine(tmp_path, request_timeout_s=20.0)
    yield engine
    engine.close()


def sidecars(engine):
    return engine._replicas.pids


def alive(pid):
    """Whether a process runs; one that ended but was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_completions_carry_ids_logprobs_and_version(engine):
    completions = sample_many(engine, 40)
    expect_counting(completions)
    first = completions[0]
    assert (first.ids.dtype, first.logprobs.dtype) == (np.int32, np.float32)
    assert (first.finish_reason, first.weight_version, first.constrained) == ("length", 0, False)
    engine.update_weights(PARAMS, 7)
    after = asyncio.run(sample(engine, [1], json_schema={"type": "object"}))
    assert (after.weight_version, after.constrained) == (7, True)
    metrics = engine.metrics()
    assert metrics["engine/requests"] == 41
    assert metrics["engine/decode_tokens"] == 41 * 4
    assert metrics["engine/restarts"] == metrics["engine/resent"] == 0
    assert metrics["engine/sync_gb_per_s"] > 0


def test_the_sidecar_asks_for_its_token(engine):
    (sidecar,) = engine._replicas._sidecars
    host, port = sidecar.url.removeprefix("http://").split(":")
    assert host == "127.0.0.1"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = connection.makefile().read()
    assert " 401 " in answer.splitlines()[0]
    assert sidecar.token not in " ".join(
        Path(f"/proc/{sidecar.pid}/cmdline").read_text().split("\0")
    )


def test_its_port_is_taken_before_it_starts(engine):
    (sidecar,) = engine._replicas._sidecars
    port = int(sidecar.url.rsplit(":", 1)[1])
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))


def test_arguments_are_checked(engine):
    with pytest.raises(PromptTooLong, match="max_context"):
        asyncio.run(sample(engine, [1] * 510, max_tokens=3))
    with pytest.raises(ValueError, match="max_tokens"):
        asyncio.run(sample(engine, [1], max_tokens=0))


def test_killed_in_a_batch_it_is_restarted_and_the_batch_completes(engine, faults):
    before = sidecars(engine)
    engine.update_weights(PARAMS, 3)
    faults.set(die=1)
    completions = sample_many(engine, 40)
    expect_counting(completions)
    assert {c.weight_version for c in completions} == {3}
    metrics = engine.metrics()
    assert metrics["engine/restarts"] == 1
    assert metrics["engine/resent"] >= 1
    assert sidecars(engine) != before
    assert not alive(before[0])


def test_a_failed_update_restarts_and_is_repeated(engine, faults):
    faults.set(fail_update=1)
    engine.update_weights(PARAMS, 5)
    (completion,) = sample_many(engine, 1)
    assert completion.weight_version == 5
    assert engine.metrics()["engine/restarts"] == 1


def test_a_hung_request_is_given_up_and_holds_nothing_up(faults, tmp_path):
    engine = make_engine(tmp_path, request_timeout_s=1.5)
    faults.set(hang=1)
    with pytest.raises(RequestTimedOut, match="request_timeout_s"):
        asyncio.run(sample(engine, [1]))
    engine.update_weights(PARAMS, 1)  # waits for what the sidecar still works on: nothing
    metrics = engine.metrics()
    assert (metrics["engine/timed_out"], metrics["engine/restarts"]) == (1, 0)
    engine.close()


def test_on_a_shared_gpu_it_sleeps_until_the_update(faults, tmp_path):
    engine = make_engine(tmp_path, placement="shared", gpus=(0,), memory_fraction=0.5)
    engine.sleep()
    assert faults.seen("asleep")
    engine.update_weights(PARAMS, 2)
    assert not faults.seen("asleep")
    (completion,) = sample_many(engine, 1)
    assert completion.weight_version == 2
    assert engine.metrics()["engine/restarts"] == 0
    engine.close()


def test_a_sidecar_that_answers_no_more_is_restarted(faults, tmp_path, monkeypatch):
    monkeypatch.setattr("rlds_jax.rollouts.engines.vllm_replicas.HEALTH_S", 0.5)
    engine = make_engine(tmp_path, request_timeout_s=4.0)
    faults.set(hang=1, unwell=2)
    (completion,) = sample_many(engine, 1)
    expect_counting([completion])
    assert engine.metrics()["engine/restarts"] == 1
    engine.close()


def test_a_refused_request_is_not_repeated(engine, faults):
    faults.set(refuse=1)
    with pytest.raises(RequestRefused, match="schema is not supported"):
        asyncio.run(sample(engine, [1]))
    assert engine.metrics()["engine/resent"] == 0


def test_logprobs_that_are_not_finite_are_an_error(engine, faults):
    faults.set(nan=4)
    with pytest.raises(FloatingPointError, match="version 0"):
        asyncio.run(sample(engine, [1]))


def test_restarts_are_bounded(faults, tmp_path):
    engine = make_engine(tmp_path, max_restarts=1)
    faults.set(die=9)
    (outcome,) = sample_many(engine, 1)
    with pytest.raises(EngineStopped, match="max_restarts"):
        raise outcome
    with pytest.raises(EngineStopped):
        asyncio.run(sample(engine, [1]))
    engine.close()


def test_a_cancelled_request_frees_its_place(engine, faults):
    faults.set(hang=16)

    async def cancelled():
        tasks = [asyncio.create_task(sample(engine, [1])) for _ in range(16)]  # every place
        await asyncio.sleep(0.5)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return await sample(engine, [1])

    assert len(asyncio.run(cancelled()).ids)
    engine.update_weights(PARAMS, 1)  # waits for what the sidecar still works on: nothing


def test_closing_ends_the_process_and_whoever_waits(engine, faults):
    (pid,) = sidecars(engine)
    faults.set(hang=1)

    async def closed_under_way():
        request = asyncio.create_task(sample(engine, [1]))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(engine.close)
        await request

    with pytest.raises(EngineStopped, match="closed"):
        asyncio.run(closed_under_way())
    assert not alive(pid)
    engine.close()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_it_notices_that_its_trainer_is_gone(faults, tmp_path, end):
    code = f"""
import sys, time
from pathlib import Path
from rlds_jax.rollouts.engines import vllm_process
from rlds_jax.rollouts.engines.vllm_config import VllmConfig
vllm_process.SCRIPT = {str(FAKE)!r}
config = VllmConfig(
    python=sys.executable, placement="cpu", gpus=(), replicas=1, cache_bytes=1
)
sidecar = vllm_process.Sidecar(
    vllm_process.Launch(config, 0, Path("model"), Path({str(tmp_path / "log")!r}))
)
print(sidecar.pid, flush=True)
time.sleep(600)
"""
    trainer = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(HERE.parents[2])},
    )
    assert trainer.stdout is not None
    pid = int(trainer.stdout.readline())
    assert alive(pid)
    trainer.send_signal(end)
    trainer.wait()
    wait_until(lambda: not alive(pid))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("torchvision", "uninstall torchvision"),
        ("no_module", "environment is incomplete"),
        ("old", r"written for vLLM 0\.32\.0"),
        ("crash", "something broke"),
    ],
)
def test_one_that_does_not_come_up_is_explained_with_its_log(faults, tmp_path, fault, message):
    faults.set(**{fault: 1})
    with pytest.raises(SidecarFailed, match=message) as failure:
        make_engine(tmp_path)
    assert "exit code" in str(failure.value)
    assert "sidecar_0_0.log ends with" in str(failure.value)


def test_one_that_never_answers_is_given_up(faults, tmp_path):
    faults.set(mute=1)
    with pytest.raises(SidecarFailed, match="start_timeout_s"):
        make_engine(tmp_path, start_timeout_s=2.0)


def test_a_missing_environment_is_named(tmp_path):
    with pytest.raises(SidecarFailed, match=r"engine\.python.*make sidecar"):
        make_engine(tmp_path, python="/no/such/python")


def test_too_little_shared_memory_is_named(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OutOfSharedMemory, match=r"bytes left.*bucket_bytes"):
        SharedMemory(CONFIG, "float32", 2**20, replicas=1, folder=tmp_path)
    assert not list(tmp_path.iterdir())
