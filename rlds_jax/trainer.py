"""The training loop: one step reads like METHOD section 1."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from rlds_jax import advantages, play, processes, profiling, sharding, update, validation
from rlds_jax import workdir as workdirs
from rlds_jax.batch import Batch, BatchLayout
from rlds_jax.checkpoint import CheckpointConfig, Checkpoints, abstract_like
from rlds_jax.losses import LossConfig
from rlds_jax.metrics import memory_peak, mfu, train_flops
from rlds_jax.models import attention_gate, hub, weights
from rlds_jax.models.qwen3 import Params
from rlds_jax.rollouts import markdown, statistics
from rlds_jax.rollouts.config import RolloutConfig
from rlds_jax.rollouts.context import RolloutContext
from rlds_jax.rollouts.group import run_groups
from rlds_jax.rollouts.timing import PhaseClock
from rlds_jax.rollouts.types import GroupResult, Trajectory
from rlds_jax.run_log import RunLog, SilentLog
from rlds_jax.step_batch import (
    UpdateConfig,
    make_batches,
    mean_metrics,
    without_guidance_everywhere,
)
from rlds_jax.stopping import StopRequested, StopSignals
from rlds_jax.tasks.base import Item, Task, TaskUnavailable
from rlds_jax.update import TrainState
from rlds_jax.validation import ValidationConfig, best, validation_items


class NonfiniteUpdates(RuntimeError):
    """Loss or gradients were not finite for several updates in a row."""


def step_items(items: Sequence[Item], step: int, per_step: int, seed: int) -> list[Item]:
    """The items of a step: a seeded shuffle per epoch, the last partial batch dropped.

    Args:
      step: from 1.

    Raises:
      ValueError: a step asks for more items than there are.
    """
    if not 1 <= per_step <= len(items):
        raise ValueError(
            f"prompts_per_step is {per_step}; it must be in 1..{len(items)}, the training items"
        )
    epoch, index = divmod(step - 1, len(items) // per_step)
    order = np.random.default_rng((seed, epoch)).permutation(len(items))
    return [items[i] for i in order[index * per_step : (index + 1) * per_step]]


def share_metrics(
    task: Task, rows: Sequence[Trajectory], share: Sequence[np.ndarray] | None
) -> dict[str, float]:
    """`subtask/<task>/<name>/share`: mean share of the reward over the graded rows."""
    graded = [
        p for t, p in zip(rows, share or [], strict=share is not None) if t.grades is not None
    ]
    if not graded:
        return {}
    names = [f"subtask/{task.name}/{subtask.name}/share" for subtask in task.subtasks]
    return dict(zip(names, np.mean(graded, axis=0, dtype=float).tolist(), strict=True))


class Trainer:
    """A run: policy, engine, task and log, and the steps between them.

    Args:
      config: see configs/common.py.
      workdir: logs, rollouts and checkpoints go here; a run that is there already goes on from its
        newest checkpoint.
      signals: entered by the caller, so that a signal ends the run between steps.

    Attributes:
      completed: training steps taken.

    Raises:
      OSError: the workdir, a checkpoint or the model directory cannot be used.
      ValueError: a field of the config does not hold; it is named with its remedy.
    """

    def __init__(self, config: ConfigDict, workdir: Path, signals: StopSignals | None = None):
        self.config = config
        self.workdir = workdir
        self.signals = signals or StopSignals()
        for name in ("seed", "steps"):
            if config[name] < 0:
                raise ValueError(f"{name} is {config[name]}; it must not be negative")
        self.traced = profiling.parse_steps(config.profile_steps)
        self.rollout = RolloutConfig(**config.rollout)
        self.advantage = advantages.AdvantageConfig(**config.advantage)
        rows = config.prompts_per_step * (self.rollout.group_size + self.rollout.retry_budget)
        self.advantage = dataclasses.replace(  # the step's bounds: one compilation for all steps
            self.advantage,
            min_rows=max(self.advantage.min_rows, rows),
            min_tokens=max(self.advantage.min_tokens, config.batch.row_length),
        )
        self.settings = UpdateConfig(**config.training)
        self.validation = ValidationConfig(**config.validation)
        self.checkpoint = CheckpointConfig(**config.checkpoint)
        self.layout = BatchLayout(**config.batch)
        self.loss = LossConfig(**config.loss)
        compute = update.ComputeConfig(**config.compute)
        optimizer = update.OptimizerConfig(**config.optimizer)
        transform = update.make_optimizer(optimizer)
        play.reserve_devices(config)
        self.mesh = mesh = sharding.make_mesh(**config.mesh)
        check_lengths(self.rollout, config.engine.max_context, self.layout.row_length)
        source = hub.local_directory(config.model.path)
        with contextlib.ExitStack() as opened:  # closed again if anything here fails
            self.task = play.make_task(config.task)
            opened.callback(self.task.close)
            self.train_items = self.task.items("train")
            step_items(self.train_items, 1, config.prompts_per_step, config.seed)
            self.validation_items = validation_items(self.task, self.validation)
            claim = functools.partial(workdirs.claim, workdir, config)
            opened.enter_context(processes.first(claim, contextlib.nullcontext))
            workdirs.keep_compilations(workdir)
            self.checkpoints = Checkpoints(workdir / "checkpoints", self.checkpoint.keep)
            opened.callback(self.checkpoints.close)
            self.model = weights.load_config(source)
            sharding.check_mesh(self.model, mesh, self.layout.rows)
            attention = attention_gate.choose(compute.attention, self.model, compute.dtype)
            self.compute = compute = dataclasses.replace(compute, attention=attention)
            shardings = update.state_shardings(self.model, transform, mesh)
            _, params = weights.load(source, jnp.float32, shardings.params)
            self.reference = self._reference(params, compute.dtype)
            self._restore(params, transform, shardings)
            opened.callback(self.log.close)
            self.context = play.make_context(
                config,
                self.task,
                source,
                self.model,
                self._whole_params(),
                version=self.completed,
                workdir=workdir,
            )
            self.engine = self.context.engine
            opened.callback(self.engine.close)
            self._opened = opened.pop_all()
        several = self.settings.epochs * self.settings.minibatches > 1
        self._update = update.make_update(
            self.model, optimizer, self.loss, compute, mesh, with_old_logprobs=several
        )
        self._logprobs = update.make_logprobs(self.model, compute, mesh) if several else None

    def _reference(self, params: Params, dtype: str) -> Params | None:
        """The frozen reference policy, kept as its forward computes, or None without a KL."""
        if not self.loss.needs_reference:
            return None
        return jax.tree.map(functools.partial(jnp.array, dtype=dtype, copy=True), params)

    def _restore(self, params: Params, transform: Any, shardings: TrainState) -> None:
        """Sets state, steps completed and log: of the newest checkpoint, else of step 0."""
        key = jax.random.key(self.config.seed)
        fresh = functools.partial(update.init_state, optimizer=transform, rng=key)
        abstract = jax.eval_shape(fresh, params)
        found = self.checkpoints.restore(abstract_like(abstract, shardings))
        restored = None if found is None else found.step
        log = functools.partial(RunLog, self.workdir, self.config, restored)
        self.log: RunLog = processes.first(log, SilentLog)
        self.log.validations = processes.gather(self.log.validations)[0]
        if found is None:
            place = jax.jit(fresh, out_shardings=shardings, donate_argnums=0)
            self.state = place(params)
            self.completed, self._nonfinite = 0, 0
        else:
            self.state = found.state
            self.completed, self._nonfinite = found.step, found.extra["nonfinite"]

    def run(self) -> None:
        """Every step that is left, with validations and checkpoints between them.

        Step n is the n-th; validation at step n is of the policy after n steps, 0 of the untrained.

        Raises:
          StopRequested, TaskUnavailable: by a signal, or because the task cannot go on; the last
            completed step is saved.
        """
        steps = self.config.steps
        if self.completed >= steps:
            self.log.say(f"{self.completed} of {steps} steps are done; nothing is left to train")
        else:
            after = f"goes on after step {self.completed}; " if self.completed else ""
            self.log.say(f"{after}the first step compiles and takes longer than the others")
        try:
            self._settle()
            while self.completed < steps:
                step = self.completed + 1
                with profiling.trace(step, self.traced, self.workdir / "tensorboard"):
                    self.step(step)
                self._settle()
        except (StopRequested, TaskUnavailable):
            self.save()
            raise
        finally:
            self.checkpoints.wait()

    def _settle(self) -> None:
        """Validates and saves the state as it is now, where that is due."""
        step = self.completed
        self.validate_if_due(step)
        found = best(self.log.validations)
        if self.checkpoint.due(step, self.config.steps) or (found and found["step"] == step):
            self.save()
        self.checkpoints.check()

    def save(self) -> None:
        """Saves the state after the last completed step."""
        found = best(self.log.validations)
        best_step = found["step"] if found else None
        self.checkpoints.save(self.completed, self.state, best_step, nonfinite=self._nonfinite)

    def close(self) -> None:
        self._opened.close()

    def step(self, step: int) -> dict[str, float]:
        """One training step; returns its metrics, which are logged too.

        Args:
          step: from 1.

        Raises:
          NonfiniteUpdates: too many updates in a row had to be skipped.
        """
        started = time.perf_counter()
        groups, metrics = self.rollouts(step)
        trained = without_guidance_everywhere(groups) if self.settings.clean_retries else groups
        rows = [t for group in trained for t in group.trajectories]
        phi = [[subtask.weight for subtask in self.task.subtasks]] * len(rows)
        estimate = advantages.estimate(rows, phi, self.rollout.condition, self.advantage)
        self._record(step, groups, estimate)
        batches, pair_metrics = make_batches(trained, estimate, self.settings, self.layout)
        metrics |= estimate.metrics | pair_metrics | share_metrics(self.task, rows, estimate.share)
        self.engine.sleep()
        metrics |= self.optimise(step, batches)
        metrics |= self.sync(step)
        metrics |= self.engine.metrics()
        metrics |= self._performance(groups, time.perf_counter() - started, metrics)
        self._report(step, metrics)
        self.completed = step
        return metrics

    def rollouts(self, step: int) -> tuple[list[GroupResult], dict[str, float]]:
        """Samples, grades, reflects and retries: 1 to 5 of METHOD section 1."""
        config = self.config
        items = step_items(self.train_items, step, config.prompts_per_step, config.seed)
        context = dataclasses.replace(self.context, clock=PhaseClock())
        groups = self._play(context, items, step)
        return groups, statistics.rollout_metrics(groups, self.task, context.clock.seconds())

    def _play(self, context: RolloutContext, items: Sequence[Item], step: int) -> list[GroupResult]:
        """The groups of all items; each process plays its share."""

        def play_share() -> list[GroupResult]:
            return self.signals.run(run_groups(context, items, step, processes.share(len(items))))

        return processes.interleave(processes.agree(play_share))

    def validate_if_due(self, step: int) -> None:
        """Scores the policy after `step` steps on the validation items, unless that is logged."""
        done = any(record["step"] == step for record in self.log.validations)
        if done or not self.validation.due(step, self.config.steps):
            return
        started = time.perf_counter()
        context = validation.plain(self.context, self.validation)
        groups = self._play(context, self.validation_items, step=0)
        outcome = validation.score(self.validation_items, groups, self.validation)
        self.engine.metrics()  # a training step's are of that step alone
        seconds = {"timing_s/validation": time.perf_counter() - started}
        self.log.validation(step, self.task.name, outcome, seconds)

    def optimise(self, step: int, batches: Sequence[Batch]) -> dict[str, float]:
        """The optimizer steps on a step's batches: 7 of METHOD section 1.

        All are dispatched before the host waits for the first; nothing moves between host and
        devices but the batches, before, and the metrics, after.

        Raises:
          NonfiniteUpdates: too many updates in a row had to be skipped.
        """
        started = time.perf_counter()
        placed = [update.put_batch(batch, self.mesh) for batch in batches]
        outcomes = []
        with jax.transfer_guard("disallow"):
            if self._logprobs is not None:
                placed = [
                    dataclasses.replace(each, old_logprobs=self._logprobs(self.state.params, each))
                    for each in placed
                ]
            for batch in placed * self.settings.epochs:
                self.state, outcome = self._update(self.state, self.reference, batch)
                outcomes.append(outcome)
        metrics = [
            self._checked(step, batch, update.metrics(outcome))
            for batch, outcome in zip([*batches] * self.settings.epochs, outcomes, strict=True)
        ]
        return mean_metrics(metrics) | {"timing_s/update": time.perf_counter() - started}

    def sync(self, version: int) -> dict[str, float]:
        """Gives the engine the new weights."""
        started = time.perf_counter()
        self.engine.update_weights(self._whole_params(), version)
        return {"timing_s/sync": time.perf_counter() - started}

    def _whole_params(self) -> Params:
        return processes.whole(self.state.params, self.mesh, self.compute.dtype)

    def _checked(self, step: int, batch: Batch, metrics: dict[str, float]) -> dict[str, float]:
        """The finite metrics of an update; stops the run after too many skipped ones in a row."""
        self._nonfinite = self._nonfinite + 1 if metrics["actor/update_nonfinite"] else 0
        if self._nonfinite >= self.settings.max_nonfinite:
            path = self.workdir / f"nonfinite_batch_step{step}.npz"
            fields: dict[str, Any] = {k: v for k, v in vars(batch).items() if v is not None}
            processes.first(lambda: np.savez(path, **fields), lambda: None)
            raise NonfiniteUpdates(
                f"step {step}: loss or gradient was not finite in {self._nonfinite} updates in a "
                f"row; none was applied. The batch is in {path}; a lower "
                "optimizer.learning_rate or compute.dtype=float32 often helps"
            )
        return {name: value for name, value in metrics.items() if math.isfinite(value)}

    def _performance(
        self, groups: Sequence[GroupResult], seconds: float, metrics: dict[str, float]
    ) -> dict[str, float]:
        lengths = [len(t.tokens) for group in groups for t in group.trajectories]
        named = {
            "perf/time_per_step": seconds,
            "perf/total_num_tokens": float(sum(lengths)),
            "perf/throughput": sum(lengths) / seconds / jax.device_count(),
        }
        utilisation = mfu(train_flops(self.model, lengths), metrics["timing_s/update"])
        if utilisation is not None:
            named["perf/mfu"] = utilisation
        peak = memory_peak()
        if peak is not None:
            named["perf/max_memory_allocated_gb"] = peak / 2**30
        return named

    def _report(self, step: int, metrics: dict[str, float]) -> None:
        self.log.scalars(step, metrics)
        self.log.progress(metrics)
        if metrics.get("sdae/fallback_group_rate") == 1:
            self.log.say(
                f"step {step}: no group had enough grades, so all fell back to GRPO; "
                "grader/ungraded/* in TensorBoard says why"
            )

    def _record(
        self, step: int, groups: Sequence[GroupResult], estimate: advantages.StepAdvantages
    ) -> None:
        """Logs the rollouts and their credit; called before packing and the update can fail."""
        credit = iter(estimate.credit)
        by_group = [
            [
                statistics.trajectory_record(t, group, self.task.subtasks) | next(credit)._asdict()
                for t in group.trajectories
            ]
            for group in groups
        ]
        self.log.rollouts(step, (record for records in by_group for record in records))
        self.log.text(step, "rollouts/sample", markdown.group(markdown.sample(by_group)))
        trained = [a[mask] for a, mask in zip(estimate.token, estimate.loss_mask, strict=True)]
        self.log.histogram(step, "sdae/token_advantage", np.concatenate(trained))


def check_lengths(rollout: RolloutConfig, max_context: int, row_length: int) -> None:
    """The engine and the rows hold every sequence of a step (DESIGN "The one data path").

    Raises:
      ValueError: they do not.
    """
    longest = rollout.max_prompt_tokens + rollout.max_guidance_tokens + rollout.max_response_tokens
    if max_context < longest + rollout.max_judge_tokens:
        raise ValueError(
            f"engine.max_context is {max_context}; a judge reads a rollout of up to {longest} "
            f"tokens and writes {rollout.max_judge_tokens}: raise it to their sum, or lower "
            "rollout.max_prompt_tokens, max_guidance_tokens, max_response_tokens or "
            "max_judge_tokens"
        )
    if row_length < max_context:
        raise ValueError(
            f"batch.row_length is {row_length}, below engine.max_context {max_context}; a row "
            "must hold the longest sequence"
        )
