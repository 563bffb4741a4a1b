"""Builds the tiny ScienceWorld policy: demonstrations, tokenizer, supervised training, manifest.

    python -m experiments.tiny_policy.scienceworld.build --out=rlds_jax/models/tiny_scienceworld

Everything follows from --seed; targets.json comes from targets.py. See README.md.
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
from pathlib import Path

from experiments.tiny_policy.build import publish, write_jsonl
from experiments.tiny_policy.demonstrations import Messages
from experiments.tiny_policy.manifest import MANIFEST
from experiments.tiny_policy.scienceworld.actor import BOXES, ROOMS, THINGS
from experiments.tiny_policy.scienceworld.demonstrations import (
    Demonstrator,
    Mixture,
    targets,
    tiny_task,
)
from experiments.tiny_policy.scienceworld.manifest import formats
from experiments.tiny_policy.tokenizer import train_tokenizer

VOCABULARY = 2048
SFT = {
    "epochs": 4,
    "model.hidden_size": 128,
    "model.intermediate_size": 384,
    "model.num_layers": 4,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.rope_theta": 1000.0,
    "batch.rows": 4,
    "batch.row_length": 1024,
    "optimizer.learning_rate": 2e-3,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="model directory to write")
    parser.add_argument("--work", type=Path, default=Path("runs/tiny_scienceworld"))
    parser.add_argument("--items", type=int, default=None, help="train items demonstrated on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="keep the demonstrations of --work")
    args = parser.parse_args()

    started = time.time()
    if not args.keep:
        demonstrate(args.work, args.items, args.seed)
    train = [json.loads(line)["messages"] for line in (args.work / "train.jsonl").open()]
    save_tokenizer(train, args.work / "tokenizer", args.seed)
    fine_tune(args.work, args.seed)
    publish(args.work / "model", args.out)
    manifest = {
        "formats": formats(args.out),
        "seed": args.seed,
        "transcripts": len(train),
        "model_bytes": sum(path.stat().st_size for path in args.out.iterdir()),
        "seconds": round(time.time() - started),
        "versions": {
            name: importlib.metadata.version(name) for name in ("jax", "tokenizers", "scienceworld")
        },
    }
    (args.out / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    print(f"built {args.out} in {manifest['seconds']} s")


def demonstrate(work: Path, items: int | None, seed: int) -> None:
    """Plays, and writes work/train.jsonl and work/validation.jsonl."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    task = tiny_task()
    count = len(task.items("train")) if items is None else items
    try:
        train = Demonstrator(task, Mixture(), seed).transcripts("train", 0, count)
        few = Demonstrator(task, Mixture(originals=1), seed)
        validation = few.transcripts("validation", 0, 20)
    finally:
        task.close()
    write_jsonl(work / "train.jsonl", train)
    write_jsonl(work / "validation.jsonl", validation)


def save_tokenizer(transcripts: list[Messages], directory: Path, seed: int) -> None:
    """Learns the tokenizer on a sample of the transcripts, and writes it with generation config."""
    sample = random.Random(seed).sample(transcripts, min(1500, len(transcripts)))
    texts = (message["content"] for message in itertools.chain.from_iterable(sample))
    names = {target.name for target in targets().values()}
    tokenizer = train_tokenizer(texts, VOCABULARY, sorted({*names, *ROOMS, *BOXES, *THINGS}))
    tokenizer.save_pretrained(directory)
    generation = {
        "do_sample": True,
        "temperature": 0.7,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def fine_tune(work: Path, seed: int) -> None:
    """Runs `python -m rlds_jax.sft`, which leaves work/model."""
    settings = SFT | {
        "train": work / "train.jsonl",
        "validation": work / "validation.jsonl",
        "tokenizer": work / "tokenizer",
        "seed": seed,
    }
    command = [sys.executable, "-m", "rlds_jax.sft", "--config=configs/sft.py", f"--workdir={work}"]
    command += [f"--config.{name}={value}" for name, value in settings.items()]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
