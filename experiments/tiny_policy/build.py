"""Builds the bundled tiny policy: demonstrations, tokenizer, supervised training, manifest.

    python -m experiments.tiny_policy.build --out=rlds_jax/models/tiny

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

from experiments.tiny_policy.demonstrations import Demonstrator, Messages, Mixture, tiny_task
from experiments.tiny_policy.manifest import MANIFEST, formats
from experiments.tiny_policy.tokenizer import train_tokenizer

VOCABULARY = 1536
SFT = {
    "epochs": 1,
    "model.hidden_size": 128,
    "model.intermediate_size": 384,
    "model.num_layers": 4,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.rope_theta": 300.0,
    "batch.rows": 8,
    "optimizer.learning_rate": 1.5e-3,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="model directory to write")
    parser.add_argument("--work", type=Path, default=Path("runs/tiny_policy"))
    parser.add_argument("--items", type=int, default=9_000, help="train items demonstrated on")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    started = time.time()
    shutil.rmtree(args.work, ignore_errors=True)
    args.work.mkdir(parents=True)
    demonstrator = Demonstrator(tiny_task(), Mixture(), args.seed)
    train = list(demonstrator.transcripts("train", 0, args.items))
    write_jsonl(args.work / "train.jsonl", train)
    validation = demonstrator.transcripts("validation", 0, 100)
    write_jsonl(args.work / "validation.jsonl", validation)
    save_tokenizer(train, args.work / "tokenizer", args.seed)
    fine_tune(args.work, args.seed)
    publish(args.work / "model", args.out)
    manifest = {
        "formats": formats(args.out),
        "seed": args.seed,
        "items": args.items,
        "transcripts": len(train),
        "model_bytes": sum(path.stat().st_size for path in args.out.iterdir()),
        "seconds": round(time.time() - started),
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "tokenizers")},
    }
    (args.out / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    print(f"built {args.out} in {manifest['seconds']} s")


def write_jsonl(path: Path, transcripts: Iterable[Messages]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for messages in transcripts:
            file.write(json.dumps({"messages": messages}) + "\n")


def save_tokenizer(transcripts: list[Messages], directory: Path, seed: int) -> None:
    """Learns the tokenizer on a sample of the transcripts, and writes it with generation config."""
    sample = random.Random(seed).sample(transcripts, min(2000, len(transcripts)))
    texts = (message["content"] for message in itertools.chain.from_iterable(sample))
    tokenizer = train_tokenizer(texts, VOCABULARY)
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


def publish(model: Path, out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(model, out)


if __name__ == "__main__":
    main()
