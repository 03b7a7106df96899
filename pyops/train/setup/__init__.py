"""From a configuration to objects: layout for the ranks at hand, model, data parallelism,
optimizer, state."""
