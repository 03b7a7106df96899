// What torch asks of a CUDA device apart from its kernels, over host memory: allocators,
// generators, streams, hooks.
#pragma once
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace {

using c10::DeviceType, c10::DispatchKey, c10::IValue;
const c10::Device CUDA{DeviceType::CUDA, 0};
const c10::Device CPU{DeviceType::CPU};

std::atomic<int> sync_mode{0};  // as torch.cuda.set_sync_debug_mode: 0 default, 1 warn, 2 error
std::atomic<int64_t> held{0}, peak{0}, waits{0};
std::mutex pinned_lock;
std::map<const char*, size_t> pinned;

bool is_capturing();
void waited(const char* what) {
    ++waits;
    TORCH_CHECK(!is_capturing(),
                "CUDA error: operation not permitted when stream is capturing: ", what);
    if (sync_mode == 1) TORCH_WARN("called a synchronizing CUDA operation: ", what);
    TORCH_CHECK(sync_mode != 2, "called a synchronizing CUDA operation: ", what);
}

// Memory: every byte 0xff, so that what is read before it was written is NaN, or -1.
struct Block {
    int64_t nbytes;
    void* memory;
};

void give_back(void* context) {
    auto* block = static_cast<Block*>(context);
    held -= block->nbytes;
    std::free(block->memory);
    delete block;
}

struct DeviceMemory final : c10::Allocator {
    c10::DataPtr allocate(size_t n) override {
        if (n == 0) return {nullptr, CUDA};
        void* memory = nullptr;
        TORCH_CHECK(posix_memalign(&memory, 512, n) == 0, "CUDA out of memory. Tried to allocate ",
                    n, " bytes");
        std::memset(memory, 0xff, n);
        int64_t now = held += int64_t(n), most = peak;
        while (now > most && !peak.compare_exchange_weak(most, now)) {
        }
        return {memory, new Block{int64_t(n), memory}, &give_back, CUDA};
    }
    void copy_data(void* to, const void* from, size_t n) const override {
        std::memcpy(to, from, n);
    }
} device_memory;

void unpin(void* memory) {
    std::lock_guard lock(pinned_lock);
    pinned.erase(static_cast<char*>(memory));
    std::free(memory);
}

struct PinnedMemory final : c10::Allocator {
    c10::DataPtr allocate(size_t n) override {
        void* memory = nullptr;
        TORCH_CHECK(posix_memalign(&memory, 512, n ? n : 1) == 0, "no memory to pin");
        std::lock_guard lock(pinned_lock);
        pinned[static_cast<char*>(memory)] = n;
        return {memory, memory, &unpin, CPU};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
    void copy_data(void* to, const void* from, size_t n) const override {
        std::memcpy(to, from, n);
    }
} pinned_memory;

bool is_pinned(const void* data) {
    std::lock_guard lock(pinned_lock);
    auto after = pinned.upper_bound(static_cast<const char*>(data));
    if (after == pinned.begin()) return false;
    auto [begin, size] = *std::prev(after);
    return static_cast<const char*>(data) < begin + (size ? size : 1);
}

// Random numbers: a CUDA generator draws as a CPU one of its own does.
struct DeviceGenerator final : c10::GeneratorImpl {
    at::Generator inner;
    explicit DeviceGenerator(at::Generator inner)
        : GeneratorImpl(CUDA, c10::DispatchKeySet(DispatchKey::CUDA)), inner(std::move(inner)) {}
    void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
    void set_offset(uint64_t offset) override { inner.set_offset(offset); }
    uint64_t get_offset() const override { return inner.get_offset(); }
    uint64_t current_seed() const override { return inner.current_seed(); }
    uint64_t seed() override { return const_cast<at::Generator&>(inner).seed(); }
    void set_state(const c10::TensorImpl& state) override {
        inner.unsafeGetGeneratorImpl()->set_state(state);
    }
    c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
        return inner.unsafeGetGeneratorImpl()->get_state();
    }
    GeneratorImpl* clone_impl() const override { return new DeviceGenerator(inner.clone()); }
};

at::Generator& default_generator() {
    static at::Generator generator =
        at::make_generator<DeviceGenerator>(at::detail::createCPUGenerator(67280421310721));
    return generator;
}

struct CUDAHooks final : at::CUDAHooksInterface {
    explicit CUDAHooks(at::CUDAHooksArgs) {}
    void init() const override {}
    bool hasCUDA() const override { return true; }
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return 1; }
    int getNumGPUs() const override { return 1; }
    c10::DeviceIndex current_device() const override { return 0; }
    void setCurrentDevice(c10::DeviceIndex) const override {}
    c10::DeviceIndex getCurrentDevice() const override { return 0; }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
    bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
    c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
    c10::Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
    c10::Device getDeviceFromPtr(void*) const override { return CUDA; }
    const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
        return default_generator();
    }
    at::Generator getNewGenerator(c10::DeviceIndex) const override {
        return at::make_generator<DeviceGenerator>(at::detail::createCPUGenerator());
    }
    void deviceSynchronize(c10::DeviceIndex) const override { waited("synchronize"); }
};

// Streams are names, events are done as soon as they are recorded.
struct Guard final : c10::impl::DeviceGuardImplInterface {
    static thread_local c10::StreamId current;
    static std::atomic<int64_t> made;
    static c10::Stream stream(c10::StreamId id) {
        return c10::Stream(c10::Stream::UNSAFE, CUDA, id);
    }
    DeviceType type() const override { return DeviceType::CUDA; }
    c10::Device exchangeDevice(c10::Device) const override { return CUDA; }
    c10::Device getDevice() const override { return CUDA; }
    void setDevice(c10::Device device) const override {
        TORCH_CHECK(device.index() <= 0, "invalid device ordinal");
    }
    void uncheckedSetDevice(c10::Device) const noexcept override {}
    c10::Stream getStream(c10::Device) const override { return stream(current); }
    c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
    c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(++made); }
    c10::Stream getNewStream(c10::Device, int) const override { return stream(++made); }
    c10::Stream exchangeStream(c10::Stream next) const override {
        auto before = stream(current);
        current = next.id();
        return before;
    }
    void* getStreamNativeHandle(const c10::Stream) const override { return nullptr; }
    void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
    void record(void** event, const c10::Stream&, const c10::DeviceIndex,
                const c10::EventFlag) const override {
        *event = reinterpret_cast<void*>(1);
    }
    void block(void*, const c10::Stream&) const override {}
    bool queryEvent(void*) const override { return true; }
    c10::DeviceIndex deviceCount() const noexcept override { return 1; }
    bool queryStream(const c10::Stream&) const override { return true; }
    void synchronizeStream(const c10::Stream&) const override { waited("stream.synchronize"); }
    bool isStreamCapturing(const c10::Stream&) const override { return is_capturing(); }
    void synchronizeEvent(void*) const override { waited("event.synchronize"); }
    void synchronizeDevice(const c10::DeviceIndex) const override { waited("synchronize"); }
    void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
    double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0.0; }
};
thread_local c10::StreamId Guard::current = 0;
std::atomic<int64_t> Guard::made{0};

// What DistributedDataParallel times itself with.
struct Timer final : c10d::Timer {
    explicit Timer(c10::Device) {}
    std::optional<int64_t> measureDifference(Event start, Event end) override {
        return getTimeRef(end) - getTimeRef(start);
    }
};

}  // namespace

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, ::Timer)
}
C10_REGISTER_GUARD_IMPL(CUDA, Guard);
namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks)
}
