// Stands in for torch's header where host code is checked that looks at devices, of which a test
// has none: a tensor that says of itself where it is.
#pragma once
#include <cstdint>

using AtenTensorHandle = const void*;
inline int aoti_torch_get_dtype(AtenTensorHandle, int32_t* dtype) { return *dtype = 0; }
inline int32_t aoti_torch_dtype_uint8() { return 0; }
#define TORCH_ERROR_CODE_CHECK(call) static_cast<void>(call)

namespace torch::stable {

struct Tensor {
    int device;  // -1: the CPU
    int64_t count;
    bool is_cuda() const { return device >= 0; }
    int get_device_index() const { return device; }
    bool is_contiguous() const { return true; }
    int64_t numel() const { return count; }
    void* data_ptr() const { return const_cast<Tensor*>(this); }
    AtenTensorHandle get() const { return this; }
};

}  // namespace torch::stable
