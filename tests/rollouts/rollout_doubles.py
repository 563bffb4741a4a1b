"""Stand-ins for the rollout tests: a small tokenizer, a scripted engine, a corridor to walk."""

import asyncio
import json

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rlds_jax.rollouts.chat import ChatFormat
from rlds_jax.rollouts.config import RolloutConfig
from rlds_jax.rollouts.context import RolloutContext
from rlds_jax.rollouts.engines.base import Completion, PromptTooLong, request_seed
from rlds_jax.rollouts.group import run_groups
from rlds_jax.rollouts.prompts import Prompts
from rlds_jax.tasks.base import Item, StepResult, Subtask

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_pad|>")
NOT_SPECIAL = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>")
CORPUS = [
    "the agent moves on the grid and falls into the hole",
    "user assistant system tool right",
] * 4

CHATML = """
{%- set first = messages[0].content if messages[0].role == 'system' else none -%}
{%- set rest = messages[1:] if first is not none else messages -%}
{%- if tools %}
{{- '<|im_start|>system\n' }}{% if first is not none %}{{ first + '\n\n' }}{% endif %}
{{- 'Tools:' }}{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}
{{- '\nCall one as <tool_call>{...}</tool_call>.<|im_end|>\n' }}
{%- elif first is not none %}{{- '<|im_start|>system\n' + first + '<|im_end|>\n' }}{% endif -%}
{%- for m in rest %}
{%- if m.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{% endif %}
{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
""".strip()


def finish_tokenizer(backend, template=CHATML, **options):
    backend.add_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in NOT_SPECIAL])
    options = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"} | options
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **options)


