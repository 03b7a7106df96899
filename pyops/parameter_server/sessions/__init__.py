"""Sessions: how a replica and a shard talk, over Gloo and in memory of both.

| file | what |
|---|---|
| session.py | two processes and a group of their own |
| shared_memory.py | what both map where they are on one host |
| line.py | the sessions of a replica with one shard, one after the other |
| turns.py | pushes that share a shard's link |
"""
