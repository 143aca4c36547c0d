"""How a run that was told to stop says goodbye: with a checkpoint, and a word on how to go on from it."""

import sys

import lightning as L


def save_at_sigterm(trainer: L.Trainer) -> None:
    """Save `sigterm.ckpt` in the Trainer's folder, on all ranks together, and say so on the screen."""
    path = f"{trainer.default_root_dir}/sigterm.ckpt"
    trainer.save_checkpoint(path, weights_only=False)
    if trainer.is_global_zero:
        say(f"stopped by SIGTERM at step {trainer.global_step}; resume with ckpt_path={path}")


def say(message: str) -> None:
    """Straight to the screen: a log record may be filtered, or lost with a dying process."""
    sys.stderr.write(message + "\n")
    sys.stderr.flush()