def build_tokenizer(template=CHATML, corpus=CORPUS, use_regex=True, **options):
    """A byte-level BPE of a few hundred entries with Qwen's kinds of added tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(False, use_regex=use_regex)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(corpus, trainer)
    return finish_tokenizer(backend, template, **options)


class Corridor:
    """Walk right to cell `length` without stepping left of 0; every turn shows the cell.

    "right" and "left" move; falling off the left end fails, reaching the end succeeds.
    """

    name = "corridor"
    subtasks = (
        Subtask("walking", 0.75, "Moves towards the end."),
        Subtask("counting", 0.25, "Knows where it is."),
    )
    tools = ()

    def __init__(self, replay="execute", observation_role="user", drift=(), step=None):
        self.replay = replay
        self.observation_role = observation_role
        self.drift = set(drift)  # environments, by number of creation, that observe differently
        self.step = step
        self.opened = self.closed = 0
        self.restored = []

    def system_prompt(self, guidance=None):
        return "Walk to the end." + (f"\n{guidance}" if guidance else "")

    def items(self, split):
        return [Item(str(i), {"length": 3}) for i in range(4)]

    def environment(self, item):
        self.opened += 1
        return _CorridorWalk(self, item.data, drifts=self.opened - 1 in self.drift)

    def close(self):
        pass


class _CorridorWalk:
    def __init__(self, task, data, drifts):
        self.task, self.data, self.drifts = task, data, drifts
        self.cell = self.turn = 0

    def show(self):
        return f"cell {self.cell}" + (" (drifted)" if self.drifts and self.turn else "")

    async def reset(self):
        return self.data.get("first", self.show())

    async def step(self, text):
        if self.task.step is not None:
            replaced = self.task.step(self, text)
            if replaced is not None:
                return replaced
        self.turn += 1
        self.cell += {"right": 1, "left": -1}.get(text.split()[-1] if text.split() else "", 0)
        if self.cell < 0:
            return StepResult("fell off", True, 0.0, False, "fell", {"tools/calls": self.turn})
        if self.cell >= self.data["length"]:
            return StepResult("arrived", True, 1.0, True, "arrived", {"tools/calls": self.turn})
        if self.turn >= 6:
            return StepResult("too slow", True, 0.0, False, "max_turns")
        return StepResult(self.show())

    async def conclude(self, ended_by):
        return StepResult("cut off", True, 0.0, False, ended_by)

    async def restore(self, turns):
        self.task.restored.append(tuple(turns))
        for action, _ in turns:
            self.cell += {"right": 1, "left": -1}.get(action, 0)
        self.turn = len(turns)

    async def close(self):
        self.task.closed += 1


class Request:
    """One engine request, with its prompt as text."""

    def __init__(self, prompt, text, max_tokens, temperature, seed, schema):
        self.prompt, self.text, self.seed = list(prompt), text, seed
        self.max_tokens, self.temperature, self.schema = max_tokens, temperature, schema

    @property
    def role(self):
        if "You grade" in self.text:
            return "grader"
        return "reflector" if "You review" in self.text else "actor"

    @property
    def turn(self):
        """Assistant turns before this one."""
        return self.text.count("<|im_start|>assistant") - 1


class ScriptedEngine:
    """Answers each request by `answer(request)`, which gives text, ids, an exception or a wait."""

    def __init__(self, tokenizer, answer, max_context=8192):
        self.tokenizer, self.answer, self.max_context = tokenizer, answer, max_context
        self.requests = []
        self.in_flight = 0

    async def generate(
        self, prompt_ids, *, max_tokens, temperature, stop_ids, seed, json_schema=None
    ):
        if len(prompt_ids) + max_tokens > self.max_context:
            raise PromptTooLong(f"{len(prompt_ids)} + {max_tokens}")
        text = self.tokenizer.decode(list(prompt_ids))
        request = Request(prompt_ids, text, max_tokens, temperature, seed, json_schema)
        self.requests.append(request)
        self.in_flight += 1
        try:
            await asyncio.sleep(0)
            answer = self.answer(request)
            if asyncio.iscoroutine(answer):
                answer = await answer
        finally:
            self.in_flight -= 1
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, str):
            answer = self.tokenizer.encode(answer + "<|im_end|>", add_special_tokens=False)
        ids = np.array(answer[:max_tokens], np.int32)
        stopped = len(ids) and ids[-1] in stop_ids
        logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32) / 8
        return Completion(ids, logprobs, "stop" if stopped else "length", weight_version=7)

    def of(self, role):
        return [r for r in self.requests if r.role == role]


def grades_json(walking=2, counting=4, pivots=(0, None)):
    entries = [
        {"sub_task": "walking", "score": walking, "assessment": "-", "pivot_step": pivots[0]},
        {"sub_task": "counting", "score": counting, "assessment": "-", "pivot_step": pivots[1]},
    ]
    return json.dumps(
        {
            "trajectory_outcome": "failure",
            "root_cause_analysis": "walked the wrong way",
            "sub_task_grades": entries,
        }
    )


def reflection_json(step=0, **fields):
    report = {
        "trajectory_summary": "it walked",
        "root_cause_analysis": "it went left",
        "trajectory_outcome": "failure",
        "improvement_suggestion": "go right",
        "retry_from_step": step,
    }
    return json.dumps(report | fields)


def make_context(tokenizer, answer, task=None, max_context=8192, **config):
    task = task or Corridor()
    return RolloutContext(
        task=task,
        engine=ScriptedEngine(tokenizer, answer, max_context),
        chat=ChatFormat(tokenizer),
        prompts=Prompts(),
        config=RolloutConfig(**config),
        run_seed=3,
    )


ITEMS = [Item("a", {"length": 3}), Item("b", {"length": 3})]


def run(context, items=ITEMS, step=5, **options):
    return asyncio.run(run_groups(context, items, step, **options))


def policy(actor="hmm", retry="right", grader=None, reflector=None):
    """The actor hesitates, and walks once it has advice in its context."""

    def answer(request):
        if request.role == "grader":
            return grades_json() if grader is None else grader
        if request.role == "reflector":
            return reflection_json(1) if reflector is None else reflector
        return retry if "Do: go right" in request.text else actor

    return answer


def only(rollout, role, failure, otherwise=None):
    """Fails requests of one rollout's role in slot 0, answers the rest as `policy`."""
    bad = {request_seed(3, 5, 0, rollout, role, turn) for turn in range(9)}
    return lambda request: failure if request.seed in bad else (otherwise or policy())(request)
