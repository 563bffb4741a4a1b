"""The real vLLM on a CPU: the same log-probabilities, weights in sync, schemas, recovery.

Needs the environment of `make sidecar`; $RLDS_SIDECAR_PYTHON names another interpreter. Sidecars
take long to start, so the tests share them; each leaves them as it found them.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from small_engine import CONFIG, random_params
from transformers import AutoTokenizer
from vllm_doubles import LEAKY, SIDECAR_PYTHON, make_engine, run_instead, sample

from configs import frozenlake
from rlds_jax.models import weights
from rlds_jax.rollouts.engines.parity import ParityError, ParityGate
from rlds_jax.trainer import Trainer

pytestmark = pytest.mark.vllm

TINY = Path(str(resources.files("rlds_jax") / "models" / "tiny"))
UNTIED = dataclasses.replace(CONFIG, vocab_size=1492, tie_embeddings=False, num_kv_heads=4)
SCHEMA = {
    "type": "object",
    "properties": {
        "outcome": {"enum": ["success", "failure"]},
        "scores": {
            "type": "array",
            "items": {"type": "integer", "minimum": 1, "maximum": 5},
            "minItems": 3,
            "maxItems": 3,
        },
        "note": {"type": "string", "maxLength": 12},
    },
    "required": ["outcome", "scores", "note"],
    "additionalProperties": False,
}


TIED_ALONE = pytest.mark.parametrize("real", ["tied"], indirect=True)


class Real:
    """An engine over real sidecars, and what it takes to test it."""

    def __init__(self, engine, config, faults, version=0):
        self.engine, self.config, self.faults, self.version = engine, config, faults, version

    def update(self, seed):
        """Random weights; logits far from uniform."""
        params = random_params(seed, self.config)
        scaled = {name: 8 * params[name] for name in ("embed", "lm_head") if name in params}
        self.params, self.version = params | scaled, self.version + 1
        self.engine.update_weights(self.params, self.version)

    def parity(self):
        found = ParityGate(self.config, "float32", "float32")(self.engine, self.params)
        return found["engine/parity_max"]


@pytest.fixture(scope="module", params=["tied", "untied"])
def real(request, tmp_path_factory):
    """Two replicas of the demo's tied policy, after two steps of training; an untied model."""
    faults = tmp_path_factory.mktemp("faults")
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as opened:
        patch.setenv("RLDS_TEST_FAULTS", str(faults))
        run_instead(LEAKY, patch)
        if request.param == "tied":
            trainer = opened.enter_context(contextlib.closing(trained(tmp_path_factory)))
            found = Real(trainer.engine, trainer.model, faults, trainer.completed)
            found.trainer = trainer
        else:
            folder = tmp_path_factory.mktemp("model")
            weights.save(random_params(0, UNTIED), UNTIED, folder, source=TINY)
            engine = make_engine(
                folder,
                params=random_params(0, UNTIED),
                model=folder,
                config=UNTIED,
                python=SIDECAR_PYTHON,
                start_timeout_s=300.0,
                request_timeout_s=120.0,
            )
            found = Real(opened.enter_context(contextlib.closing(engine)), UNTIED, faults)
        found.update(seed=1)
        yield found


def trained(tmp_path_factory):
    config = frozenlake.get_config("tiny,vllm")
    config.update(steps=2, prompts_per_step=2)
    config.validation.num_items = 8
    config.engine.update(python=SIDECAR_PYTHON, replicas=2)
    trainer = Trainer(config, tmp_path_factory.mktemp("run"))
    trainer.metrics = [trainer.step(1), trainer.step(2)]
    return trainer


@TIED_ALONE
def test_a_run_with_two_replicas(real):
    """Two steps of FrozenLake: gates pass, both replicas work, sampler and trainer agree."""
    first, second = real.trainer.metrics
    for step in (first, second):
        assert step["rollout_corr/logprob_diff_max"] < 1e-3
        assert step["rollout_corr/rollout_is_truncated"] == 0
        assert step["engine/restarts"] == 0
        assert step["timing_s/sync"] > 0
        assert np.isfinite(step["actor/grad_norm"])
    assert first["engine/parity_max"] < 1e-3
    assert "engine/parity_max" not in second
    assert all((real.trainer.workdir / f"sidecar_0_{i}.log").exists() for i in (0, 1))


