"""The native sources that `takeback.compiler.run.allocator` compiles on first use; nothing here is imported."""
