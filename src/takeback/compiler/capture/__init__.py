"""The user's step in, one `Program` out: every op with the role of every buffer, and guards on what was baked in."""
