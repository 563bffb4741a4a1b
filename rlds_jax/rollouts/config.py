"""Settings of the rollout phase; defaults are METHOD's, sizes those of FrozenLake (section 5)."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, get_args

Condition = Literal["rlvr", "base_reflection", "rlds"]


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """One step's rollouts (METHOD sections 1 and 4).

    Attributes:
      condition: "rlvr" plays only; "base_reflection" and "rlds" reflect and retry.
      group_size: G, originals per prompt.
      retry_budget: R, most retries per group.
      retry_fraction: most retries per failure, rounded up.
      max_prompt_tokens: longest initial prompt, without guidance.
      max_response_tokens: everything after it, without guidance.
      max_turn_tokens: most tokens per turn; None leaves only the response limit.
      temperature: of the actor, and of the judges where they have none of their own.
      grader_temperature, reflector_temperature: None takes `temperature`.
      max_judge_tokens: longest answer of the grader and the reflector.
      max_guidance_tokens: guidance is cut to this.
      two_pass: grade before reflecting; False is for base_reflection only.
      grade_retries: base_reflection grades retries too, for diagnostics; rlds always does.
      env_error: what an error that the task defines as an ending does with its row.
      memory: lessons shown to every reflector; empty leaves the section out.
      contrast: show the reflector the best sibling, where one did better.
      constrained_json: sample the judges under their JSON schemas.
      prompts_dir: directory with replacements of the built-in prompts.
      max_environments: most environments alive at once.

    Raises:
      ValueError: naming the field and what it may be.
    """

    condition: Condition = "rlds"
    group_size: int = 6
    retry_budget: int = 3
    retry_fraction: float = 0.5
    max_prompt_tokens: int = 1024
    max_response_tokens: int = 4096
    max_turn_tokens: int | None = None
    temperature: float = 0.7
    grader_temperature: float | None = None
    reflector_temperature: float | None = None
    max_judge_tokens: int = 2048
    max_guidance_tokens: int = 512
    two_pass: bool = True
    grade_retries: bool = False
    env_error: Literal["keep", "drop"] = "keep"
    memory: str = ""
    contrast: bool = False
    constrained_json: bool = False
    prompts_dir: str | None = None
    max_environments: int = 1024

    def __post_init__(self):
        conditions = get_args(Condition)
        _require(self.condition in conditions, "condition", self.condition, f"one of {conditions}")
        _require(self.env_error in ("keep", "drop"), "env_error", self.env_error, "keep or drop")
        for name in (
            "group_size",
            "max_prompt_tokens",
            "max_response_tokens",
            "max_judge_tokens",
            "max_guidance_tokens",
            "max_environments",
        ):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        _require(self.retry_budget >= 0, "retry_budget", self.retry_budget, "at least 0")
        _require(0 < self.retry_fraction <= 1, "retry_fraction", self.retry_fraction, "in (0, 1]")
        turn = self.max_turn_tokens
        _require(turn is None or turn >= 1, "max_turn_tokens", turn, "None or at least 1")
        finite = 0 < self.temperature < math.inf
        _require(finite, "temperature", self.temperature, "above 0 and finite")
        for name in ("grader_temperature", "reflector_temperature"):
            value = getattr(self, name)
            holds = value is None or 0 < value < math.inf
            _require(holds, name, value, "None, or above 0 and finite")
        if not self.two_pass and self.condition == "rlds":
            raise ValueError("rollout.two_pass=False gives rlds no grades; use base_reflection")
        if self.grade_retries and self.condition == "base_reflection" and not self.two_pass:
            raise ValueError("rollout.grade_retries needs two_pass=True: there is no grading pass")

    def validation(self) -> RolloutConfig:
        """One plain rollout per item (METHOD section 4, Validation)."""
        return dataclasses.replace(self, condition="rlvr", group_size=1, grade_retries=False)

    @property
    def reflects(self) -> bool:
        """Whether failures are reflected on and retried."""
        return self.condition != "rlvr" and self.retry_budget > 0

    @property
    def grades_originals(self) -> bool:
        return self.condition == "rlds" or (self.condition == "base_reflection" and self.two_pass)

    @property
    def grades_retries(self) -> bool:
        return self.condition == "rlds" or (self.condition != "rlvr" and self.grade_retries)


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise ValueError(f"rollout.{name} is {value!r}; it must be {allowed}")
