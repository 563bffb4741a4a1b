"""Compiles a config's update for devices that are not here: does it fit, and what bounds it.

    python -m rlds_jax.plan --config=configs/hotpotqa.py --topology=h100:8 [--format=json]

The program is the one that training runs, compiled by the real compiler. Memory is what the
compiler reports, per device. FLOPs are counted on the jaxpr (flops.py), traffic between devices on
the compiled program (collectives.py). A step is that of the longest rollouts the config allows.
What vLLM takes, GPUs or a part of them, is what `engine.gpus` and `engine.memory_fraction` say.
Exit code 1, with advice, when it does not fit.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

import jax
from absl import flags
from jax.sharding import Mesh
from ml_collections import ConfigDict

from rlds_jax import batch as batching
from rlds_jax import collectives, commands, flops, play, sharding, topology, update
from rlds_jax.batch import Batch, BatchLayout
from rlds_jax.losses import LossConfig
from rlds_jax.models import attention_gate, hub, qwen3, weights
from rlds_jax.models.attention import Choice
from rlds_jax.models.config import ModelConfig

TOPOLOGY = flags.DEFINE_string("topology", "h100:8", "Chip and number, or slice: v5e:4x4.")
FORMAT = flags.DEFINE_enum("format", "table", ["table", "json"], "How to print the result.")
ENGINE = flags.DEFINE_float(
    "engine_share", 0.4, "Part of each device's memory left to the local engine.", 0.0, 1.0
)
Shares = tuple[float, float]  # of a device's memory: the engine's while sampling, and in the update

MARGIN = 2 * 2**30  # bytes of a device that the runtime, collectives and fragmentation take


@dataclasses.dataclass(frozen=True)
class Program:
    """The update of a config, with abstract arguments.

    Attributes:
      arguments: state, reference, batch.
    """

    model: ModelConfig
    optimizer: update.OptimizerConfig
    loss: LossConfig
    compute: update.ComputeConfig
    layout: BatchLayout
    mesh: Mesh
    arguments: tuple[update.TrainState, Any, Batch]

    def lower(self) -> jax.stages.Lowered:
        step: Any = update.make_update(
            self.model, self.optimizer, self.loss, self.compute, self.mesh, self._with_old
        )
        return step.lower(*self.arguments)

    @property
    def _with_old(self) -> bool:
        return self.arguments[2].old_logprobs is not None


def program(config: ConfigDict, model: ModelConfig, mesh: Mesh, attention: Choice) -> Program:
    """The update that `config` trains `model` with on `mesh`, `attention` in place of its own.

    Raises:
      ValueError: model, batch and mesh do not fit each other.
    """
    layout = BatchLayout(**config.batch)
    sharding.check_mesh(model, mesh, layout.rows)
    compute = dataclasses.replace(update.ComputeConfig(**config.compute), attention=attention)
    optimizer = update.OptimizerConfig(**config.optimizer)
    loss = LossConfig(**config.loss)
    several = config.training.epochs * config.training.minibatches > 1
    params = jax.eval_shape(lambda: qwen3.init_params(model, jax.random.key(0)))
    transform = update.make_optimizer(optimizer)
    state = jax.eval_shape(lambda p: update.init_state(p, transform, jax.random.key(0)), params)
    reference = None
    if loss.needs_reference:
        reference = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, compute.dtype), params)
    arguments = (state, reference, _abstract_batch(layout, several))
    return Program(model, optimizer, loss, compute, layout, mesh, arguments)


def kernel(config: ConfigDict, chip: topology.Chip) -> Choice:
    """The attention kernel that training takes on a chip where every kernel is right."""
    if config.compute.attention != "auto":
        return config.compute.attention
    major, minor = chip.capability or (0, 0)
    return attention_gate.candidates(chip.platform, major + minor / 10, config.compute.dtype)[0]


def peak(compiled: jax.stages.Compiled) -> int:
    """Bytes that a device needs at most, arguments included."""
    memory = compiled.memory_analysis()
    assert memory is not None
    return getattr(memory, "peak_memory_in_bytes", 0) or (
        memory.argument_size_in_bytes + memory.temp_size_in_bytes
    )


def _abstract_batch(layout: BatchLayout, with_old_logprobs: bool) -> Batch:
    one = batching.lay_out([], dataclasses.replace(layout, max_micro=1))
    if with_old_logprobs:
        one = dataclasses.replace(one, old_logprobs=one.advantage)

    def sized(x):
        return jax.ShapeDtypeStruct((layout.max_micro, *x.shape[1:]) if x.ndim else (), x.dtype)

    return jax.tree.map(sized, one)


def work(plan: Program) -> dict[str, flops.Work]:
    """Matrix products of one full micro-batch over all devices: the policy's forward and backward
    with what it recomputes, and the reference's forward. Attention counts as if a row were one
    sequence, causally."""
    tokens = plan.layout.rows * plan.layout.row_length
    compute = dataclasses.replace(plan.compute, attention="dense", logprob_chunk=tokens)
    state, _, batch = plan.arguments
    without = dataclasses.replace(plan.loss, kl="off", kl_coefficient=0.0)

    def policy(params, batch):
        return update.accumulate(
            params, None, batch, model=plan.model, loss_config=without, compute=compute
        )

    def reference(params, batch):
        return update.make_logprobs(plan.model, compute)(params, batch)

    length = plan.layout.row_length
    found = {"policy": flops.count(policy, state.params, batch, row_length=length)}
    if plan.loss.needs_reference:
        found["reference"] = flops.count(reference, state.params, batch, row_length=length)
    return {
        name: dataclasses.replace(each, attention=each.attention / 2)
        for name, each in found.items()
    }


def beside_engine(
    config: ConfigDict, target: topology.Topology, local_share: float
) -> tuple[topology.Topology, Shares]:
    """What the config's engine leaves of a target: devices, and the engine's shares of each.

    Raises:
      ValueError: the engine's GPUs are not those of the target.
    """
    settings = play.vllm_settings(config)
    if settings is None:
        return target, (local_share, local_share)
    if settings.placement == "cpu":
        return target, settings.shares
    if target.chip.platform != "gpu" or target.devices != settings.host_gpus:
        raise ValueError(
            f"engine.host_gpus is {settings.host_gpus}, but {target.name} is not one host of as "
            "many GPUs: change --topology or engine.host_gpus"
        )
    left = dataclasses.replace(target, devices=len(settings.trainer_gpus))
    return left, settings.shares


def measure(
    config: ConfigDict, model: ModelConfig, target: topology.Topology, shares: Shares
) -> dict[str, Any]:
    """Everything the command prints, as JSON values; bytes, FLOPs and seconds.

    Raises:
      ValueError: model, batch and mesh do not fit each other.
      RuntimeError: the target cannot be compiled for here.
    """
    mesh = sharding.make_mesh(**config.mesh, devices=topology.devices(target))
    plan = program(config, model, mesh, kernel(config, target.chip))
    started = time.perf_counter()
    try:
        with topology.absent(target.chip):
            compiled = plan.lower().compile()
    except jax.errors.JaxRuntimeError as error:  # a TPU's compiler judges the fit itself
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _too_large(plan, target, shares, str(error))
    seconds = time.perf_counter() - started
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None
    assert text is not None
    chunks = -(-plan.layout.rows * plan.layout.row_length // plan.compute.logprob_chunk)
    sent = collectives.traffic(text, plan.mesh, chunks)
    needed = peak(compiled)
    static = _static(plan, target, shares)
    return {
        **static,
        "temporaries": memory.temp_size_in_bytes,
        "peak": needed,
        "fits": needed <= static["available"] and _kept(static) <= static["available_sampling"],
        "compile_seconds": seconds,
        "collectives_per_micro_batch": sent,
        **_roofline(config, plan, target, sent),
    }


def _static(plan: Program, target: topology.Topology, shares: Shares) -> dict[str, Any]:
    """What is known before compiling."""
    state, reference, batch = plan.arguments
    layout = update.state_shardings(plan.model, update.make_optimizer(plan.optimizer), plan.mesh)
    batches = update.batch_shardings(plan.mesh, batch.old_logprobs is not None)
    return {
        "topology": target.name,
        "hosts": target.hosts,
        "mesh": dict(plan.mesh.shape),
        "attention": plan.compute.attention,
        "remat": plan.compute.remat,
        "vocabulary": plan.model.vocab_size,
        "parameter_count": sum(math.prod(x.shape) for x in jax.tree.leaves(state.params)),
        "parameters": _held(state.params, layout.params),
        "optimizer": _held(state.opt_state, layout.opt_state),
        "reference": _held(reference, layout.params) if reference is not None else 0,
        "batch": _held(batch, batches),
        "available": _available(target, shares[1]),
        "available_sampling": _available(target, shares[0]),
        "device_memory": target.chip.memory,
        "engine_share": shares[0],
    }


def _kept(static: dict[str, Any]) -> int:
    """Bytes of one device that the trainer holds while the engine samples."""
    return static["parameters"] + static["optimizer"] + static["reference"]


def _held(tree: Any, shardings: Any) -> int:
    """Bytes of one device."""
    held = jax.tree.map(
        lambda x, s: (
            math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize
            if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
            else 0
        ),
        tree,
        shardings,
    )
    return sum(jax.tree.leaves(held))


def _available(target: topology.Topology, engine_share: float) -> int:
    return int(target.chip.memory * (1 - engine_share)) - MARGIN


def _too_large(plan, target, shares: Shares, message: str) -> dict[str, Any]:
    first = next((line for line in message.splitlines() if "hbm" in line.lower()), message[:300])
    return {**_static(plan, target, shares), "fits": False, "compiler": first.strip()}


def _roofline(
    config: ConfigDict, plan: Program, target: topology.Topology, sent: dict[str, float]
) -> dict[str, Any]:
    """Seconds of a step if compute, memory or links alone bounded it, at their peak rates."""
    chip, done = target.chip, work(plan)
    rollouts = config.prompts_per_step * (
        config.rollout.group_size
        + (0 if config.rollout.condition == "rlvr" else config.rollout.retry_budget)
    )
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    tokens = plan.layout.rows * plan.layout.row_length
    micro = -(-rollouts * longest // tokens)
    total = sum((each for each in done.values()), flops.Work())
    held = _held(
        plan.arguments[0],
        update.state_shardings(plan.model, update.make_optimizer(plan.optimizer), plan.mesh),
    )
    moved = micro * total.bytes / target.devices + 2 * held
    rates = {
        axes: chip.network if _crosses_hosts(plan.mesh, axes, chip) else chip.link for axes in sent
    }
    seconds = {
        "compute": micro * (total.flops + total.attention) / target.devices / chip.flops,
        "memory": moved / chip.bandwidth,
        "links": micro * sum(size / rates[axes] for axes, size in sent.items()),
    }
    bound = max(seconds.values())
    return {
        "micro_batches_per_step": micro,
        "tokens_per_step": micro * tokens,
        "flops_per_micro_batch": {name: each.flops + each.attention for name, each in done.items()},
        "hbm_bytes_per_step": moved,
        "seconds_per_step": {**seconds, "bound": bound},
        "mfu": micro * useful_flops(plan) / (bound * target.devices * chip.flops),
        "assumed": {"flops": chip.flops, "hbm": chip.bandwidth, **rates},
    }


def useful_flops(plan: Program) -> float:
    """What a full micro-batch of the policy takes when nothing is computed twice.

    6 FLOPs per token and parameter of a matrix, and causal attention of whole rows.
    """
    model, layout = plan.model, plan.layout
    width = model.num_layers * model.num_heads * model.head_dim
    attention = 6 * width * layout.rows * layout.row_length**2
    return 6 * _matrix_parameters(model) * layout.rows * layout.row_length + attention


def _crosses_hosts(mesh: Mesh, axes: str, chip: topology.Chip) -> bool:
    """Whether a group along these axes spans GPU hosts; the links of a TPU slice do anyway."""
    index = tuple(slice(None) if name in axes.split("+") else 0 for name in mesh.axis_names)
    hosts = {device.process_index for device in mesh.devices[index].flat}
    return chip.platform == "gpu" and len(hosts) > 1


def _matrix_parameters(model: ModelConfig) -> int:
    """Parameters that multiply every token: all but norms, and the embedding once, as the head."""
    table = qwen3.parameter_table(model)
    return sum(
        math.prod(parameter.shape)
        for path, parameter in table.items()
        if "norm" not in path
        and "bias" not in path
        and not (path == "embed" and "lm_head" in table)
    )


def advice(result: dict[str, Any], config: ConfigDict) -> list[str]:
    """Which fields to change, and by how much, when a plan does not fit."""
    shards = result["mesh"]["fsdp"] * result["mesh"]["tensor"]
    lines = []
    if config.compute.remat != "full":
        lines.append("compute.remat=full keeps one activation per layer and token")
    if config.compute.logprob_chunk > 1024:
        freed = 6 * (config.compute.logprob_chunk // 2) * result["vocabulary"] // shards
        lines.append(
            f"compute.logprob_chunk={config.compute.logprob_chunk // 2} frees about {_gib(freed)}"
        )
    if config.optimizer.moment_dtype == "float32":
        freed = 2 * result["parameter_count"] // shards
        lines.append(f"optimizer.moment_dtype=bfloat16 frees {_gib(freed)}")
    if result["mesh"]["tensor"] == 1 and config.batch.rows > 1:
        lines.append("mesh.tensor=2 with batch.rows halved halves the activations of a device")
    lines.append("more devices on mesh.fsdp split parameters, moments and reference further")
    if result["engine_share"]:
        lines.append(
            "a smaller --engine_share, or with vLLM engine.memory_fraction, leaves more to training"
        )
    return lines


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    memory = ("parameters", "optimizer", "reference", "batch", "temporaries", "peak", "available")
    rows = [
        ("topology", f"{result['topology']}, {result['hosts']} host(s), mesh {result['mesh']}"),
        ("attention, remat", f"{result['attention']}, {result['remat']}"),
        *((f"{name} per device", _gib(result[name])) for name in memory if name in result),
    ]
    if "compiler" in result:
        rows.append(("compiler", result["compiler"]))
    else:
        seconds, assumed = result["seconds_per_step"], result["assumed"]
        rows += [
            ("micro-batches per step", f"{result['micro_batches_per_step']}, at most"),
            *(
                (f"{name} PFLOP per micro-batch", f"{value / 1e15:.3f}")
                for name, value in result["flops_per_micro_batch"].items()
            ),
            ("memory traffic per step", _gib(result["hbm_bytes_per_step"])),
            *(
                (f"sent over {axes} per micro-batch", _gib(size))
                for axes, size in result["collectives_per_micro_batch"].items()
            ),
            *((f"seconds if {name} bounds", f"{value:.1f}") for name, value in seconds.items()),
            ("MFU at that bound", f"{result['mfu']:.2f}"),
            ("assumed rates per second", ", ".join(f"{k} {v:.3g}" for k, v in assumed.items())),
            ("compile time", f"{result['compile_seconds']:.0f} s"),
        ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def main(config: ConfigDict, _: Path | None) -> None:
    jax.config.update("jax_platforms", "cpu")  # plugins compile without looking for a device
    with commands.refuse_bad_input():
        target = topology.parse(TOPOLOGY.value)
        model = weights.load_config(hub.config_directory(config.model.path))
        try:
            result = measure(config, model, *beside_engine(config, target, ENGINE.value))
        except RuntimeError as error:
            raise ValueError(str(error)) from error
    print(json.dumps(result, indent=1) if FORMAT.value == "json" else table(result))
    if not result["fits"]:
        print(f"it does not fit {target.name}; what helps:")
        print("\n".join(f"  {line}" for line in advice(result, config)))
        raise SystemExit(1)


if __name__ == "__main__":
    commands.run(main, required=("config",))
