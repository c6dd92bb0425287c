"""The user's step in, one `Program` out: ops, the role of every buffer, and what is assumed of the Python world."""
