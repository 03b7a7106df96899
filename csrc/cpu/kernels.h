// The CPU kernels: plain loops over raw memory, single-threaded, no torch. One table per
// instruction set (isa.h); `kernels()` is the one in use. Both _C.so and _native link them. Dtypes
// are codes of math/optimizers/table.h: 0 fp32, 1 bf16, 2 fp16, 3 fp64.
#pragma once
#include <cstdint>

#include "../math/optimizers/adafactor.h"
#include "../math/optimizers/adagrad.h"
#include "../math/optimizers/adam.h"
#include "../math/optimizers/frozen_adam.h"
#include "../math/optimizers/lamb.h"
#include "../math/optimizers/lion.h"
#include "../math/layers/norm.h"
#include "../math/optimizers/sgd.h"
#include "../math/optimizers/table.h"
#include "layers/activation.h"
#include "attention/attention.h"
#include "layers/batch_norm.h"
#include "layers/depthwise.h"
#include "layers/few_rows.h"
#include "codes/fixed_rows.h"
#include "decoding/token_attention.h"
#include "sparse/csr_product.h"
#include "sparse/nm_mask.h"
#include "sparse/stripe_search.h"
#include "layers/fake_quantize.h"
#include "../host/communication/codec.h"
#include "codes/code_rows.h"
#include "layers/logits.h"
#include "layers/dropout.h"
#include "layers/rotary.h"
#include "codes/scaled.h"

namespace pyops {

// A stretch of one row of the optimizer's table: the same `n` elements of each tensor.
struct StepSpan {
    void *param, *grad, *exp_avg, *exp_avg_sq, *max, *master, *copy;  // null where absent
    int64_t n;
    int64_t packed;  // dtypes, as in the table
    bool zero_grad, stochastic_rounding;
    // The step moves more than the caches hold: what is only written may go past them
    bool streams;
    uint64_t seed, index;  // for stochastic rounding: key, and global index of the first element
    uint32_t step;
};

// Every elementwise optimizer of csrc/math: (functor, its name here).
#define PYOPS_FOR_EACH_RULE(X)   \
    X(Adam, adam)                \
    X(PlainSgd, plain_sgd)       \
    X(MomentumSgd, momentum_sgd) \
    X(Lion, lion)                \
    X(Adagrad, adagrad)          \
    X(FrozenAdam, frozen_adam)   \
    X(Momentum, momentum)        \
    X(LambApply, lamb_apply)

// Some whole rows of a matrix that Adafactor steps, or a part of a vector (one row).
struct FactoredBand {
    StepSpan span;
    int64_t rows, columns;
    const float *row_roots, *column_roots;  // of the band's rows and columns
    Factored<float> rule;
};

// Rows of a layer norm or a root-mean-square norm, contiguous. T: double where `dtype` is float64,
// else float.
struct NormRows {
    const void *x, *residual;  // residual: null where there is none
    void *sum, *y;             // of `dtype`; sum: null without a residual
    const void *scale, *bias;  // T[width]; bias may be null
    void *mean, *rstd;         // T, one for each row; mean is not written when `rms`
    int64_t width;
    int x_dtype, residual_dtype, dtype;  // x and residual may differ when `dtype` is fp32
    double eps;
    bool rms;
    bool streams;  // the results are more than the caches hold: they may go past them
};
struct NormGradient {
    // Of `dtype`; x: what was normalised; dsum: null, or what is added to dx
    const void *dy, *dsum, *x;
    void* dx;
    const void *scale, *mean, *rstd;  // T
    int64_t width;
    int dtype;
    bool rms, streams;
};

struct Kernels {
    const char* name;

    // One step over a stretch of a row.
#define PYOPS_MEMBER(RULE, NAME) void (*NAME)(const StepSpan& span, const RULE<float>& rule);
    PYOPS_FOR_EACH_RULE(PYOPS_MEMBER)
#undef PYOPS_MEMBER

    // LAMB's first pass over a stretch of a row: moments, and in `squared_norms` the sums of
    // squares of parameter and update.
    void (*lamb_moments)(const StepSpan& span, const Lamb<float>& rule, double* squared_norms);

    // Adafactor: sums of the squared gradient by row and by column; a vector's variance, moved by
    // `weight`, and its roots; the sum of the squared update; the step.
    void (*factor_sums)(const FactoredBand& band, double* row_sums, double* column_sums);
    void (*variance_roots)(const FactoredBand& band, float* variance, float* roots, double weight);
    double (*factored_squares)(const FactoredBand& band);
    void (*factored_apply)(const FactoredBand& band);

