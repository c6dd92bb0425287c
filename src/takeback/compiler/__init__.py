"""The step compiler, a folder for each stage in the order in which they run; `program.py` is what they hand on.

capture    the user's step becomes a `Program`
ownership  lifetimes, what each op may overwrite, the borrow check
passes     from `Draft` to `Draft`: what is moved, rebuilt, overwritten, packed
plan       integers only: what to rebuild, and where everything lies; each with a checker of its own
run        executors, the transaction of a step, the proof against eager
explain    the account of every byte
"""
