"""One ScienceWorld episode."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from rlds_jax.tasks.base import EpisodeError, StepResult
from rlds_jax.tasks.scienceworld import commands, texts
from rlds_jax.tasks.scienceworld.jvm import Jvm, JvmFailed
from rlds_jax.tasks.scienceworld.pool import JvmPool, Lease
from rlds_jax.tasks.scienceworld.reward import PlayedTurn, reward

MAX_REPEATS = 3  # the same action this many turns running ends an episode
_START_ATTEMPTS = 3

T = TypeVar("T")


class _Reply(NamedTuple):
    """What became of one action, before the episode's own rules."""

    text: str
    verb: str | None = None
    over: str | None = None
    rejected: bool = False


class ScienceWorldEnvironment:
    """One episode on one variation of a task.

    Args:
      pool: where its JVM comes from, and goes back to on `close`.
      task, variation, simplification: as the simulator takes them.
      max_turns: turns of the policy; the simulator's own limit is not used.

    Attributes:
      turns: what was played, for the reward.
    """

    def __init__(
        self, pool: JvmPool, task: str, variation: int, simplification: str, max_turns: int
    ):
        self.turns: list[PlayedTurn] = []
        self._pool = pool
        self._item = task, variation, simplification
        self._max_turns = max_turns
        electrical = "power-component" in task or "conductivity" in task
        self._commands = commands.available(simplification, electrical)
        self._actions: list[str | None] = []
        self._rejected = 0
        self._score = 0
        self._pending: str | None = None  # verb of a command that the simulator asks back about
        self._asked = False
        self._lease: Lease | None = None
        self._done = True

    async def reset(self) -> str:
        """Starts the episode, on another JVM where one fails to.

        Raises:
          EpisodeError: no JVM could.
          JavaMissing, ValueError: see `Jvm`.
        """
        await self.close()
        self.turns, self._actions = [], []
        self._rejected, self._score = 0, 0
        self._pending, self._asked = None, False
        for attempt in itertools.count(1):
            try:
                self._lease = await self._pool.lease()
                start = await self._lease.run(self._lease.jvm.load, *self._item)
                break
            except JvmFailed as error:
                await self.close()
                if attempt == _START_ATTEMPTS:
                    raise EpisodeError(error.reason) from error
        self._done = False
        return start

    async def step(self, text: str) -> StepResult:
        """Plays one turn.

        Raises:
          EpisodeError: the JVM died, overran its deadline, or its simulator broke down.
          RuntimeError: the episode has ended or was never reset.
        """
        if self._done:
            raise RuntimeError("ScienceWorld: step on an ended episode; call reset first")
        action = commands.parse_action(text)
        reply = await self._reply(action)
        self._actions.append(action)
        self._rejected += reply.rejected
        self.turns.append(PlayedTurn(self._score, commands.thinks(text), reply.verb))
        ended_by = reply.over or self._limit()
        if ended_by:
            return self._end(ended_by, reply.text)
        left = self._max_turns - len(self.turns)
        return StepResult(f"{reply.text}\n\n{texts.reminder(left)}", score=self._score)

    async def conclude(self, ended_by: str) -> StepResult:
        return self._end(ended_by)

    async def restore(self, turns: Sequence[tuple[str, str]]) -> None:
        """Raises RuntimeError: this task replays by execution."""
        raise RuntimeError("ScienceWorld replays by execution; step through the turns instead")

    async def close(self) -> None:
        self._done = True
        if self._lease is not None:
            self._lease.close()
            self._lease = None

    @property
    def _jvm(self) -> Jvm:
        assert self._lease is not None
        return self._lease.jvm

    async def _reply(self, action: str | None) -> _Reply:
        if action is None:
            return _Reply(texts.NO_ACTION, rejected=True)
        if commands.is_reset(action):
            return _Reply(texts.BLOCKED, rejected=True)
        if action.lower() in commands.META:
            return _Reply(_without_reset(await self._call(self._jvm.ask, action)))
        asked, self._asked = self._asked, False
        answer = await self._call(self._jvm.step, action)
        self._score = answer.score
        over = "completed" if answer.completed else "wrong_focus" if answer.score < 0 else None
        verdict = commands.verdict(answer.observation)
        if verdict == "accepted":
            verb = self._pending if asked else commands.verb(action)
            return _Reply(answer.observation, verb, over)
        if verdict == "ambiguous":
            self._pending, self._asked = commands.verb(action), True
            return _Reply(f"{answer.observation}\n{texts.CHOOSE}", over=over, rejected=True)
        fitting = commands.that_fit(action, self._commands)
        text = f"{answer.observation}\n{texts.rejection(fitting)}"
        return _Reply(text, over=over, rejected=True)

    async def _call(self, method: Callable[..., T], *args: Any) -> T:
        assert self._lease is not None
        try:
            return await self._lease.run(method, *args)
        except JvmFailed as error:
            self._done = True
            raise EpisodeError(error.reason) from error

    def _limit(self) -> str | None:
        """The episode's own reason to end, if it has one."""
        last = self._actions[-MAX_REPEATS:]
        same = {None if action is None else commands.canonical(action) for action in last}
        if len(last) == MAX_REPEATS and len(same) == 1 and None not in same:
            return "repeated"
        return "max_turns" if len(self.turns) >= self._max_turns else None

    def _end(self, ended_by: str, said: str = "") -> StepResult:
        self._done = True
        terms = reward(self.turns, self._item[0])
        ending = texts.ending(ended_by, self.turns, self._actions)
        return StepResult(
            observation=f"{said}\n\n{ending}" if said else ending,
            done=True,
            reward=terms.total,
            success=terms.base == 1,
            ended_by=ended_by,
            score=self._score,
            metrics={
                "score": 100 * terms.base,
                "rejected_turns": self._rejected,
                **{f"reward_{name}": value for name, value in terms._asdict().items()},
            },
        )


def _without_reset(listing: str) -> str:
    """A list of commands, less the one that is blocked."""
    return "\n".join(line for line in listing.splitlines() if line.strip() != "reset task")