    // Sum of squares in float64 in an order that depends on n alone, and the number of inf and nan.
    double (*squared_sum)(const void* data, int64_t n, int dtype);
    int64_t (*count_nonfinite)(const void* data, int64_t n, int dtype);

    // out = round(scale * ((rows[0] + rows[1]) + ...)), out may be one of the rows. fp64 goes with
    // fp64 only.
    void (*sum_rows)(void* out, const void* const* rows, int num_rows, int64_t n, int dtype_out,
                     int dtype_in, double scale);
    // out = round(scale * (out + a)) and out = round(scale * a)
    void (*accumulate)(void* out, const void* a, int64_t n, int dtype_out, int dtype_in,
                       double scale);
    void (*scale_cast)(void* out, const void* a, int64_t n, int dtype_out, int dtype_in,
                       double scale);

    // Blocks [first, last): encode u = source + error into the payload and keep what is lost in the
    // error. Returns whether a number was not finite; its block gets the scale nan and keeps its
    // error.
    bool (*onebit_encode)(const CodecSpan& span, int64_t first, int64_t last);
    bool (*quantize_encode)(const CodecSpan& span, int64_t first, int64_t last);
    // Blocks [first, last): out (+)= the sum of rows.
    void (*onebit_sum)(const CodecSpan& span, int64_t first, int64_t last);
    void (*quantize_sum)(const CodecSpan& span, int64_t first, int64_t last);
    // With one scale for all: bits and errors of elements [begin, end), begin a multiple of 8; and
    // what a scale is made of, of all n:
    // sums[0] of |u|, [1] of u^2, [2] the number of those not finite.
    void (*onebit_encode_scaled)(const CodecSpan& span, int64_t begin, int64_t end, float scale);
    void (*onebit_sums)(const void* x, int dtype, const float* error, int64_t n, double* sums);

    // Rows [begin, end) of a norm; `scratch`: 2 width T. Its gradient, which adds to dscale and
    // dbias, T[width] (dbias: unless rms).
    void (*norm_rows)(const NormRows& rows, int64_t begin, int64_t end, void* scratch);
    void (*norm_gradient)(const NormGradient& rows, int64_t begin, int64_t end, void* dscale,
                          void* dbias);

    // Elements index, index + 1, ... of the stream `key`.
    void (*uniform)(float* out, int64_t n, uint64_t key, uint64_t index);
    void (*normal)(float* out, int64_t n, uint64_t key, uint64_t index);
    void (*dropout_mask)(uint8_t* out, int64_t n, float p, uint64_t key, uint64_t index);

