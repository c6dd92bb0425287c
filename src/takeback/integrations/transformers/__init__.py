"""`TakebackTrainer`: transformers' Trainer with a compiled training step. See docs/transformers.md."""

from takeback.integrations.transformers.trainer import TakebackTrainer

__all__ = ["TakebackTrainer"]
