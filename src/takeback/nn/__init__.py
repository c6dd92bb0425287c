"""Modules whose training saves less memory, and the kernels under them."""
