"""Models made smaller: distilled, pruned, quantized."""
