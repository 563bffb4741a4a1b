"""Builds a bundled tiny policy: demonstrations, tokenizer, supervised training, manifest.

    python -m experiments.tiny_policy.build --task=frozenlake

Everything follows from --seed. See README.md for what it takes and what comes out.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from experiments.tiny_policy.manifest import MANIFEST, formats
from experiments.tiny_policy.recipe import TASKS, Recipe, bundled, load
from experiments.tiny_policy.tokenizer import train_tokenizer
from experiments.tiny_policy.transcripts import Transcript
from rlds_jax.play import make_task


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--out", type=Path, help="model directory to write; the bundled one")
    parser.add_argument("--work", type=Path, help="runs/tiny_policy/TASK")
    parser.add_argument("--items", type=int, help="train items demonstrated on; the recipe's")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    started = time.time()
    recipe = load(args.task)
    out = args.out or bundled(recipe)
    work = args.work or Path("runs/tiny_policy") / args.task
    items = args.items or recipe.items
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    task = make_task(recipe.config().task)
    train = list(recipe.transcripts(task, "train", 0, items, args.seed))
    write_jsonl(work / "train.jsonl", train)
    validation = recipe.transcripts(task, "validation", 0, 100, args.seed)
    write_jsonl(work / "validation.jsonl", validation)
    save_tokenizer(recipe, train, work / "tokenizer", args.seed)
    fine_tune(recipe, work, args.seed)
    publish(work / "model", out)
    manifest = {
        "formats": formats(recipe, task, out),
        "seed": args.seed,
        "items": items,
        "transcripts": len(train),
        "model_bytes": sum(path.stat().st_size for path in out.iterdir()),
        "seconds": round(time.time() - started),
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "tokenizers")},
    }
    task.close()
    (out / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    print(f"built {out} in {manifest['seconds']} s")


def write_jsonl(path: Path, transcripts: Iterable[Transcript]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for transcript in transcripts:
            file.write(json.dumps(transcript) + "\n")


def save_tokenizer(
    recipe: Recipe, transcripts: list[Transcript], directory: Path, seed: int
) -> None:
    """Learns the tokenizer on a sample of the transcripts, and writes it with generation config."""
    sample = random.Random(seed).sample(transcripts, min(2000, len(transcripts)))
    messages = itertools.chain.from_iterable(transcript["messages"] for transcript in sample)
    texts = (message["content"] for message in messages)
    tokenizer = train_tokenizer(texts, recipe.vocabulary, recipe.alone)
    tokenizer.save_pretrained(directory)
    generation = {
        "do_sample": True,
        "temperature": 0.7,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def fine_tune(recipe: Recipe, work: Path, seed: int) -> None:
    """Runs `python -m rlds_jax.sft`, which leaves work/model."""
    settings = {
        **recipe.sft,
        "train": work / "train.jsonl",
        "validation": work / "validation.jsonl",
        "tokenizer": work / "tokenizer",
        "seed": seed,
    }
    command = [sys.executable, "-m", "rlds_jax.sft", "--config=configs/sft.py", f"--workdir={work}"]
    command += [f"--config.{name}={value}" for name, value in settings.items()]
    subprocess.run(command, check=True)


def publish(model: Path, out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(model, out)


if __name__ == "__main__":
    main()
