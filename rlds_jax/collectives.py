"""What a compiled program sends between devices, read off its HLO text."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

import numpy as np
from jax.sharding import Mesh

_OPERATION = re.compile(
    r"= (?P<shape>.*?) (?P<kind>all-gather|all-reduce|reduce-scatter|all-to-all|"
    r"ragged-all-to-all|collective-permute)(?:-start)?\("
)
_SHAPE = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_BODY = re.compile(r"\b(?:body|calls|to_apply|called_computations|branch_computations)=")
_NAMES = re.compile(r"%([\w.\-]+)")
_TRIPS = re.compile(r'known_trip_count"?:\s*\{"?n"?:\s*"?(\d+)')
_CONDITION = re.compile(r"\bcondition=%([\w.\-]+)")
_CONSTANT = re.compile(r"%([\w.\-]+) = [su]32\[\]\S* constant\((\d+)\)")
_BELOW = re.compile(r"ROOT .* compare\([^,]*%[\w.\-]+, [^,]*%([\w.\-]+)\), direction=LT")
_HEADER = re.compile(r"^(?:ENTRY )?%([\w.\-]+) .*\{$")


def traffic(hlo: str, mesh: Mesh, inner_trips: int = 1) -> dict[str, float]:
    """Bytes one device sends per pass of the outermost loop of unknown length, by mesh axes.

    Args:
      hlo: text of the optimised module.
      mesh: what it was compiled for, in the order of its device assignment.
      inner_trips: iterations of loops of unknown length inside that one.

    Returns:
      By axes joined with "+" ("fsdp", "fsdp+tensor").
    """
    computations = _computations(hlo)
    names = mesh.axis_names
    coordinates = np.stack(np.unravel_index(np.arange(mesh.size), mesh.devices.shape), axis=1)
    sent: dict[str, float] = defaultdict(float)

    def visit(name: str, times: float, unknown: int) -> None:
        for line in computations.get(name, ()):
            operation = _OPERATION.search(line)
            if operation:
                group = coordinates[_group(line, mesh.size)]
                axes = [n for n, c in zip(names, group.T, strict=True) if len(set(c)) > 1]
                sent["+".join(axes)] += times * _sent(operation, len(group))
            loop = " while(" in line
            trips = _trips(line, computations) if loop else None
            inside = unknown + (loop and trips is None)
            repeats = trips or (inner_trips if loop and unknown else 1)
            for called in _called(line):
                visit(called, times * repeats, inside)

    visit(_entry(hlo), 1.0, 0)
    sent.pop("", None)
    return dict(sent)


def _trips(line: str, computations: Mapping[str, list[str]]) -> int | None:
    """Iterations of a loop, None if unknown; a TPU's text says so in its condition alone."""
    known = _TRIPS.search(line)
    if known:
        return int(known[1])
    condition = _CONDITION.search(line)
    lines = computations.get(condition[1], []) if condition else []
    constants = {found[1]: int(found[2]) for each in lines if (found := _CONSTANT.search(each))}
    below = next((found[1] for each in lines if (found := _BELOW.search(each))), "")
    return constants.get(below)


def _computations(hlo: str) -> Mapping[str, list[str]]:
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in hlo.splitlines():
        header = _HEADER.match(line)
        if header:
            lines = found.setdefault(header[1], [])
        elif line.startswith("  "):
            lines.append(line)
    return found


def _entry(hlo: str) -> str:
    found = re.search(r"^ENTRY %([\w.\-]+)", hlo, re.MULTILINE)
    if found is None:
        raise ValueError("the HLO text has no entry computation")
    return found[1]


def _called(line: str) -> list[str]:
    """Computations an instruction runs; reductions' scalar ones among them hold nothing."""
    names: list[str] = []
    for start in _BODY.finditer(line):
        rest = line[start.end() :]
        end = rest.index("}") if rest.startswith("{") else re.search(r"[,\s]|$", rest).start()  # type: ignore[union-attr]
        names += _NAMES.findall(rest[:end])
    return names


def _group(line: str, devices: int) -> np.ndarray:
    """Device numbers of the first group of a collective."""
    iota = re.search(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", line.partition("<=")[2])
    if "replica_groups=[" in line and iota:
        shape = re.search(r"replica_groups=\[([\d,]+)\]", line)
        return _order(iota, devices).reshape(_ints(shape[1]) if shape else -1)[0]
    named = re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?\)?)\))? ?\{([^}]*)\}", line
    )
    if named:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        along = re.findall(r"'(\w+)'", named[3])
        order = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", named[2] or f"[{devices}]")
        grid = _order(order, devices).reshape([int(size) for size in sizes.values()])
        return grid[tuple(slice(None) if name in along else 0 for name in sizes)].ravel()
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]*)\}", line)
    return np.array(_ints(listed[1]) if listed and listed[1] else range(devices))


def _order(iota: re.Match[str] | None, devices: int) -> np.ndarray:
    """Device numbers in the order "[shape]T(permutation)" writes."""
    if iota is None:
        return np.arange(devices)
    shape = _ints(iota[1])
    permutation = _ints(iota[2]) if iota[2] else range(len(shape))
    return np.arange(devices).reshape(shape).transpose(permutation).ravel()


def _sent(operation: re.Match[str], size: int) -> float:
    """Bytes one device sends in a ring of `size`; the largest arrays are the whole ones."""
    kind, arrays = operation["kind"], _SHAPE.findall(operation["shape"])
    sizes = [_size(dtype, dims) for dtype, dims in arrays]
    started = "-start(" in operation[0]
    whole = float(sum(sizes))
    if started and kind in ("all-gather", "reduce-scatter"):  # operands, then results
        half = len(sizes) // 2
        whole = float(max(sum(sizes[:half]), sum(sizes[half:])))
    elif started and kind != "all-reduce" and len(sizes) > 1:
        whole /= 2
    elif kind == "reduce-scatter":
        whole *= size
    if kind == "collective-permute":
        return whole
    return whole * (2 if kind == "all-reduce" else 1) * (size - 1) / size


def _size(dtype: str, dims: str) -> int:
    bits = 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])  # type: ignore[index]
    return int(np.prod(_ints(dims), dtype=np.int64)) * bits // 8


def _ints(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]
