// What the kernels of the codecs are given (onebit_kernel.cpp, quantize_kernel.cpp): raw memory, no
// torch.
//
//   payload  [fp32 scale of each block][bits or codes]  no address in it need be a multiple of 4
//   source   x, or the sum of several payloads (`rows`), and then the error, if any:
//            u = source + error
#pragma once
#include <cstdint>

namespace pyops {

struct CodecSpan {
    int64_t n = 0, block = 1;
    // the source
    const void* x = nullptr;  // null: the rows
    int dtype = 0;
    const uint8_t* const* rows = nullptr;
    int num_rows = 0;
    const float* row_scales = nullptr;  // of rows without scales of their own, one each
    float scale = 1.0f;                 // of the sum of rows
    float* error = nullptr;
    // the target: a payload, or numbers
    uint8_t* payload = nullptr;
    void* out = nullptr;
    int dtype_out = 0;
    bool accumulate = false;
    bool streams = false;  // `out` is more than the caches hold: it may go past them
    // how
    int rule = 0;  // OneBitRule, or Format
    bool stochastic_rounding = false;
    uint64_t seed = 0, offset = 0;

    int64_t blocks() const { return (n + block - 1) / block; }
};

}  // namespace pyops
