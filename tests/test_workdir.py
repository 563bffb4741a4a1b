"""A workdir belongs to one process and one config."""

import json
import os
import subprocess
import sys

import pytest

from configs import frozenlake
from rlds_jax import workdir


def test_the_config_is_kept_and_accepted_again(tmp_path):
    config = frozenlake.get_config("tiny")
    workdir.claim(tmp_path, config).close()
    assert json.loads((tmp_path / "config.json").read_text())["task"]["options"]["size"] == [4, 4]
    workdir.claim(tmp_path, config).close()


COMPILE = """
import jax, pathlib, sys
from rlds_jax import workdir

hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
workdir.keep_compilations(pathlib.Path(sys.argv[1]))
jax.jit(lambda x: x + 1)(0)
jax.clear_caches()
jax.jit(lambda x: x + 1)(0)
print(hits.count("/jax/compilation_cache/cache_hits"))
"""


def test_a_compiled_program_is_found_in_the_workdir(tmp_path):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMPILATION")}
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    command = [sys.executable, "-c", COMPILE, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("1", 0), done.stderr
    assert any((tmp_path / "compilations").iterdir())


def test_a_run_may_be_made_longer_and_saved_more_often(tmp_path):
    config = frozenlake.get_config("tiny")
    workdir.claim(tmp_path, config).close()
    (tmp_path / "checkpoints" / "1").mkdir(parents=True)
    config.steps, config.checkpoint.every, config.mesh.data = 99, 1, 2
    config.batch.max_micro = 128
    workdir.claim(tmp_path, config).close()
    assert json.loads((tmp_path / "config.json").read_text())["steps"] == 99


def test_other_fields_that_differ_are_listed(tmp_path):
    config = frozenlake.get_config("tiny")
    workdir.claim(tmp_path, config).close()
    (tmp_path / "validation.jsonl").write_text("{}\n")
    config.seed, config.rollout.group_size = 7, 3
    with pytest.raises(ValueError, match=r"rollout.group_size: 4 -> 3\n  seed: 0 -> 7"):
        workdir.claim(tmp_path, config)
    assert json.loads((tmp_path / "config.json").read_text())["seed"] == 0


def test_a_workdir_in_use_is_refused_until_its_process_ends(tmp_path):
    config = frozenlake.get_config("tiny")
    hold = (
        "import sys; from pathlib import Path; from rlds_jax import workdir;"
        "from configs import frozenlake;"
        "lock = workdir.claim(Path(sys.argv[1]), frozenlake.get_config('tiny'));"
        "print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match="in use"):
            workdir.claim(tmp_path, config)
        holder.kill()
    workdir.claim(tmp_path, config).close()


def test_a_workdir_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"workdir .*file.* give another"):
        workdir.claim(tmp_path / "file" / "run", frozenlake.get_config("tiny"))


def test_a_damaged_config_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is damaged"):
        workdir.claim(tmp_path, frozenlake.get_config("tiny"))


def test_a_start_that_came_to_nothing_binds_no_config(tmp_path):
    config = frozenlake.get_config("tiny")
    workdir.claim(tmp_path, config).close()
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "rollouts.jsonl").touch()
    config.engine.num_slots = 7
    workdir.claim(tmp_path, config).close()
    assert json.loads((tmp_path / "config.json").read_text())["engine"]["num_slots"] == 7


@pytest.mark.parametrize("name", workdir.MADE)
def test_files_of_no_run_are_left_alone(name, tmp_path):
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=f"holds {name} but no config.json"):
        workdir.claim(tmp_path, frozenlake.get_config("tiny"))
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_the_config_of_a_model_is_left_alone(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 9}')
    with pytest.raises(ValueError, match="of another config"):
        workdir.claim(tmp_path, frozenlake.get_config("tiny"))
    assert (tmp_path / "config.json").read_text() == '{"vocab_size": 9}'
