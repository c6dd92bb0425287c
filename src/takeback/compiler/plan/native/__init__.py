"""C++ of planning, compiled into the cache when it is first needed."""
