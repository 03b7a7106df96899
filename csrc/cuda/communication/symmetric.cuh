// What ops over symmetric memory check on the host before their kernels meet.
#pragma once
#include "../../host/optimizers/table.h"
#include "../launch.cuh"
#include "symmetric_meeting.cuh"

namespace pyops::cuda {

// The arguments that such ops share.
struct MeetingArguments {
    const Tensors* pads;
    const Tensor* failure;
    int64_t rank, ctas, timeout_ns;
};

// A word of the host's memory, as the device addresses it.
inline uint32_t* failure_word(const Tensor& failure, const char* op) {
    require(failure.scalar_type() == torch::headeronly::ScalarType::Int && failure.numel() == 1,
            "pyops::", op, ": failure must be one int32, got ", Shape{failure});
    cudaPointerAttributes found{};
    check(cudaPointerGetAttributes(&found, failure.data_ptr()), op);
    require(found.devicePointer != nullptr, "pyops::", op,
            ": failure must lie in pinned memory, where the host sees what the device writes");
    return static_cast<uint32_t*>(found.devicePointer);
}

inline Peers peers_of(const MeetingArguments& given, const char* op) {
    const Tensors& pads = *given.pads;
    const auto size = static_cast<int64_t>(pads.size());
    require(size >= 1 && size <= MAX_PEERS, "pyops::", op, ": takes 1 to ", MAX_PEERS,
            " ranks, got ", size);
    require(given.rank >= 0 && given.rank < size, "pyops::", op, ": rank ", given.rank,
            " is not one of ", size);
    require(given.ctas >= 1 && given.ctas <= MAX_MEETING_CTAS, "pyops::", op,
            ": ctas must be 1 to ", MAX_MEETING_CTAS, ", got ", given.ctas);
    require(given.timeout_ns > 0, "pyops::", op, ": timeout_ns must be more than 0, got ",
            given.timeout_ns);
    Peers peers{};
    for (const Tensor& pad : pads) {
        require(pad.is_cuda() && pad.get_device_index() == pads[0].get_device_index() &&
                    pad.scalar_type() == torch::headeronly::ScalarType::Long &&
                    pad.is_contiguous() && pad.numel() * 8 >= static_cast<int64_t>(sizeof(Pad)),
                "pyops::", op, ": a pad must be int64 of at least ", sizeof(Pad) / 8,
                " elements on CUDA, got ", Shape{pad});
        peers.pad[peers.size++] = static_cast<Pad*>(pad.mutable_data_ptr());
    }
    peers.rank = static_cast<int>(given.rank);
    peers.timeout = given.timeout_ns;
    peers.failure = failure_word(*given.failure, op);
    return peers;
}

}  // namespace pyops::cuda
