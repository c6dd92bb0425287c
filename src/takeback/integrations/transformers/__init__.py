"""`TakebackTrainer`: transformers' Trainer with a compiled training step. `TakebackMixin`: the same in front of other
Trainers, such as TRL's. See docs/transformers.md."""

from takeback.integrations.transformers.trainer import TakebackMixin, TakebackTrainer

__all__ = ["TakebackMixin", "TakebackTrainer"]
