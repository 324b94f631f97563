r"""Hugging Face Trainer on a small GPT-2 made from its configuration; resumes from its last whole checkpoint.

rallyrun --standalone --nproc-per-node=2 --max-restarts=3 examples/frameworks/transformers_trainer.py \
    --checkpoint-dir=checkpoints
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

SAMPLES, CONTEXT, VOCABULARY = 384, 16, 64


class Tell(TrainerCallback):
    """Prints each step, on rank 0."""

    def on_step_end(self, args, state, control, **_):  # type: ignore[no-untyped-def]
        """See `TrainerCallback`."""
        if state.is_world_process_zero:
            print(f"step {state.global_step}", flush=True)


def main() -> None:
    """Train from the last checkpoint, if there is one, to the last step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=5, help="steps from one checkpoint to the next")
    parser.add_argument("--checkpoint-dir", type=Path, required=True)
    options = parser.parse_args()

    set_seed(0)
    sizes = {"n_positions": CONTEXT, "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": VOCABULARY}
    without_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **without_dropout, bos_token_id=0, eos_token_id=0))
    texts = torch.randint(VOCABULARY, (SAMPLES, CONTEXT))
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(options.checkpoint_dir),
            max_steps=options.steps,
            save_steps=options.every,
            per_device_train_batch_size=4,
            learning_rate=1e-3,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            logging_steps=options.steps,
        ),
        train_dataset=[{"input_ids": text, "labels": text} for text in texts],
        callbacks=[Tell()],
    )
    # Trainer writes a checkpoint in place, and its trainer_state.json last: without that one it is not whole.
    whole = [each.parent for each in options.checkpoint_dir.glob("checkpoint-*/trainer_state.json")]
    last = max(whole, key=lambda folder: int(folder.name.rpartition("-")[2]), default=None)
    trainer.train(resume_from_checkpoint=None if last is None else str(last))
    weights = sum(parameter.double().abs().sum() for parameter in model.parameters())
    if trainer.is_world_process_zero():
        print(f"final loss {weights:.9f}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
