// The table of this instruction set's kernels, by the name that isa.cpp looks for.
#include "../isa.h"

#define PYOPS_JOIN_(a, b) a##b
#define PYOPS_JOIN(a, b) PYOPS_JOIN_(a, b)
#define PYOPS_TEXT_(a) #a
#define PYOPS_TEXT(a) PYOPS_TEXT_(a)

namespace pyops {
namespace PYOPS_ISA {
#define PYOPS_DECLARE(RULE, NAME) void NAME##_kernel(const StepSpan&, const RULE<float>&);
PYOPS_FOR_EACH_RULE(PYOPS_DECLARE)
void lamb_moments_kernel(const StepSpan&, const Lamb<float>&, double*);
void factor_sums_kernel(const FactoredBand&, double*, double*);
void variance_roots_kernel(const FactoredBand&, float*, float*, double);
double factored_squares_kernel(const FactoredBand&);
void factored_apply_kernel(const FactoredBand&);
double squared_sum_kernel(const void*, int64_t, int);
int64_t count_nonfinite_kernel(const void*, int64_t, int);
void sum_rows_kernel(void*, const void* const*, int, int64_t, int, int, double);
void accumulate_kernel(void*, const void*, int64_t, int, int, double);
void scale_cast_kernel(void*, const void*, int64_t, int, int, double);
bool onebit_encode_kernel(const CodecSpan&, int64_t, int64_t);
bool quantize_encode_kernel(const CodecSpan&, int64_t, int64_t);
void onebit_sum_kernel(const CodecSpan&, int64_t, int64_t);
void quantize_sum_kernel(const CodecSpan&, int64_t, int64_t);
void onebit_encode_scaled_kernel(const CodecSpan&, int64_t, int64_t, float);
void onebit_sums_kernel(const void*, int, const float*, int64_t, double*);
void norm_rows_kernel(const NormRows&, int64_t, int64_t, void*);
void norm_gradient_kernel(const NormGradient&, int64_t, int64_t, void*, void*);
void uniform_kernel(float*, int64_t, uint64_t, uint64_t);
void normal_kernel(float*, int64_t, uint64_t, uint64_t);
void dropout_mask_kernel(uint8_t*, int64_t, float, uint64_t, uint64_t);
void cross_entropy_statistics_kernel(const LogitRows&, bool, void*, int64_t, int64_t);
void cross_entropy_gradient_kernel(const LogitRows&, void*, int64_t, const void*, const void*,
                                   int64_t, int64_t);
void activation_forward_kernel(const ActivationSpan&, int64_t, int64_t);
void activation_backward_kernel(const ActivationSpan&, const RowTile&, double*);
void dropout_kernel(const DropoutSpan&, int64_t, int64_t, uint64_t);
void dropout_backward_kernel(const DropoutSpan&, const RowTile&, uint64_t, double*);
void channel_moments_kernel(const ChannelRows&, const RowTile&, double*, double*);
void channel_sums_kernel(const ChannelRows&, const RowTile&, double*);
void channel_rows_kernel(const ChannelRows&, int64_t, int64_t);
void depthwise_forward_kernel(const DepthwiseSpan&, int64_t, int64_t, void*);
void depthwise_backward_kernel(const DepthwiseSpan&, int64_t, int64_t, double*, void*);
void fake_quantize_kernel(const FakeQuantizeSpan&, int64_t, int64_t);
void fake_quantize_backward_kernel(const FakeQuantizeSpan&, int64_t, int64_t, double*);
void fake_quantize_columns_kernel(const FakeQuantizeSpan&, const RowTile&, double*);
void quantize_rows_kernel(const QuantizedRows&, int64_t, int64_t, float*);
void scale_product_kernel(const ScaledSums&, int64_t, int64_t, float*);
void code_product_kernel(const CodeProduct&, int64_t, int64_t);
void decode_rows_kernel(const CodeRows&, int64_t, int64_t, float*);
void few_rows_kernel(const FewRows&, int64_t, int64_t);
void nm_mask_kernel(const NMSpan&, int64_t, int64_t);
void csr_product_kernel(const CsrSpan&, int64_t, int64_t);
void stripe_windows_kernel(const StripeWindows&, StripeGain*);
void radix_count_kernel(const void*, int64_t, int, int64_t, uint32_t*);
void keep_bits_kernel(void*, const uint8_t*, int64_t, int);
void fixed_rows_kernel(const FixedRows&, int64_t, int64_t);
void fixed_product_kernel(const CodeProduct&, const FixedRows&, int64_t, int64_t);
void token_attention_kernel(const TokenAttention&, int64_t, int64_t, float*);
void rotary_kernel(const RotarySpan&, int64_t, int64_t);
void attention_forward_kernel(const AttentionSpan&, int64_t, void*);
void attention_backward_kernel(const AttentionSpan&, const AttentionGradient&, int64_t, int64_t,
                               int64_t, void*);
void attention_delta_kernel(const AttentionSpan&, const AttentionGradient&, const void*, void*,
                            int64_t);
void narrow_kernel(void*, const double*, int64_t, int);
}  // namespace PYOPS_ISA

extern const Kernels PYOPS_JOIN(kernels_, PYOPS_ISA);
const Kernels PYOPS_JOIN(kernels_, PYOPS_ISA) = {
    PYOPS_TEXT(PYOPS_ISA),
#define PYOPS_ENTRY(RULE, NAME) PYOPS_ISA::NAME##_kernel,
    PYOPS_FOR_EACH_RULE(PYOPS_ENTRY) PYOPS_ISA::lamb_moments_kernel,
    PYOPS_ISA::factor_sums_kernel,
    PYOPS_ISA::variance_roots_kernel,
    PYOPS_ISA::factored_squares_kernel,
    PYOPS_ISA::factored_apply_kernel,
    PYOPS_ISA::squared_sum_kernel,
    PYOPS_ISA::count_nonfinite_kernel,
    PYOPS_ISA::sum_rows_kernel,
    PYOPS_ISA::accumulate_kernel,
    PYOPS_ISA::scale_cast_kernel,
    PYOPS_ISA::onebit_encode_kernel,
    PYOPS_ISA::quantize_encode_kernel,
    PYOPS_ISA::onebit_sum_kernel,
    PYOPS_ISA::quantize_sum_kernel,
    PYOPS_ISA::onebit_encode_scaled_kernel,
    PYOPS_ISA::onebit_sums_kernel,
    PYOPS_ISA::norm_rows_kernel,
    PYOPS_ISA::norm_gradient_kernel,
    PYOPS_ISA::uniform_kernel,
    PYOPS_ISA::normal_kernel,
    PYOPS_ISA::dropout_mask_kernel,
    PYOPS_ISA::cross_entropy_statistics_kernel,
    PYOPS_ISA::cross_entropy_gradient_kernel,
    PYOPS_ISA::activation_forward_kernel,
    PYOPS_ISA::activation_backward_kernel,
    PYOPS_ISA::dropout_kernel,
    PYOPS_ISA::dropout_backward_kernel,
    PYOPS_ISA::rotary_kernel,
    PYOPS_ISA::attention_forward_kernel,
    PYOPS_ISA::attention_backward_kernel,
    PYOPS_ISA::attention_delta_kernel,
    PYOPS_ISA::narrow_kernel,
    PYOPS_ISA::channel_moments_kernel,
    PYOPS_ISA::channel_sums_kernel,
    PYOPS_ISA::channel_rows_kernel,
    PYOPS_ISA::depthwise_forward_kernel,
    PYOPS_ISA::depthwise_backward_kernel,
    PYOPS_ISA::fake_quantize_kernel,
    PYOPS_ISA::fake_quantize_backward_kernel,
    PYOPS_ISA::fake_quantize_columns_kernel,
    PYOPS_ISA::quantize_rows_kernel,
    PYOPS_ISA::scale_product_kernel,
    PYOPS_ISA::code_product_kernel,
    PYOPS_ISA::decode_rows_kernel,
    PYOPS_ISA::few_rows_kernel,
    PYOPS_ISA::nm_mask_kernel,
    PYOPS_ISA::csr_product_kernel,
    PYOPS_ISA::stripe_windows_kernel,
    PYOPS_ISA::radix_count_kernel,
    PYOPS_ISA::keep_bits_kernel,
    PYOPS_ISA::fixed_rows_kernel,
    PYOPS_ISA::fixed_product_kernel,
    PYOPS_ISA::token_attention_kernel,
};

}  // namespace pyops
