"""A checked layout in, a step that runs out: the arena, the native allocator, generated straight-line code."""
