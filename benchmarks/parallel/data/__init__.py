"""Data parallelism, ZeRO and offload: time, and what each rank keeps."""
