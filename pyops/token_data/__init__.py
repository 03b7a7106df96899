"""Data sets of any size as files of tokens: written once in parallel, mapped, mixed, and read in
the same order on any number of ranks.

text, JSONL, Parquet, Hugging Face datasets --prepare_tokens--> folder of shards
Megatron's .bin/.idx, datatrove's .ds, .npy --------------------------|
                                                     open_tokens      v
    Tokens -> SequenceRows or packed_rows -> TokenSource(weight) -> TokenBatches -> Prefetched

tokens = open_tokens("tokens/web")                    # nothing is read yet
rows = SequenceRows(tokens, sequence_length=1024)     # or packed_rows: whole documents
batches = TokenBatches([TokenSource(rows, digest=tokens.digest)], global_batch=32, seed=0)
batch = Prefetched(batches).next()                    # {"tokens_BT": int64 [32, 1024], ...}
"""

from pyops.token_data.batches import TokenBatches, TokenSource, held_out_places, held_out_rows
from pyops.token_data.formats import open_tokens
from pyops.token_data.mixture import Mixture
from pyops.token_data.permutation import Permutation
from pyops.token_data.prefetching import BatchStream, Prefetched
from pyops.token_data.preparing import Prepared, PrepareOptions, prepare_tokens
from pyops.token_data.rows import Rows, SequenceRows, packed_rows
from pyops.token_data.shard_index import Shard, ShardIndex, tokenizer_digest
from pyops.token_data.shard_writing import ShardWriter, TokenKind
from pyops.token_data.sources import Chunk, Source, chunks_of, find_sources
from pyops.token_data.tokens import Part, Tokens
from pyops.token_data.user_batches import RankStates, UserBatches

__all__ = [
    "BatchStream",
    "Chunk",
    "Mixture",
    "Part",
    "Permutation",
    "Prefetched",
    "PrepareOptions",
    "Prepared",
    "RankStates",
    "Rows",
    "SequenceRows",
    "Shard",
    "ShardIndex",
    "ShardWriter",
    "Source",
    "TokenBatches",
    "TokenKind",
    "TokenSource",
    "Tokens",
    "UserBatches",
    "chunks_of",
    "find_sources",
    "held_out_places",
    "held_out_rows",
    "open_tokens",
    "packed_rows",
    "prepare_tokens",
    "tokenizer_digest",
]
