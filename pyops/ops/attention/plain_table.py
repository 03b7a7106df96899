"""Where torch's scaled_dot_product_attention is faster for plain attention, by kind of device.

Written by `python -m benchmarks.ops.attention.attention_table`, which measures both and takes
torch's only where it was faster in every round and no less exact; do not edit.
"""

from __future__ import annotations

__all__ = ["FASTER"]

# Kind of device: (dtype, width of a head, causal) -> numbers of queries from which on, and up to
# which, torch's was faster.
FASTER: dict[str, dict[tuple[str, int, bool], tuple[tuple[int, int], ...]]] = {
    "AuthenticAMD AVX512": {
        ("torch.float32", 64, False): (),
        ("torch.float32", 64, True): (),
        ("torch.float32", 128, False): (),
        ("torch.float32", 128, True): (),
        ("torch.bfloat16", 64, False): (),
        ("torch.bfloat16", 64, True): (),
        ("torch.bfloat16", 128, False): (),
        ("torch.bfloat16", 128, True): (),
        ("torch.float16", 64, False): (),
        ("torch.float16", 64, True): (),
        ("torch.float16", 128, False): (),
        ("torch.float16", 128, True): (),
    },
}
