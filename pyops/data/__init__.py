"""Text on disk becomes batches of tokens, the same global batch on any number of ranks.

files --corpus--> bytes --tokenizer--> tokens --prepare--> cache folder --open--> Corpus
                                          |                                        | memory-mapped
                                          `-> pairs of bytes -> bigram             v
                                                                 Batches(corpus.train, ...).next()
                                                                 -> rows [B, T+1]

corpus = prepare(DataConfig(), vocab_size=256, group=group)       # rank 0 builds the cache, the
                                                                  # others wait
batches = Batches(corpus.train, sequence_length=256, global_batch=32, seed=0, rank=rank,
num_ranks=num_ranks)
rows = batches.next()                                             # int64 [32 / num_ranks, 257]
batches.state_dict(), batches.load_state_dict(state)              # the cursor
PackedBatches(corpus, ...).next()                                 # with DataConfig(packing =
                                                                  # "documents"): rows of whole
                                                                  # documents, and where they begin
corpus.bigram_loss                                                # what a byte-bigram model
                                                                  # reaches, nats per byte

load_digits(), load_characters()                             # images of 8 x 8 pixels, to train on
                                                             # and held out
Mixing(mixup=0.8).apply(own, others, ...)                    # images of a step mixed by two, the
                                                             # same ones on any layout
prepare_passages(DataConfig(), vocab_size=1024, length=64)   # code, and which family of modules it
                                                             # is from
"""

from pyops.data.batches import Batches, validation_rows
from pyops.data.bigram import bigram_loss, count_pairs
from pyops.data.cache import Corpus, prepare
from pyops.data.characters import load_characters
from pyops.data.corpus import CorpusError, DataConfig, Document, find_documents
from pyops.data.digits import load_digits
from pyops.data.images import Images, Mixing
from pyops.data.packing import PackedBatches, PackedRows, pack, packed_validation_rows
from pyops.data.passages import Passages, prepare_passages
from pyops.data.tokenizer import ByteTokenizer, PairTokenizer, Tokenizer

__all__ = [
    "Batches",
    "ByteTokenizer",
    "Corpus",
    "CorpusError",
    "DataConfig",
    "Document",
    "Images",
    "Mixing",
    "PackedBatches",
    "PackedRows",
    "PairTokenizer",
    "Passages",
    "Tokenizer",
    "bigram_loss",
    "count_pairs",
    "find_documents",
    "load_characters",
    "load_digits",
    "pack",
    "packed_validation_rows",
    "prepare",
    "prepare_passages",
    "validation_rows",
]
