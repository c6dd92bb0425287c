"""The native sources that `takeback.run.allocator` compiles on first use; nothing here is imported."""
