// A CUDA device that is not there: torch's CUDA dispatch key over host memory, so that the code
// path of CUDA tensors runs on a machine without a GPU.
//
//   op on CUDA tensors -> twins (CPU tensors over the same memory) -> torch's CPU kernel
//                      -> results are labelled CUDA again
//
// It shows what a GPU would refuse: operands on two devices, host code that waits for the device in
// a step (`sync_mode`), CUDA memory read by host code; and backward runs in the engine's thread of
// the device, as on a GPU. Work is done at once: it can't show a race between streams, nor speed,
// nor what a real kernel computes.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/transformers/attention.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <map>
#include <unordered_set>
#include <vector>

#include "twins.h"

namespace {

// Ops that take CPU tensors of any shape beside CUDA ones.
const std::unordered_set<std::string> MIXED{"aten::copy_",
                                            "aten::_copy_from",
                                            "aten::index.Tensor",
                                            "aten::index.Tensor_out",
                                            "aten::_index_put_impl_",
                                            "aten::index_put_",
                                            "aten::index_put",
                                            "aten::_foreach_copy_",
                                            "aten::_foreach_norm.Scalar",
                                            "aten::set_.source_Storage",
                                            "aten::set_.source_Storage_storage_offset",
                                            "aten::set_.source_Tensor",
                                            "aten::is_set_to",
                                            "aten::record_stream"};
// Ops whose result the host must see.
const std::unordered_set<std::string> WAITING{
    "aten::_local_scalar_dense", "aten::item",     "aten::nonzero",
    "aten::masked_select",       "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive",  "aten::equal",    "aten::repeat_interleave.Tensor",
    "aten::is_nonzero",          "aten::bincount"};

bool waits_for_copy(const torch::jit::Stack& stack, size_t first) {
    const auto &to = stack[first].toTensor(), &from = stack[first + 1].toTensor();
    if (to.is_cuda() == from.is_cuda()) return false;
    bool non_blocking =
        stack.size() > first + 2 && stack[first + 2].isBool() && stack[first + 2].toBool();
    const auto& host = to.is_cuda() ? from : to;
    return host.numel() > 0 && !(non_blocking && is_pinned(host.const_data_ptr()));
}

// A graph: the calls that were made while it was captured. A replay makes them again, with the
// operands and into the results of the first time; what the host did in between is not repeated. A
// capture computes nothing: memory is put back as it was.
struct Recorded {
    c10::OperatorHandle op;
    torch::jit::Stack operands, results;
};
struct Graph {
    std::vector<Recorded> calls;
    std::vector<std::pair<c10::Storage, std::vector<char>>> before;
};
std::shared_ptr<Graph> capturing;
bool is_capturing() { return capturing != nullptr; }

void collect(const IValue& value, std::vector<at::Tensor>& into) {
    if (value.isTensor() && value.toTensor().defined()) into.push_back(value.toTensor());
    if (value.isList())
        for (const IValue& item : value.toList().vec()) collect(item, into);
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack);

void on_host(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    if (!capturing) return run_on_host(op, stack);
    torch::jit::Stack operands(stack->end() - int64_t(op.schema().arguments().size()),
                               stack->end());
    std::vector<at::Tensor> tensors;
    for (const auto& value : operands) collect(value, tensors);
    for (const auto& t : tensors) {
        if (!t.is_cuda()) continue;
        bool known = false;
        for (const auto& [storage, _] : capturing->before)
            known |= storage.is_alias_of(t.storage());
        const auto* data = static_cast<const char*>(t.storage().data());
        if (!known)
            capturing->before.emplace_back(t.storage(),
                                           std::vector<char>(data, data + t.storage().nbytes()));
    }
    if (op.schema().returns().empty()) {  // it may write to memory that only its table knows
        stack->erase(stack->end() - int64_t(operands.size()), stack->end());
        capturing->calls.push_back({op, std::move(operands), {}});
        return;
    }
    run_on_host(op, stack);
    torch::jit::Stack results(stack->end() - int64_t(op.schema().returns().size()), stack->end());
    capturing->calls.push_back({op, std::move(operands), std::move(results)});
}

void end_capture() {
    for (auto& [storage, bytes] : capturing->before)
        std::memcpy(storage.mutable_data(), bytes.data(), bytes.size());
    capturing->before.clear();
    capturing.reset();
}

void replay(const Graph& graph) {
    at::AutoDispatchBelowADInplaceOrView below;
    for (const auto& call : graph.calls) {
        torch::jit::Stack stack = call.operands;
        run_on_host(call.op, &stack);
        std::vector<at::Tensor> then, now;
        for (const auto& value : call.results) collect(value, then);
        for (const auto& value : stack) collect(value, now);
        for (size_t i = 0; i < then.size(); ++i)
            if (!now[i].is_same(then[i]) && now[i].numel() &&
                now[i].const_data_ptr() != then[i].const_data_ptr())
                const_cast<at::Tensor&>(then[i]).copy_(now[i]);
    }
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    const auto& schema = op.schema();
    const auto name = schema.overload_name().empty() ? schema.name()
                                                     : schema.name() + "." + schema.overload_name();
    const size_t count = schema.arguments().size(), first = stack->size() - count;
    if (WAITING.count(name)) waited(name.c_str());
    if ((name == "aten::copy_" || name == "aten::_copy_from") && waits_for_copy(*stack, first))
        waited("copy between host and device");
    const bool mixed = MIXED.count(name) != 0 || name.rfind("c10d::", 0) == 0;
    const bool to_host = name == "aten::copy_" ? stack->at(first).toTensor().is_cpu() : false;
    Twins twins;
    auto down = [&](const at::Tensor& t) {
        TORCH_CHECK(mixed || !t.defined() || t.is_cuda() || t.is_meta() || t.dim() == 0,
                    "Expected all tensors to be on the same device, but found at least two "
                    "devices, cuda:0 and ",
                    t.device(), " in ", name, ": shape ", t.sizes());
        return twins.twin(t);
    };
    for (size_t i = 0; i < count; ++i) {
        IValue& value = stack->at(first + i);
        if (value.isDevice() && value.toDevice().is_cuda())
            value = CPU;
        else if (value.isGenerator() && value.toGenerator().device().is_cuda())
            value =
                static_cast<DeviceGenerator*>(value.toGenerator().unsafeGetGeneratorImpl())->inner;
        else if (value.isNone() && schema.arguments()[i].name() == "generator")
            value =
                static_cast<DeviceGenerator*>(default_generator().unsafeGetGeneratorImpl())->inner;
        else
            value = mapped(value, down);
    }
    {
        at::AutoDispatchBelowADInplaceOrView below;
        op.callBoxed(stack);
    }
    twins.settle();
    if (name == "aten::_pin_memory" || to_host) return;
    auto up = [&](const at::Tensor& t) { return twins.labelled(t); };
    for (auto& value : *stack) value = mapped(value, up);
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
    constexpr c10::DispatchKeySet keys(DispatchKey::CUDA);
    return at::detail::empty_generic_symint(size, &device_memory, keys,
                                            c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device>, std::optional<bool>) {
    constexpr c10::DispatchKeySet keys(DispatchKey::CUDA);
    return at::detail::empty_strided_symint_generic(size, stride, &device_memory, keys,
                                                    c10::dtype_or_default(dtype));
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
    auto* impl = self.unsafeGetTensorImpl();
    TORCH_CHECK(source.device().is_cuda(), "set_: a CUDA tensor over a storage on ",
                source.device());
    int64_t room = 1;
    std::vector<int64_t> strides(size.size());
    for (int64_t i = int64_t(size.size()) - 1; i >= 0; --i) {
        strides[i] = room;
        room *= std::max<int64_t>(size[i], 1);
    }
    impl->set_storage_keep_dtype(std::move(source));
    impl->set_sizes_and_strides(size, stride.empty() ? at::IntArrayRef(strides) : stride, offset);
    return self;
}

at::Tensor& set_whole(at::Tensor& self, at::Storage source) {
    int64_t numel = int64_t(source.nbytes() / self.itemsize());
    return set_storage(self, std::move(source), 0, {numel}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
    return set_storage(self, source.storage(), source.storage_offset(), source.sizes(),
                       source.strides());
}

// Products of 16-bit matrices that are added up and kept in float32: torch has them on CUDA alone.
at::Tensor mm_in(const at::Tensor& a, const at::Tensor& b, at::ScalarType dtype) {
    return at::mm(a.to(dtype), b.to(dtype));
}

at::Tensor& mm_out(const at::Tensor& a, const at::Tensor& b, at::ScalarType dtype,
                   at::Tensor& out) {
    return out.copy_(mm_in(a, b, dtype));
}

at::Tensor addmm_in(const at::Tensor& c, const at::Tensor& a, const at::Tensor& b,
                    at::ScalarType dtype, const at::Scalar& beta, const at::Scalar& alpha) {
    return at::addmm(c.to(dtype), a.to(dtype), b.to(dtype), beta, alpha);
}

at::Tensor& addmm_out(const at::Tensor& c, const at::Tensor& a, const at::Tensor& b,
                      at::ScalarType dtype, const at::Scalar& beta, const at::Scalar& alpha,
                      at::Tensor& out) {
    TORCH_CHECK(c.scalar_type() == dtype || c.scalar_type() == a.scalar_type(),
                "addmm: self is neither out_dtype nor the operands'");
    return out.copy_(addmm_in(c, a, b, dtype, beta, alpha));
}

int64_t math_attention(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                       const std::optional<at::Tensor>&, double, bool, std::optional<double>,
                       bool) {
    return 0;  // SDPBackend::math, which is made of ordinary ops
}

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, m) {
    m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
    // Convolutions choose a kernel by the device, and some of those are in CUDA builds alone.
    for (const char* name : {"copy_", "convolution", "convolution_backward"})
        m.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_host>());
    m.impl("empty.memory_format", &empty);
    m.impl("empty_strided", &empty_strided);
    m.impl("mm.dtype", &mm_in);
    m.impl("mm.dtype_out", &mm_out);
    m.impl("addmm.dtype", &addmm_in);
    m.impl("addmm.dtype_out", &addmm_out);
    m.impl("set_.source_Storage_storage_offset", &set_storage);
    m.impl("set_.source_Storage", &set_whole);
    m.impl("set_.source_Tensor", &set_tensor);
}

// Gloo's collectives of CUDA tensors, which a CPU build of torch lacks. It has kernels of theirs:
// that they are replaced is no news.
void register_collectives() {
    struct Silence final : c10::WarningHandler {
        void process(const c10::Warning&) override {}
    } silence;
    auto* before = c10::WarningUtils::get_warning_handler();
    c10::WarningUtils::set_warning_handler(&silence);
    static torch::Library library(torch::Library::IMPL, "c10d", DispatchKey::CUDA, __FILE__,
                                  __LINE__);
    for (const char* name :
         {"send", "recv_", "recv_any_source_", "reduce_", "broadcast_", "allreduce_",
          "allreduce_coalesced_", "allgather_", "_allgather_base_", "allgather_coalesced_",
          "allgather_into_tensor_coalesced_", "reduce_scatter_", "_reduce_scatter_base_",
          "reduce_scatter_tensor_coalesced_", "gather_", "scatter_", "alltoall_", "alltoall_base_"})
        library.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_host>());
    c10::WarningUtils::set_warning_handler(before);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    register_collectives();
    c10::SetAllocator(DeviceType::CUDA, &device_memory);
    at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&math_attention);
    m.def("set_sync_mode", [](int mode) { sync_mode = mode; });
    m.def("get_sync_mode", [] { return sync_mode.load(); });
    m.def("waited", [](const char* what) { waited(what); });
    m.def("waits", [] { return waits.load(); });
    m.def("held", [] { return held.load(); });
    m.def("peak", [] { return peak.load(); });
    m.def("reset_peak", [] { peak = held.load(); });
    m.def("default_generator", [] { return default_generator(); });
    // A library's op without a CUDA kernel: its CPU kernel does the work.
    m.def("answer_for", [](const std::string& name) {
        static std::map<std::string, torch::Library> libraries;
        const auto colon = name.find("::");
        const auto space = name.substr(0, colon);
        auto found = libraries.find(space);
        if (found == libraries.end())
            found = libraries
                        .emplace(space, torch::Library(torch::Library::IMPL, space,
                                                       DispatchKey::CUDA, __FILE__, __LINE__))
                        .first;
        found->second.impl(name.substr(colon + 2).c_str(),
                           torch::CppFunction::makeFromBoxedFunction<&on_host>());
    });
    pybind11::class_<Graph, std::shared_ptr<Graph>>(m, "Graph")
        .def(pybind11::init<>())
        .def("replay", &replay)
        .def("reset", [](Graph& graph) { graph.calls.clear(); });
    m.def("begin_capture", [](std::shared_ptr<Graph> graph) { capturing = std::move(graph); });
    m.def("end_capture", &end_capture);
    m.def("is_capturing", &is_capturing);
    m.def("resize_storage", [](const at::Tensor& over, int64_t nbytes) {
        auto* storage = over.storage().unsafeGetStorageImpl();
        auto memory = device_memory.allocate(size_t(nbytes));
        std::memcpy(memory.get(), storage->data(), std::min(size_t(nbytes), storage->nbytes()));
        storage->set_data_ptr_noswap(std::move(memory));
        storage->set_nbytes(size_t(nbytes));
    });
    m.def("has_hooks", [] { return at::detail::getCUDAHooks().hasCUDA(); });
    m.def("register_memory", [](int64_t address, size_t n) {
        std::lock_guard lock(pinned_lock);
        pinned[reinterpret_cast<const char*>(address)] = n;
    });
    m.def("unregister_memory", [](int64_t address) {
        std::lock_guard lock(pinned_lock);
        return pinned.erase(reinterpret_cast<const char*>(address)) == 1;
    });
}
