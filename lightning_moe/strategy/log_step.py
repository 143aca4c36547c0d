"""The step at which loggers get their values."""

import lightning as L


def align_log_step(trainer: L.Trainer) -> None:
    """Have loggers get what the coming training batch logs at the number of steps done before it.

    Lightning counts that number apart from its `global_step`. After resuming it is one too low where a checkpoint was
    saved in a validation and none is due now at that batch (another `val_check_interval`), and one too high where one
    was saved in the middle of a batch. To be called as a batch arrives, before callbacks see it.
    """
    loop = trainer.fit_loop.epoch_loop
    # In manual optimization every batch is a step to loggers, however many optimizers step in it.
    loop._batches_that_stepped = (
        trainer.global_step
        if trainer.lightning_module.automatic_optimization
        else loop.batch_progress.total.completed
    )