    // Rows [begin, end). Statistics: [rows, 3], or 4 with_sum, of fp32 (fp64 for fp64). Gradient:
    // from maxima [rows] and coefficients [rows, 3]; out may be the logits.
    void (*cross_entropy_statistics)(const LogitRows& rows, bool with_sum, void* out, int64_t begin,
                                     int64_t end);
    void (*cross_entropy_gradient)(const LogitRows& rows, void* out, int64_t out_stride,
                                   const void* maxima, const void* coefficients, int64_t begin,
                                   int64_t end);
    // y = act(x + bias), elements [begin, end) of y; dx of a tile and, unless null, its sums over
    // rows added to the block's.
    void (*activation_forward)(const ActivationSpan& span, int64_t begin, int64_t end);
    void (*activation_backward)(const ActivationSpan& span, const RowTile& tile, double* sums);
    // out = residual + dropout(x + bias), elements [begin, end), the first of which has the global
    // index `index`; the derivative of a tile with its sums, likewise. offset: index of the matrix'
    // first element.
    void (*dropout)(const DropoutSpan& span, int64_t begin, int64_t end, uint64_t index);
    void (*dropout_backward)(const DropoutSpan& span, const RowTile& tile, uint64_t offset,
                             double* sums);
    // Heads [first, last) of [B, T, H]
    void (*rotary)(const RotarySpan& span, int64_t first, int64_t last);
    // A block of queries of a head; a tile of keys of a group of heads; the sum of dy y, less dlse
    // (or null), of query `row` of [B, T], for all heads.
    void (*attention_forward)(const AttentionSpan& span, int64_t item, void* scratch);
    void (*attention_backward)(const AttentionSpan& span, const AttentionGradient& grad, int64_t b,
                               int64_t g, int64_t tile, void* scratch);
    void (*attention_delta)(const AttentionSpan& span, const AttentionGradient& grad,
                            const void* dlse, void* out, int64_t row);
    // out = round(from)
    void (*narrow)(void* out, const double* from, int64_t n, int dtype);
    // Mean and squared distances of a tile's columns; the sums of dy and of dy (x - centre), added
    // to [2, channels]; rows [first, last) normalized, or with dy the gradient of the input.
    void (*channel_moments)(const ChannelRows& rows, const RowTile& tile, double* mean,
                            double* squares);
    void (*channel_sums)(const ChannelRows& rows, const RowTile& tile, double* sums);
    void (*channel_rows)(const ChannelRows& rows, int64_t first, int64_t last);
    // Rows [first, last) of all images' outputs; rows [first, last) of their inputs, with the sums
    // of the taps and of the bias, [10, channels], added to `sums` unless that is null. scratch:
    // depthwise_scratch numbers.
    void (*depthwise_forward)(const DepthwiseSpan& span, int64_t first, int64_t last,
                              void* scratch);
    void (*depthwise_backward)(const DepthwiseSpan& span, int64_t first, int64_t last, double* sums,
                               void* scratch);
    // Numbers [begin, end); of runs, pieces [first, last) of all runs, each piece's sum for its
    // scale in `sums`; of rows, a tile, whose sums [channels] are added to. sums: null unless
    // wanted.
    void (*fake_quantize)(const FakeQuantizeSpan& span, int64_t begin, int64_t end);
    void (*fake_quantize_backward)(const FakeQuantizeSpan& span, int64_t first, int64_t last,
                                   double* sums);
    void (*fake_quantize_columns)(const FakeQuantizeSpan& span, const RowTile& tile, double* sums);
    // Rows [first, last): codes and scales of them, or their extents; numbers of int32 sums.
    // scratch: width numbers.
    void (*quantize_rows)(const QuantizedRows& rows, int64_t first, int64_t last, float* scratch);
    void (*scale_product)(const ScaledSums& rows, int64_t first, int64_t last, float* scratch);
    // Outputs [first, last) of all rows.
    void (*code_product)(const CodeProduct& rows, int64_t first, int64_t last);
    // Rows [first, last) of codes as numbers. scratch: width numbers.
    void (*decode_rows)(const CodeRows& rows, int64_t first, int64_t last, float* scratch);
    // Outputs [first, last) of all rows.
    void (*few_rows)(const FewRows& all, int64_t first, int64_t last);
    // Units [first, last) of a tensor [units, M, inner]; they begin where a byte of the bits does.
    void (*nm_mask)(const NMSpan& span, int64_t first, int64_t last);
    // Rows [first, last) of a sparse matrix times a dense one.
    void (*csr_product)(const CsrSpan& span, int64_t first, int64_t last);
    // What is best of STRIPE_LANES windows of two stripes.
    void (*stripe_windows)(const StripeWindows& windows, StripeGain* gains);
    // Adds the counts of magnitudes: of the upper 15 bits below the sign (prefix < 0), even and odd
    // numbers in the first and second half of `counts`, or of the lower 16 bits of those whose
    // upper ones are `prefix`. And sets what has no bit to 0, from a byte's first bit on.
    void (*radix_count)(const void* data, int64_t n, int dtype, int64_t prefix, uint32_t* counts);
    void (*keep_bits)(void* data, const uint8_t* bits, int64_t n, int dtype);
    // Rows [first, last) as whole numbers; outputs [first, last) of all rows times whole numbers.
    void (*fixed_rows)(const FixedRows& rows, int64_t first, int64_t last);
    void (*fixed_product)(const CodeProduct& rows, const FixedRows& x, int64_t first, int64_t last);
    // Pieces [first, last) of rows x groups. scratch: width and the greatest place + 1 numbers.
    void (*token_attention)(const TokenAttention& all, int64_t first, int64_t last, float* scratch);
};

const Kernels& kernels();

#define PYOPS_STEP(RULE, NAME)                                                                     \
    inline void step_span(const Kernels& kernels, const StepSpan& span, const RULE<float>& rule) { \
        kernels.NAME(span, rule);                                                                  \
    }
PYOPS_FOR_EACH_RULE(PYOPS_STEP)
#undef PYOPS_STEP

// Whether this build and this machine have the instruction set; switch to it (false: they don't,
// and nothing is changed).
bool has_isa(const char* name);
bool use_isa(const char* name);

}  // namespace pyops
