"""The arithmetic of collectives: sums, one-bit compression, eight-bit quantization."""