def test_logprobs_are_the_trainers_and_updates_are_seen_at_once(real):
    for seed in (2, 3):
        assert real.parity() < 1e-4
        assert asyncio.run(sample(real.engine, [5] * 300)).weight_version == real.version
        real.update(seed)
    assert real.parity() < 1e-4


@pytest.mark.parametrize("leak", ["keep_prefixes", "keep_head"])
def test_the_gate_stops_an_update_that_leaves_something_stale(real, leak):
    """Of an untied model there is no stale head to find."""
    assert real.parity() < 1e-4  # and its prompts are cached now
    (real.faults / leak).touch()
    real.update(11)
    if leak == "keep_head" and real.config is UNTIED:
        real.parity()
    else:
        with pytest.raises(ParityError, match=r"max difference .* the first is token \d+ of probe"):
            real.parity()
    (real.faults / leak).unlink()
    real.update(12)
    assert real.parity() < 1e-4


@TIED_ALONE
def test_more_prompts_than_one_step_takes(real):
    """A seeded request must not be prefilled in parts: vLLM 0.32 dies of it on a CPU."""

    async def many():
        work = (sample(real.engine, [i + 5] * 300, 4, seed=i) for i in range(32))
        return await asyncio.gather(*work)

    assert all(len(c.ids) == 4 for c in asyncio.run(many()))
    assert real.engine.metrics()["engine/restarts"] == 0


@TIED_ALONE
def test_seed_temperature_and_stop_ids(real):
    prompt = list(range(3, 40))

    async def draws():
        seeds = (2**62 + 1, 2**62 + 1, 2**62 + 2)
        drawn = [await sample(real.engine, prompt, 24, seed=seed) for seed in seeds]
        stop = int(drawn[0].ids[7])
        drawn.append(await sample(real.engine, prompt, 24, seed=seeds[0], stop_ids=[stop]))
        drawn.append(await sample(real.engine, prompt, 24, temperature=0.0))
        return drawn

    first, same, other, stopped, greedy = asyncio.run(draws())
    np.testing.assert_array_equal(first.ids, same.ids)
    assert first.ids.tolist() != other.ids.tolist()
    count = first.ids.tolist().index(first.ids[7]) + 1
    assert stopped.ids.tolist() == first.ids[:count].tolist()
    assert (first.finish_reason, stopped.finish_reason) == ("length", "stop")
    assert greedy.logprobs.mean() > first.logprobs.mean()


@TIED_ALONE
def test_guided_answers_are_valid_json_without_whitespace(real):
    tokenizer = AutoTokenizer.from_pretrained(TINY)

    async def ask():
        work = (
            sample(
                real.engine,
                [i, *range(20)],
                160,
                seed=i,
                stop_ids=[tokenizer.eos_token_id],
                json_schema=SCHEMA,
            )
            for i in range(24)
        )
        return await asyncio.gather(*work)

    completions = asyncio.run(ask())
    assert all(c.constrained and c.finish_reason == "stop" for c in completions)
    texts = [tokenizer.decode(c.ids[:-1]) for c in completions]
    answers = [json.loads(text) for text in texts]
    assert len(answers) == 24
    for answer, text in zip(answers, texts, strict=True):
        assert answer.keys() == set(SCHEMA["required"])
        assert len(answer["scores"]) == 3
        assert text.startswith('{"outcome":"')


@TIED_ALONE
def test_killed_in_a_batch_it_recovers_with_the_weights_of_the_last_update(real):
    """Of eight requests, spread over two replicas."""
    real.update(21)
    before = real.engine._replicas.pids

    async def batch():
        work = [asyncio.create_task(sample(real.engine, [i] * 40, 400, seed=i)) for i in range(8)]
        await asyncio.sleep(0.2)
        os.killpg(before[0], signal.SIGKILL)
        return await asyncio.gather(*work)

    real.engine.metrics()
    completions = asyncio.run(batch())
    assert all(len(c.ids) == 400 and c.weight_version == real.version for c in completions)
    metrics = real.engine.metrics()
    assert (metrics["engine/restarts"], metrics["engine/resent"]) == (1, 4)
    assert real.parity() < 1e-4
    killed, spared = zip(before, real.engine._replicas.pids, strict=True)
    assert killed[0] != killed[1]
    assert spared[0] == spared[1]
