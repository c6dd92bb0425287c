"""Whose bytes they are and how long: lifetimes, what each op may overwrite, and the borrow check on a final plan."""
