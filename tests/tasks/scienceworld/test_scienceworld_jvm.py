"""JVMs: what they answer, how they fail, and that none outlives its owner."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from rlds_jax.tasks.scienceworld import commands, items
from rlds_jax.tasks.scienceworld.jvm import JavaMissing, Jvm, JvmFailed, check_java
from rlds_jax.tasks.scienceworld.pool import JvmPool, default_size

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def jvm():
    jvm = Jvm()
    yield jvm
    jvm.kill()


def is_running(pid):
    """A process that is neither gone nor a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def all_gone(pids, seconds=30):
    until = time.monotonic() + seconds
    while any(is_running(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.05)
    return not any(is_running(pid) for pid in pids)


# Java


@pytest.mark.parametrize("version", ["1.8", "9", "10"])
def test_an_old_java_is_refused_with_the_remedy(version):
    with pytest.raises(JavaMissing, match=r"Java 11 or later.*apt-get"):
        check_java(version)


@pytest.mark.parametrize("version", ["11", "17", "21.0"])
def test_a_recent_java_is_taken(version):
    check_java(version)


def test_no_java_is_said_with_the_remedy(monkeypatch, tmp_path):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(JavaMissing, match=r"apt-get.*no java was found"):
        Jvm()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(JavaMissing, match=f"no java was found in {tmp_path}"):
        Jvm()


@pytest.mark.parametrize(
    ("says", "error"),
    [("UnsupportedClassVersionError: 52.0", JavaMissing), ("out of memory", JvmFailed)],
)
def test_a_java_that_does_not_start_is_quoted(monkeypatch, tmp_path, says, error):
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text(f"#!/bin/sh\necho '{says}' >&2\nexit 1\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(error, match=says):
        Jvm()


def test_the_default_size_is_at_least_one():
    assert default_size() >= 1


# One JVM


@pytest.mark.jvm
def test_counts_and_splits_are_the_simulator_s(jvm):
    """Every task's count, and the official split of those with the oddest sizes."""
    assert {name: jvm.call("getTaskMaxVariations", name) for name in items.VARIATIONS} == (
        items.VARIATIONS
    )
    assert jvm.call("getTaskNames").size() == len(items.VARIATIONS)
    for task in ("identify-life-stages-2", "boil", "chemistry-mix", "lifespan-longest-lived"):
        jvm.load(task, 0, "easy")
        for split, method in (
            ("train", "getVariationsTrain"),
            ("validation", "getVariationsDev"),
        ):
            assert list(jvm.call(method)) == list(items.variations(task, split))


@pytest.mark.jvm
@pytest.mark.parametrize(
    ("task", "simplification"), [("boil", "easy"), ("power-component", "easy"), ("boil", "")]
)
def test_the_commands_are_the_simulator_s(jvm, task, simplification):
    jvm.load(task, 0, simplification)
    listed = {line.strip() for line in jvm.ask("help").splitlines()[1:]}
    known = commands.available(simplification, electrical=task == "power-component")
    verbs = {commands.verb(line.replace("OBJ", "x")) for line in listed - {"reset task", "task"}}
    # `go OBJ` and `teleport OBJ` are listed without their "to".
    assert verbs - {None} | ({"go"} if "go OBJ" in listed else set()) == {c.verb for c in known}


@pytest.mark.jvm
def test_a_bad_variation_is_caught(jvm):
    with pytest.raises(ValueError, match=r"boil.*999"):
        jvm.load("boil", 999, "easy")
    with pytest.raises(ValueError, match="brew"):
        jvm.load("brew", 0, "easy")
    assert jvm.load("boil", 0, "easy").startswith("Your task is to boil")


@pytest.mark.jvm
def test_lists_advance_nothing(jvm):
    jvm.load("find-plant", 0, "easy")
    assert jvm.step("go to greenhouse").score > 0
    moves = jvm.call("getNumMoves")
    for command in commands.META:
        assert jvm.ask(command)
    assert jvm.call("getNumMoves") == moves


@pytest.mark.jvm
def test_a_wrong_focus_is_negative_in_its_own_episode_alone(jvm):
    jvm.load("boil", 0, "easy")
    assert jvm.step("focus on agent")[1:] == (-100, False)
    jvm.load("boil", 0, "easy")
    assert jvm.step("inventory").score >= 0


@pytest.mark.jvm
def test_the_user_s_java_options_are_neither_used_nor_changed(monkeypatch):
    for name in ("JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS", "JDK_JAVA_OPTIONS"):
        monkeypatch.setenv(name, "-Xmx1m -XX:NoSuchOption")
    before = dict(os.environ)
    jvm = Jvm()
    assert jvm.load("boil", 0, "easy")
    jvm.kill()
    assert dict(os.environ) == before


@pytest.mark.jvm
def test_a_call_past_its_deadline_kills_the_jvm():
    jvm = Jvm(deadline=2)
    jvm.load("boil", 0, "easy")
    os.kill(jvm.process.pid, signal.SIGSTOP)
    with pytest.raises(JvmFailed) as error:
        jvm.step("look around")
    assert error.value.reason == "jvm_deadline"
    assert not jvm.alive


@pytest.mark.jvm
def test_a_killed_jvm_fails_its_call():
    jvm = Jvm()
    jvm.process.kill()
    with pytest.raises(JvmFailed) as error:
        jvm.load("boil", 0, "easy")
    assert error.value.reason == "jvm_died"


@pytest.mark.jvm
def test_a_broken_simulator_fails_its_call(jvm):
    """A Java exception is not an observation."""
    broken = Jvm()
    with pytest.raises(JvmFailed) as error:
        broken.call("noSuchMethod")
    assert error.value.reason == "jvm_error"
    assert not broken.alive
    assert jvm.alive


# A pool


@pytest.mark.jvm
def test_a_pool_reuses_waits_recycles_and_closes():
    pool = JvmPool(size=1, recycle_after=2)

    async def episode():
        lease = await pool.lease()
        try:
            await lease.run(lease.jvm.load, "boil", 0, "easy")
            return lease.jvm.process.pid
        finally:
            lease.close()
            lease.close()  # harmless

    async def several():
        return await asyncio.gather(*(episode() for _ in range(3)))

    first = asyncio.run(several())
    second = asyncio.run(episode())  # another event loop
    assert first[0] == first[1] != first[2] == second
    assert len(pool.jvms) <= 1
    assert not is_running(first[0])
    pool.close()
    assert all_gone([*first, second])
    with pytest.raises(RuntimeError, match="closed"):
        asyncio.run(episode())


@pytest.mark.jvm
def test_a_cancelled_call_gives_no_one_its_answer():
    pool = JvmPool(size=1)

    async def run():
        lease = await pool.lease()
        await lease.run(lease.jvm.load, "boil", 0, "easy")
        running = asyncio.create_task(lease.run(lease.jvm.step, "wait"))
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        lease.close()
        lease = await pool.lease()
        start = await lease.run(lease.jvm.load, "melt", 0, "easy")
        lease.close()
        return start

    assert asyncio.run(run()).startswith("Your task is to melt")
    pool.close()


OWNER = """
    import asyncio, os, signal, sys, time
    from rlds_jax.tasks.scienceworld.pool import JvmPool

    pool = JvmPool(size=1)

    async def main():
        lease = await pool.lease()
        print(*(jvm.process.pid for jvm in pool.jvms), flush=True)
        {end}

    {before}
    asyncio.run(main())
"""
SLEEP = "time.sleep(60)"
ENDS = {
    "normal exit": ("pass", "pass", None),
    "exception": ("raise ValueError", "pass", None),
    "SIGTERM": (SLEEP, "pass", signal.SIGTERM),
    "SIGTERM turned into an exit": (
        SLEEP,
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))",
        signal.SIGTERM,
    ),
    "SIGKILL": (SLEEP, "pass", signal.SIGKILL),
    "SIGKILL in a call": (
        "await lease.run(lease.jvm.load, 'mendelian-genetics-known-plant', 0, 'easy', True)",
        "pass",
        signal.SIGKILL,
    ),
    "SIGKILL with a forked child alive": (
        "(os.fork() or time.sleep(20)) and time.sleep(60)",
        "pass",
        signal.SIGKILL,
    ),
}


@pytest.mark.jvm
@pytest.mark.parametrize("how", ENDS)
def test_no_jvm_outlives_its_owner(how):
    end, before, number = ENDS[how]
    code = textwrap.dedent(OWNER).format(end=end, before=before)
    owner = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    assert len(pids) == 1
    if number is not None:
        time.sleep(0.2)
        assert all(is_running(pid) for pid in pids)
        owner.send_signal(number)
    owner.wait(timeout=30)
    owner.stdout.close()
    assert all_gone(pids, seconds=10)


@pytest.mark.jvm
def test_a_forked_child_that_exits_leaves_the_jvm_to_its_parent():
    code = """
    import os, sys
    from rlds_jax.tasks.scienceworld.jvm import Jvm
    jvm = Jvm()
    jvm.load("boil", 0, "easy")
    child = os.fork()
    if not child:
        sys.exit(0)
    os.waitpid(child, 0)
    print(jvm.step("inventory").observation)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=60,
    )
    assert "In your inventory" in done.stdout, done.stderr
