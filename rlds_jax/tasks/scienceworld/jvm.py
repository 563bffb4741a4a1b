"""One JVM that runs the simulator, and the few calls an episode makes of it."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

try:
    from py4j.java_gateway import (
        GatewayClient,
        GatewayConnection,
        GatewayParameters,
        JavaGateway,
        find_jar_path,
    )
    from py4j.protocol import Py4JError, Py4JNetworkError
    from scienceworld.constants import JAR_PATH
except ImportError as error:
    raise ImportError(
        f"{error}; ScienceWorld needs its simulator: pip install 'rlds_jax[scienceworld]'"
    ) from error

OLDEST_JAVA = 11
_INSTALL = (
    f"ScienceWorld needs Java {OLDEST_JAVA} or later: install it (apt-get install "
    "openjdk-17-jre-headless, brew install openjdk@17) or point JAVA_HOME at one"
)
_SMALL = (
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-XX:-UsePerfData",  # no file in the temporary directory to outlive a kill
    "-XX:+ExitOnOutOfMemoryError",
)
# Identity hashes order the simulator's hash maps, and by default depend on the JVM's past.
_DETERMINISTIC = ("-XX:+UnlockExperimentalVMOptions", "-XX:hashCode=2")
_UNKNOWN = "Unknown action."  # where the simulator has nothing to say
_OTHER_OPTIONS = ("_JAVA_OPTIONS", "JDK_JAVA_OPTIONS")  # both would override JAVA_TOOL_OPTIONS

logging.getLogger("py4j").setLevel(logging.WARNING)  # it reports every killed JVM in a traceback


class JavaMissing(RuntimeError):
    """There is no Java, or none that runs the simulator; says how to install one."""


class JvmFailed(Exception):
    """The JVM died, overran its deadline or broke down; it has been killed. `reason` is counted."""

    def __init__(self, reason: str, message: str):
        super().__init__(f"{reason}: {message}")
        self.reason = reason


class Answer(NamedTuple):
    """What the simulator answers to one command.

    Attributes:
      observation: its text.
      score: -100..100 after the command; negative means a wrong focus has ended the task.
      completed: the task is done.
    """

    observation: str
    score: int
    completed: bool


class _OneConnection(GatewayClient):
    """One connection for life. py4j's own client sends a command again on a new connection when
    an answer is missing, which would act twice, and prints a traceback for every killed JVM."""

    def __init__(self, parameters: GatewayParameters):
        super().__init__(gateway_parameters=parameters)
        self.connection = GatewayConnection(parameters)
        self.connection.start()

    def send_command(self, command: str, retry: bool = True, binary: bool = False) -> str:
        return self.connection.send_command(command)


class Jvm:
    """A JVM with one simulator. Not thread-safe; `kill` may come from any thread.

    It ends with this process, however that ends: its standard input is a pipe from here, and it
    exits when the pipe breaks. It is in a session of its own, so that Ctrl-C reaches the trainer
    alone.

    Args:
      deterministic: identical episodes whatever the JVM and its past.
      deadline: seconds one call may take.
      heap_mb: an episode needs less than the default; working out a solution may need more.

    Attributes:
      episodes: loads so far.
      memory: bytes resident now.

    Raises:
      JavaMissing: there is no Java, or it is too old.
      JvmFailed: the JVM did not start in `start_deadline` seconds.
    """

    start_deadline = 120.0

    def __init__(self, deterministic: bool = True, deadline: float = 60.0, heap_mb: int = 128):
        self.episodes = 0
        self._socket: Any = None
        self._agent: Any = None
        with tempfile.TemporaryFile() as stderr:
            self.process = subprocess.Popen(
                [_java(), "-cp", f"{find_jar_path()}{os.pathsep}{JAR_PATH}"]
                + ["py4j.GatewayServer", "--die-on-broken-pipe", "--enable-auth", "0"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                cwd=os.path.dirname(JAR_PATH),  # it reads a table of types there
                env=_environment(
                    f"-Xmx{heap_mb}m", *_SMALL, *(_DETERMINISTIC if deterministic else ())
                ),
                start_new_session=True,
            )
            _LIVE.add(self)
            timer = threading.Timer(self.start_deadline, self.process.kill)
            timer.start()
            try:
                self._connect(deadline)
            except (Py4JError, OSError, ValueError) as error:
                self.kill()
                stderr.seek(0)
                said = stderr.read().decode(errors="replace").strip()[-2000:]
                if "UnsupportedClassVersionError" in said or "Unrecognized" in said:
                    raise JavaMissing(f"{_INSTALL}; Java said: {said}") from error
                raise JvmFailed("jvm_start", f"{error}; Java said: {said}") from error
            except BaseException:
                self.kill()
                raise
            finally:
                timer.cancel()

    def _connect(self, deadline: float) -> None:
        stdout = self.process.stdout
        assert stdout is not None
        port, token = int(stdout.readline()), stdout.readline().decode().strip()
        parameters = GatewayParameters(
            port=port,
            auth_token=token,
            read_timeout=self.start_deadline,
            enable_memory_management=False,
        )
        client = _OneConnection(parameters)
        self._socket = client.connection.socket
        gateway = JavaGateway(gateway_parameters=parameters)
        gateway.set_gateway_client(client)
        java = gateway.jvm.java
        check_java(java.lang.System.getProperty("java.specification.version"))
        # The simulator prints pages at every step; a pipe that nobody reads would stop it.
        java.lang.System.setOut(java.io.PrintStream(java.io.OutputStream.nullOutputStream()))
        stdout.close()
        self._server = gateway.jvm.scienceworld.runtime.pythonapi.PythonInterface()
        self._socket.settimeout(deadline)

    def call(self, method: str, *args: Any) -> Any:
        """Calls a method of the simulator's Python interface.

        Raises:
          JvmFailed: it cannot go on, and has been killed.
        """
        with self._killing():
            return getattr(self._server, method)(*args)

    @contextlib.contextmanager
    def _killing(self) -> Iterator[None]:
        """Kills the JVM when a call to it fails."""
        try:
            yield
        except (Py4JError, OSError) as error:
            raise self._failed(_reason(error), str(error)) from error
        except BaseException:  # an answer that is still to come must not be taken for the next
            self.kill()
            raise

    def load(self, task: str, variation: int, simplification: str, gold: bool = False) -> str:
        """Starts an episode; returns the task, the room and the inventory as text.

        Args:
          gold: let the simulator work out a solution, for `gold_path`; slow.

        Raises:
          JvmFailed: as `call`.
          ValueError: the simulator does not know the task or the variation.
        """
        self.episodes += 1
        said = self.call("load", task, variation, simplification, gold)
        parts = [
            self.call(method).strip()
            for method in ("getTaskDescription", "freeActionLook", "freeActionInventory")
        ]
        if wrong := next((text for text in (said, *parts) if text.startswith("ERROR:")), None):
            raise ValueError(f"ScienceWorld task {task!r}, variation {variation}: {wrong}")
        self._agent = self.call("agentInterface").get()
        return "\n\n".join(parts)

    def step(self, command: str) -> Answer:
        """Sends one command.

        It goes past the Python interface, which describes room, inventory and everything in sight
        at each step for a history that nobody reads, and keeps its score beyond the episode.

        Raises:
          JvmFailed: as `call`, and when the simulator itself broke down.
        """
        with self._killing():
            answer = self._agent.step(command)
            observation, score, completed = answer._1(), answer._2(), answer._3()
            broken = score < 0 and self._agent.isInErrorState()
        if broken:
            raise self._failed("simulator_error", observation)
        return Answer(observation.strip() or _UNKNOWN, round(100 * score), completed)

    def ask(self, command: str) -> str:
        """Sends a command that lists something and changes nothing."""
        return self.call("step", command).strip()

    def gold_path(self) -> list[str]:
        """The solution worked out by `load(..., gold=True)`."""
        return list(self.call("getGoldActionSequence"))

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def memory(self) -> int:
        with open(f"/proc/{self.process.pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def kill(self) -> None:
        """Ends the JVM at once; a call in flight raises JvmFailed."""
        _LIVE.discard(self)
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _failed(self, reason: str, message: str) -> JvmFailed:
        self.kill()
        return JvmFailed(reason, message)

    def _forget(self) -> None:
        """In a forked child: lets go of what would keep the JVM alive when its owner dies."""
        for end in (self.process.stdin, self._socket):
            if end is not None:
                end.close()


_LIVE: weakref.WeakSet[Jvm] = weakref.WeakSet()


def _forget_all() -> None:
    for jvm in list(_LIVE):
        jvm._forget()
    _LIVE.clear()


os.register_at_fork(after_in_child=_forget_all)


def check_java(version: str) -> None:
    """Raises JavaMissing for a java.specification.version ("1.8", "17") that is too old."""
    major = int(version.removeprefix("1.").partition(".")[0])
    if major < OLDEST_JAVA:
        raise JavaMissing(f"{_INSTALL}; this is Java {major}")


def _reason(error: Exception) -> str:
    """What a failed call is counted under."""
    if isinstance(getattr(error, "cause", None), TimeoutError):
        return "jvm_deadline"
    return "jvm_died" if isinstance(error, Py4JNetworkError | OSError) else "jvm_error"


def _java() -> str:
    home = os.environ.get("JAVA_HOME")
    java = shutil.which(os.path.join(home, "bin", "java") if home else "java")
    if java is None:
        raise JavaMissing(f"{_INSTALL}; no java was found in {home or 'PATH'}")
    return java


def _environment(*options: str) -> dict[str, str]:
    """This process's environment with the JVM's options, which take the place of the user's own."""
    own = {name: value for name, value in os.environ.items() if name not in _OTHER_OPTIONS}
    return own | {"JAVA_TOOL_OPTIONS": " ".join(options)}
