"""The contract of each kernel: schema, meaning, fake and plain-torch reference; the only importer
of `torch.ops.pyops`.

    table      optimizer_table                         pointers, sizes and dtypes of an optimizer's
                                                       rows
    step       what surrounds the rule of an elementwise optimizer, and the reference of them all
    optim      adam_, adam_from_table_                 one pass over every parameter of an optimizer
    sgd, lion, adagrad                                 the same for these rules: sgd_,
                                                       sgd_from_table_, ...
    frozen_adam  momentum_, frozen_adam_               Adam in two halves, with something in between
    lamb, lars                                         the same in two passes, with each layer's
                                                       norms between them
    adafactor  adafactor_                              the second moment of matrices from their row
                                                       and column means
    grad_norm  squared_norm, squared_norm_from_table   sum of squares and count of non-finite
                                                       elements
    reduce     accumulate_, sum_rows_, scale_cast_     the arithmetic of collectives
    symmetric  symmetric_sum_                          the sum of ranks over symmetric memory
    onebit     onebit_encode_, onebit_reencode_, onebit_decode_, onebit_sum_rows_; onebit_norm,
               onebit_encode_scaled_
    quantize   quantize_encode_, quantize_reencode_, quantize_decode_, quantize_sum_rows_: int8, fp8
    activation  bias_activation, bias_gated            what stands between two linear layers;
                                                       differentiable
    dropout    bias_dropout_add, dropout               the mask drawn in the kernel; differentiable
    rotary     rotary                                  rotary positions; differentiable
    depthwise  depthwise_conv2d                        3 x 3, channels last; differentiable
    few_rows   linear                                  a few rows without gradients, for generation
    prepared   the ops of one decoding step, whose parameters are checked once
    token_attention  token_attention_          one token a row over what is kept, rotary included
    token_blocks  token_blocks_                the blocks of a decoder for one token a row
    fake_quantize  fake_quantize               numbers as few bits would give them back;
                                               differentiable
    batch_norm  batch_norm_moments, batch_norm_apply, batch_norm_sums, batch_norm_input_grad: the
               parts of one, between which ranks exchange sums
    scaled     quantize_rows, row_extents, scale_product, scale_sums_: around a product of int8
    code_rows  code_rows_product, decode_rows          few rows times weights of few bits
    norm       layer_norm, rms_norm, add_layer_norm, add_rms_norm: alone, or after the residual
               addition; differentiable
    cross_entropy  cross_entropy                       the loss; its two kernels are
                                                       cross_entropy_statistics, _gradient
    attention  attention, attention_with_lse           scores made tile by tile; masks, documents,
                                                       layouts, biases, dropout; differentiable
    nm_mask    nm_mask                                 N of each M by magnitude, and bits that say
                                                       which
    csr_product  csr_product                           a sparse matrix times a dense one
    stripe_search  stripe_search                       the order of columns that keeps most of a 2:4
                                                       matrix
    radix_count  radix_count_, keep_bits_              the k-th largest magnitude by counting; masks
                                                       applied in place
    random     philox_uniform_, philox_normal_, philox_dropout_mask_
    symmetric_step  symmetric_adam_from_table_         ZeRO's reduce-scatter, Adam and all-gather in
                                                       one kernel

Each wrapper has the name of its op. `<name>_reference` is the same in plain torch, for tests and
for installations without kernels. The folders of csrc/cpu, csrc/cuda and csrc/math have the names
of those here: a kernel in C++ stands in csrc/cpu/<folder>/<stem>.cpp and
csrc/cuda/<folder>/<stem>.cu, its formula in csrc/math/<folder>; those in Triton in
pyops/ops/triton/<stem>.py.
"""

from pyops.ops import attention, random, symmetric_step
from pyops.ops.codes import code_rows, scaled
from pyops.ops.communication import onebit, quantize, reduce, symmetric
from pyops.ops.decoding import token_attention, token_blocks
from pyops.ops.layers import (
    activation,
    batch_norm,
    cross_entropy,
    depthwise,
    dropout,
    fake_quantize,
    few_rows,
    norm,
    rotary,
)
from pyops.ops.library import build_info, has_kernel, isa, native
from pyops.ops.optimizers import (
    adafactor,
    adagrad,
    frozen_adam,
    grad_norm,
    lamb,
    lars,
    lion,
    optim,
    sgd,
    table,
)
from pyops.ops.sparse import csr_product, nm_mask, radix_count, stripe_search

__all__ = [
    "activation",
    "adafactor",
    "adagrad",
    "attention",
    "batch_norm",
    "build_info",
    "code_rows",
    "cross_entropy",
    "csr_product",
    "depthwise",
    "dropout",
    "fake_quantize",
    "few_rows",
    "frozen_adam",
    "grad_norm",
    "has_kernel",
    "isa",
    "lamb",
    "lars",
    "lion",
    "native",
    "nm_mask",
    "norm",
    "onebit",
    "optim",
    "quantize",
    "radix_count",
    "random",
    "reduce",
    "rotary",
    "scaled",
    "sgd",
    "stripe_search",
    "symmetric",
    "symmetric_step",
    "table",
    "token_attention",
    "token_blocks",
]
