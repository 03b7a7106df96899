"""What a checkpoint gets of a ZeroOptimizer, and the bytes that a rank keeps."""
