"""Gradients summed in buckets while backward is still running.

| file | what it does |
|---|---|
| bucket.py, reducer.py | slices of a FlatBuffer, all-reduced as backward fills them |
| bucket_errors.py | error feedback kept by parameter, so that it survives other buckets |
| ddp.py, fsdp.py | hooks for torch's DistributedDataParallel and FSDP2 |
"""
