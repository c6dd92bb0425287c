"""Batches of texts of many lengths, padded to few: each length of a batch needs a plan of its own, so few are better.

lengths.py    which lengths are best for a data set                          lengths -> few lengths
sampler.py    batches of items of about one length                           lengths -> lists of indices
padding.py    a collate_fn, or one around yours, that pads to these lengths  items -> batch
loader.py     all of it in one line                                          data -> DataLoader
"""

from takeback.bucket.lengths import choose_lengths, lengths_of
from takeback.bucket.loader import loader
from takeback.bucket.padding import PAD_VALUES, Padding, pad
from takeback.bucket.sampler import BatchSampler

__all__ = ["PAD_VALUES", "BatchSampler", "Padding", "choose_lengths", "lengths_of", "loader", "pad"]
