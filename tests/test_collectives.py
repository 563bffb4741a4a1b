"""Traffic read off programs for eight simulated devices, and off lines of other targets."""

import os
import subprocess
import sys

import numpy as np
import pytest

from rlds_jax import collectives

SCRIPT = """
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from rlds_jax import collectives

mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tensor"))

def layout(*spec):
    return NamedSharding(mesh, P(*spec))

def traffic(function, inputs, outputs, *shapes, trips=1):
    jitted = jax.jit(function, in_shardings=inputs, out_shardings=outputs)
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    return collectives.traffic(jitted.lower(*shapes).compile().as_text(), mesh, trips)

whole = 4 * 64 * 16
gather = traffic(lambda x: x * 2, layout("fsdp"), layout(), (64, 16))
assert gather == {"fsdp": whole * 3 / 4}, gather
reduce = traffic(lambda x: x.sum(0), layout("tensor"), layout(), (64, 16))
assert reduce == {"tensor": 2 * 4 * 16 / 2}, reduce

def layers(x, weights):
    def layer(x, w):
        return lax.with_sharding_constraint(x @ w, layout("fsdp")), None
    return lax.scan(layer, x, weights)[0]

scanned = traffic(
    layers, (layout("fsdp"), layout(None, "fsdp")), layout("fsdp"), (64, 16), (5, 16, 16)
)
assert scanned == {"fsdp": 5 * 4 * 16 * 16 * 3 / 4}, scanned
print("agrees")
"""


def test_gathers_reductions_and_scanned_layers_are_counted():
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "agrees"


LINES = """\
HloModule x
ENTRY %main (p: f32[4]) -> f32[4] {
  %a = ((bf16[320,64]{1,0}), bf16[2560,64]{1,0}) all-gather-start(%p), replica_groups=[1,8]<=[8]
  %c = f32[4]{0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}
  %b = f32[8]{0} all-reduce(%p), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%sum
}
"""


def test_started_gathers_and_transposed_groups_are_read():
    sent = collectives.traffic(LINES, _Shape((2, 4), ("data", "fsdp")))
    assert sent == {"data+fsdp": 2560 * 64 * 2 * 7 / 8, "data": 2 * 32 / 2, "fsdp": 16}


LOOPS = """\
HloModule x
%under_36 (p: (s32[])) -> pred[] {
  %n = s32[]{:T(128)} constant(36), metadata={op_name="n"}
  ROOT %lt = pred[]{:T(512)} compare(%i, %n), direction=LT
}
%under_used (p: (s32[], s32[])) -> pred[] {
  ROOT %lt = pred[] compare(%i, %used), direction=LT
}
%layer (p: (s32[])) -> (s32[]) {
  %g = f32[8]{0} all-gather(%p), replica_groups=[1,8]<=[8]
}
%micro (p: (s32[], s32[])) -> (s32[], s32[]) {
  %l = (s32[]) while(%p), condition=%under_36, body=%layer
  %c = (s32[]) while(%p), condition=%under_used, body=%layer
}
ENTRY %main (p: f32[4]) -> f32[4] {
  %m = (s32[], s32[]) while(%p), condition=%under_used, body=%micro
}
"""


def test_a_loop_is_counted_by_its_condition():
    sent = collectives.traffic(LOOPS, _Shape((8,), ("fsdp",)), inner_trips=5)
    assert sent == {"fsdp": (36 + 5) * 32 * 7 / 8}


class _Shape:
    """What `traffic` reads of a mesh."""

    def __init__(self, shape, names):
        self.axis_names, self.devices, self.size = names, np.empty(shape), int(np.prod(shape))


def test_a_text_without_an_entry_is_refused():
    with pytest.raises(ValueError, match="no entry"):
        collectives.traffic("HloModule x", _Shape((8,), ("fsdp",)))
