"""Which rank has which part of which parameter, and the memory that holds it.

| file | what it does |
|---|---|
| partition.py | buckets, chunks and pieces: pure arithmetic |
| parameters.py | stages 1 and 2: parameters in flat buffers, whole on every rank |
| units.py, sharded.py | stage 3: the units that are gathered together, and their shards |
| parameter_file.py | shards in a file |
| shard_range.py | a piece as a range of the flattened tensor, as checkpoints name it |
| materialise.py | models that were made on the meta device |
| wire.py | quantized collectives and gathers within a small group: ZeRO++ |
"""
