"""Fine-tunes a policy on chat transcripts: the cold start before reinforcement learning.

    python -m rlds_jax.sft --config=configs/sft.py --config.train=demos.jsonl \
        --config.tokenizer=my_tokenizer --workdir=runs/sft

The loss is the token mean over assistant messages. `workdir/model` becomes a Hugging Face
directory, `workdir/tensorboard` holds the curves. The transcript format is in transcripts.py.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from ml_collections import ConfigDict

from rlds_jax import batch as batching
from rlds_jax import commands, losses, transcripts, update
from rlds_jax import workdir as workdirs
from rlds_jax.batch import Batch, BatchLayout, TokenSequence
from rlds_jax.events import Events
from rlds_jax.models import qwen3, weights
from rlds_jax.models.config import ModelConfig
from rlds_jax.rollouts.chat import ChatFormat

SAVE_DTYPES = ("bfloat16", "float16", "float32")

Rows = list[list[TokenSequence]]


class Diverged(RuntimeError):
    """Loss or gradients stopped being finite."""


class FineTuning:
    """One run: data, state and the loop.

    Args:
      config: see configs/sft.py.
      workdir: created if absent.

    Raises:
      OSError: a file of the config cannot be read, or the workdir not made.
      ValueError: the config or the data does not hold; the message names the field or the line.
    """

    def __init__(self, config: ConfigDict, workdir: Path):
        self.workdir = workdir
        self.config = config
        if config.epochs < 1 or config.seed < 0:
            raise ValueError(
                f"config.epochs is {config.epochs} and config.seed {config.seed}; they must be at "
                "least 1 and 0"
            )
        if config.save_dtype not in SAVE_DTYPES:
            raise ValueError(f"config.save_dtype is {config.save_dtype!r}; use {SAVE_DTYPES}")
        self.layout = BatchLayout(**config.batch)
        self.tokenizer = Path(config.tokenizer or config.init or "")
        if not (config.tokenizer or config.init):
            raise ValueError("set config.tokenizer or config.init to a Hugging Face directory")
        self.random = np.random.default_rng(config.seed)
        self.train = self._read("train")
        self.validation = self._read("validation") if config.validation else []
        self.model, params = self._initialise()
        self._check_vocabulary()
        workdir.mkdir(parents=True, exist_ok=True)
        workdirs.keep_compilations(workdir)

        rows = self.layout.rows * self.layout.max_micro
        self.steps = config.epochs * -(-len(self.train) // rows)
        optimizer = update.OptimizerConfig(**config.optimizer, total_steps=self.steps)
        compute = update.ComputeConfig(**config.compute)
        loss = losses.LossConfig(kl="off")
        self.state = update.init_state(
            params, update.make_optimizer(optimizer), jax.random.key(config.seed)
        )
        self._update = update.make_update(self.model, optimizer, loss, compute)
        self._logprobs = update.make_logprobs(self.model, compute)

    def run(self) -> dict[str, float]:
        """Trains, validates after every epoch, and saves.

        Returns:
          The last metrics by name.

        Raises:
          Diverged: the loss or a gradient was not finite.
        """
        metrics: dict[str, float] = {}
        writer = Events(self.workdir / "tensorboard")
        with tqdm.tqdm(total=self.steps, unit="step", dynamic_ncols=True) as bar:
            pending: list[update.Outcome] = []
            for epoch in range(self.config.epochs):
                for batch in batches(self.train, self.layout, self.random):
                    self.state, outcome = self._update(self.state, None, batch)
                    pending.append(outcome)
                    if len(pending) == self.config.log_every:
                        metrics |= self._log(writer, bar, pending)
                metrics |= self._log(writer, bar, pending)
                if self.validation:
                    metrics["val/loss"] = self.evaluate()
                    writer.scalars(bar.n, {"val/loss": metrics["val/loss"]})
                    bar.write(f"epoch {epoch + 1}: validation loss {metrics['val/loss']:.4f}")
        writer.close()
        self.save()
        return metrics

    def evaluate(self) -> float:
        """Token mean of the NLL over the validation transcripts."""
        total, count = 0.0, 0.0
        for batch in batches(self.validation, self.layout):
            logprobs = np.asarray(self._logprobs(self.state.params, batch))
            mask = batch.nll_weight > 0
            total -= float(np.sum(logprobs, where=mask))
            count += float(np.sum(mask))
        return total / count

    def save(self) -> None:
        """Writes workdir/model: weights, config, tokenizer and chat template."""
        weights.save(
            self.state.params,
            self.model,
            self.workdir / "model",
            jnp.dtype(self.config.save_dtype),
            source=self.tokenizer,
        )

    def _read(self, split: str) -> Rows:
        """Reads, tokenises and packs one file; what does not fit a row is dropped and counted."""
        path = self.config[split]
        if not path:
            raise ValueError(f"set config.{split} to a jsonl file of transcripts")
        parsed = list(transcripts.read(path))
        roles = {message["role"] for each in parsed for message in each.messages}
        chat = ChatFormat.from_directory(
            self.tokenizer, [role for role in ("user", "tool") if role in roles]
        )
        progress = tqdm.tqdm(parsed, desc=f"tokenising {split}", leave=False, dynamic_ncols=True)
        sequences = [transcripts.tokenise(each, chat) for each in progress]
        fitting = [s for s in sequences if s.positions <= self.layout.row_length]
        if not fitting:
            raise ValueError(f"{path}: no transcript fits config.batch.row_length")
        order = self.random.permutation(len(fitting))
        rows = batching.first_fit([fitting[i] for i in order], self.layout.row_length)
        filled = sum(s.positions for s in fitting) / (len(rows) * self.layout.row_length)
        print(
            f"{split}: {len(fitting)} transcripts in {len(rows)} rows, {filled:.0%} full; "
            f"{len(sequences) - len(fitting)} longer than a row were dropped"
        )
        return rows

    def _initialise(self) -> tuple[ModelConfig, qwen3.Params]:
        """The model of config.init, or a fresh one of config.model."""
        if self.config.init:
            return weights.load(self.config.init)
        fields = dict(self.config.model)
        if not fields["vocab_size"]:
            vocabulary = json.loads((self.tokenizer / "tokenizer.json").read_text())
            ids = [*vocabulary["model"]["vocab"].values()]
            fields["vocab_size"] = 1 + max(ids + [t["id"] for t in vocabulary["added_tokens"]])
        model = ModelConfig(**fields)
        return model, qwen3.init_params(model, jax.random.key(self.config.seed))

    def _check_vocabulary(self) -> None:
        largest = max(int(s.tokens.max()) for row in self.train + self.validation for s in row)
        if largest >= self.model.vocab_size:
            raise ValueError(
                f"token id {largest} is outside the model's vocabulary of {self.model.vocab_size}; "
                "tokenizer and model do not match"
            )

    def _log(self, writer: Events, bar: tqdm.tqdm, pending: list) -> dict[str, float]:
        """Brings the pending outcomes to the host; returns the last one's metrics."""
        metrics: dict[str, float] = {}
        for outcome in pending:
            named = update.metrics(outcome)
            if named["actor/update_nonfinite"]:
                raise Diverged(
                    f"step {bar.n}: loss or gradient is not finite; lower "
                    "config.optimizer.learning_rate"
                )
            metrics = {
                "train/loss": named["actor/nll_loss"],
                "train/grad_norm": named["actor/grad_norm"],
                "train/lr": named["actor/lr"],
            }
            writer.scalars(bar.n, metrics)
            bar.update()
        if pending:
            bar.set_postfix(loss=f"{metrics['train/loss']:.4f}")
        pending.clear()
        return metrics


def batches(
    rows: Sequence[Sequence[TokenSequence]],
    layout: BatchLayout,
    random: np.random.Generator | None = None,
) -> Iterator[Batch]:
    """One pass over packed rows, in random order if given; each batch's weights sum to one."""
    order = np.arange(len(rows)) if random is None else random.permutation(len(rows))
    size = layout.rows * layout.max_micro
    for start in range(0, len(rows), size):
        batch = batching.lay_out([rows[i] for i in order[start : start + size]], layout)
        yield dataclasses.replace(batch, nll_weight=batch.nll_weight / batch.nll_weight.sum())


def main(config: ConfigDict, workdir: Path) -> None:
    with commands.refuse_bad_input():
        run = FineTuning(config, workdir)
    metrics = run.run()
    print(", ".join(f"{name} {value:.4g}" for name, value in metrics.items()))
    print(f"saved {run.workdir / 'model'}")


if __name__ == "__main__":
    commands.run(main)
