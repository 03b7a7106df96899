"""Gradients summed in buckets while backward is still running.

| file | what it does |
|---|---|
| bucket.py | which slice of which flat buffer is reduced together |
| gradient_buckets.py | hooks that start each bucket during backward; also those of ZeRO |
| reduce_axes.py | over which ranks each gradient is summed |
| reducer.py | slices of a FlatBuffer, all-reduced as backward fills them |
| bucket_errors.py | error feedback kept by parameter, so that it survives other buckets |
| ddp.py, fsdp.py | hooks for torch's DistributedDataParallel and FSDP2 |
"""
