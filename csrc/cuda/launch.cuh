// How a kernel is put on the device: torch's current stream, the tensor's device, a grid that just
// fills it, errors.
//
// The extension links neither libtorch_cuda nor libcudart.so: one build serves machines with and
// without a GPU. torch's current stream is therefore looked up at run time, in the libtorch_cuda
// that is in the process whenever a CUDA tensor is; the runtime is linked statically and shares the
// device's primary context with torch's own.
#pragma once

#include <cuda_runtime.h>
#include <dlfcn.h>

#include <atomic>
#include <cstdint>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

namespace pyops::cuda {

constexpr int MAX_DEVICES = 64;

inline void check(cudaError_t error, const char* what) {
    STD_TORCH_CHECK(error == cudaSuccess, "pyops: ", what, ": ", cudaGetErrorName(error), ": ",
                    cudaGetErrorString(error));
}

// After every launch: a bad configuration, or an architecture that this build holds no code for,
// shows here.
inline void check_launch(const char* op) { check(cudaGetLastError(), op); }

using StreamLookup = int32_t (*)(int32_t device, void** stream);

inline StreamLookup find_stream_lookup() {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    STD_TORCH_CHECK(library != nullptr,
                    "pyops: a CUDA kernel was called, but libtorch_cuda.so is not in this process: "
                    "install a CUDA build of torch");
    auto lookup =
        reinterpret_cast<StreamLookup>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
    STD_TORCH_CHECK(
        lookup != nullptr,
        "pyops: this torch has no aoti_torch_get_current_cuda_stream; torch >= 2.11 is needed");
    return lookup;
}

inline cudaStream_t current_stream(int device) {
    static const StreamLookup lookup = find_stream_lookup();
    void* stream = nullptr;
    STD_TORCH_CHECK(lookup(device, &stream) == 0,
                    "pyops: torch gave no current stream for cuda:", device);
    return static_cast<cudaStream_t>(stream);
}

// An op comes here when any of its tensors is on a GPU, say a learning rate beside parameters on
// the CPU.
inline int device_of(const torch::stable::Tensor& on) {
    STD_TORCH_CHECK(on.is_cuda(),
                    "pyops: the operands are on the CPU, but one of the scalars beside them is on "
                    "a GPU; move it");
    return on.get_device_index();
}

// The device of a tensor made current for as long as this lives, with torch's current stream there.
class Launch {
public:
    explicit Launch(const torch::stable::Tensor& on)
        : device(device_of(on)), guard_(device), stream(current_stream(device)) {}
    Launch(const Launch&) = delete;
    Launch& operator=(const Launch&) = delete;

    const int device;

private:
    torch::stable::accelerator::DeviceGuard guard_;

public:
    const cudaStream_t stream;
};

// How many CTAs of `kernel` the device holds at once: the grid of a persistent kernel. Asked once
// per kernel and device.
template <auto kernel>
int resident_ctas(int device, int threads) {
    static std::atomic<int> known[MAX_DEVICES];
    STD_TORCH_CHECK(device >= 0 && device < MAX_DEVICES, "pyops: cuda:", device, " is beyond the ",
                    MAX_DEVICES, " devices known");
    int ctas = known[device].load(std::memory_order_relaxed);
    if (ctas == 0) {
        int multiprocessors = 0, each = 0;
        check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
              "multiprocessor count");
        check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, threads, 0),
              "occupancy");
        STD_TORCH_CHECK(each > 0, "pyops: no CTA of ", threads, " threads fits on cuda:", device);
        ctas = multiprocessors * each;
        known[device].store(ctas, std::memory_order_relaxed);
    }
    return ctas;
}

// A grid for `work` CTAs' worth of work: never more than are resident, never none.
template <auto kernel>
unsigned grid_for(int64_t work, int device, int threads) {
    const int64_t resident = resident_ctas<kernel>(device, threads);
    return static_cast<unsigned>(work < 1 ? 1 : (work < resident ? work : resident));
}

}  // namespace pyops::cuda
