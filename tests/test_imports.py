"""Imports point one way (DESIGN, Layout), and the core stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "rlds_jax"

# What each part may import of the package, by prefix. Everything else in it is refused.
ALLOWED = {
    "grpo": (),
    "sdae": ("grpo",),
    "losses": (),
    "advantages": ("grpo", "sdae", "rollouts.types"),
    "models": ("models",),
    "tasks": ("tasks",),
    "rollouts": ("rollouts", "tasks.base", "tasks.tool_calls"),
    "rollouts/engines": ("rollouts", "models"),
}
HEAVY = ("torch", "vllm", "py4j", "scienceworld", "faiss", "sentence_transformers", "tensorflow")


def modules():
    return sorted(PACKAGE.rglob("*.py"))


def name(path):
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def imports(path):
    """Every absolute module name imported anywhere in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rule(path):
    """The most specific entry of ALLOWED for a module; None where anything goes."""
    relative = path.relative_to(PACKAGE).as_posix()
    matching = [key for key in ALLOWED if relative.startswith((f"{key}/", f"{key}.", f"{key}_"))]
    return ALLOWED[max(matching, key=len)] if matching else None


@pytest.mark.parametrize("path", modules(), ids=name)
def test_imports_point_one_way(path):
    allowed = rule(path)
    if allowed is None:
        return
    inside = [m.removeprefix("rlds_jax.") for m in imports(path) if m.startswith("rlds_jax.")]
    wrong = [m for m in inside if not any(m == a or m.startswith(f"{a}.") for a in allowed)]
    assert not wrong, f"{name(path)} may not import {wrong}"


@pytest.mark.parametrize("path", modules(), ids=name)
def test_heavy_libraries_stay_at_the_edges(path):
    heavy = {m.split(".")[0] for m in imports(path)} & set(HEAVY)
    owners = {
        "py4j": "tasks.scienceworld.jvm",
        "scienceworld": "tasks.scienceworld.jvm",
        "faiss": "tasks.hotpotqa",
        "sentence_transformers": "tasks.hotpotqa.sentence_e5",
    }
    wrong = [h for h in heavy if not name(path).startswith(owners.get(h, "rollouts.engines.vllm"))]
    assert not wrong, f"{name(path)} imports {wrong}"


@pytest.mark.parametrize("path", modules(), ids=name)
def test_rollouts_are_free_of_jax(path):
    free = ("base", "cuda_driver", "nccl", "vllm", "vllm_config", "vllm_process", "vllm_replicas")
    embedded = path.parent.name == "engines" and path.stem not in free
    if not name(path).startswith("rollouts.") or embedded:
        return
    assert not {m.split(".")[0] for m in imports(path)} & {"jax", "flax", "optax", "chex"}


def test_only_the_commands_of_the_retriever_load_the_torch_encoder():
    users = {name(p) for p in modules() if any(m.endswith("make_encoder") for m in imports(p))}
    assert users == {"tasks.hotpotqa.index", "tasks.hotpotqa.serve"}


def test_training_loads_no_torch_and_no_tensorflow():
    """transformers would import torch where it is installed; nothing of ours may ask it to."""
    heavy = ("torch", "vllm", "tensorflow", "faiss", "datasets")
    loaded = "import rlds_jax.train, rlds_jax.tasks.hotpotqa.task, sys"
    code = f"{loaded}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
