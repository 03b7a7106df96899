// The checks and the table of csrc/host/optimizers/table.h, and what library.py asks the shared
// object.
#include "../../host/box.h"
#include "../../host/optimizers/table.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "../kernels.h"

namespace pyops {
namespace {

// What the checks ask of a tensor, asked once: each question is a call into libtorch.
struct TensorFacts {
    const Tensor& tensor;
    int64_t numel;
    int32_t device_type = 0, device_index = 0;
    bool contiguous;

    explicit TensorFacts(const Tensor& t)
        : tensor(t), numel(t.numel()), contiguous(t.is_contiguous()) {
        TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(t.get(), &device_type));
        TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(t.get(), &device_index));
    }
    bool same_device(const TensorFacts& other) const {
        return device_type == other.device_type && device_index == other.device_index;
    }
};

using Layout = std::vector<std::pair<int64_t, int64_t>>;  // (stride, size), sizes of 1 left out

Layout layout_of(const Tensor& t) {
    Layout layout;
    const auto sizes = t.sizes(), strides = t.strides();
    for (size_t d = 0; d < sizes.size(); ++d)
        if (sizes[d] != 1) layout.emplace_back(strides[d], sizes[d]);
    return layout;
}

bool same_layout(const TensorFacts& a, const TensorFacts& b) {
    if (a.numel != b.numel) return false;
    if (a.numel == 0) return true;
    if (a.contiguous && b.contiguous) {
        const auto x = a.tensor.sizes(), y = b.tensor.sizes();
        if (x.size() == y.size() && std::equal(x.begin(), x.end(), y.begin())) return true;
    }
    return layout_of(a.tensor) == layout_of(b.tensor);
}

struct List {
    const char* name;
    const Tensors* tensors;
    int field;  // where its dtype goes, -1 for the step
};

// Checks tensor i of a list against its parameter and returns its dtype code.
int check_operand(const List& list, size_t i, const TensorFacts& t, const TensorFacts& param,
                  const char* op) {
    const int dtype = dtype_code(t.tensor);
    require(dtype >= 0 && dtype != FP64, "pyops::", op, ": ", list.name, "[", i,
            "] must be float32, bfloat16 or float16; cast it, or leave it to torch");
    require(t.same_device(param), "pyops::", op, ": ", list.name, "[", i,
            "] is on another device than the parameters; move it there");
    require(t.contiguous || is_dense(t.tensor), "pyops::", op, ": ", list.name, "[", i,
            "] has shape ", Shape{t.tensor}, ": gaps or overlaps in memory; pass a dense copy");
    require(same_layout(t, param), "pyops::", op, ": ", list.name, "[", i, "] has shape ",
            Shape{t.tensor}, ", its parameter ", Shape{param.tensor},
            "; all tensors of a row must be laid out alike");
    return dtype;
}

void check_step(const TensorFacts& step, size_t i, const TensorFacts& param, const char* op) {
    require(dtype_code(step.tensor) == FP32 && step.numel == 1 && step.same_device(param),
            "pyops::", op, ": steps[", i,
            "] must be one float32 number on its parameter's device, got shape ",
            Shape{step.tensor});
}

}  // namespace

int dtype_code(const Tensor& tensor) {
    static const int32_t fp32 = aoti_torch_dtype_float32(), bf16 = aoti_torch_dtype_bfloat16();
    static const int32_t fp16 = aoti_torch_dtype_float16(), fp64 = aoti_torch_dtype_float64();
    int32_t dtype = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
    return dtype == fp32   ? FP32
           : dtype == bf16 ? BF16
           : dtype == fp16 ? FP16
           : dtype == fp64 ? FP64
                           : -1;
}

bool is_dense(const Tensor& tensor) {
    if (tensor.is_contiguous()) return true;
    Layout layout = layout_of(tensor);
    std::sort(layout.begin(), layout.end());
    int64_t expected = 1;
    for (const auto& [stride, size] : layout) {
        if (stride != expected) return false;
        expected *= size;
    }
    return true;
}

std::ostream& operator<<(std::ostream& text, const Shape& shape) {
    const auto list = [&](const auto& numbers) {
        text << "[";
        for (size_t d = 0; d < numbers.size(); ++d) text << (d ? ", " : "") << numbers[d];
        text << "]";
    };
    list(shape.tensor.sizes());
    text << " with strides ";
    list(shape.tensor.strides());
    return text;
}

namespace {

// How far a tensor's elements reach into its storage, and how long that is.
struct Reach {
    int64_t offset = 0, needed = 0, held = 0;
    bool fits() const { return needed <= held; }
};

Reach reach_of(const Tensor& tensor) {
    const int64_t numel = tensor.numel();
    Reach reach;
    if (numel == 0) return reach;
    int32_t dtype = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(tensor.get(), &reach.offset));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor.get(), &reach.held));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
    int64_t elements = reach.offset + numel;
    if (!tensor.is_contiguous()) {
        const auto sizes = tensor.sizes(), strides = tensor.strides();
        elements = reach.offset + 1;
        for (size_t d = 0; d < sizes.size(); ++d) elements += (sizes[d] - 1) * strides[d];
    }
    reach.needed = elements * static_cast<int64_t>(aoti_torch_dtype_element_size(dtype));
    if (!tensor.data_ptr()) reach.held = 0;
    return reach;
}

}  // namespace

void throw_from(const char* op, const std::runtime_error& error) {
    if (!strstr(error.what(), "API call failed")) throw;
    // torch 2.13 keeps the words of what was thrown; earlier ones have no such function.
    using Words = const char* (*)();
    const auto words =
        reinterpret_cast<Words>(dlsym(RTLD_DEFAULT, "torch_exception_get_what_without_backtrace"));
    const std::string said = words ? words() : "";
    throw std::runtime_error(
        std::string("pyops::") + op + ": " +
        (said.empty() ? "torch could not do what the op needs, most likely for want of memory: " +
                            std::string(error.what())
                      : said));
}

void check_memory(const Tensor& tensor, const ArgumentOf& argument) {
    const Reach reach = reach_of(tensor);
    if (reach.fits()) return;
    std::ostringstream where;
    where << "argument " << argument.number;
    if (argument.place >= 0) where << "[" << argument.place << "]";
    require(false, "pyops::", argument.op, ": ", where.str(),
            " has elements but no memory for them: its shape ", Shape{tensor}, " from element ",
            reach.offset, " on needs ", reach.needed, " bytes, its storage has ", reach.held,
            "; it was resized or given back (resize_), allocate it before the call");
}

bool gradients_fit(const Tensors gradients, const std::vector<int64_t> expected) {
    require(gradients.size() == expected.size(), "pyops::gradients_fit: expected has ",
            expected.size(), " numbers for ", gradients.size(), " gradients; give one for each");
    for (size_t i = 0; i < gradients.size(); ++i) {
        const Tensor& t = gradients[i];
        const int64_t kind = (t.numel() << 4) | (t.is_cpu() ? 8 : 0) | dtype_code(t);
        if (kind != expected[i] || !t.is_contiguous() || !reach_of(t).fits()) return false;
    }
    return true;
}

std::vector<int64_t> make_table(const TensorLists& lists, const std::vector<int64_t>& offsets,
                                unsigned required, const char* op) {
    const List columns[] = {{"params", lists.params, PARAM_DTYPE},
                            {"grads", lists.grads, GRAD_DTYPE},
                            {"exp_avgs", lists.exp_avgs, MOMENT_DTYPE},
                            {"exp_avg_sqs", lists.exp_avg_sqs, MOMENT_DTYPE},
                            {"max_exp_avg_sqs", lists.max_exp_avg_sqs, MOMENT_DTYPE},
                            {"masters", lists.masters, MASTER_DTYPE},
                            {"copies", lists.copies, COPY_DTYPE},
                            {"steps", lists.steps, -1}};
    const Tensors& params = *lists.params;
    const auto optional = [=](int column) { return (required >> column & 1u) == 0; };
    for (int column = PARAM; column <= STEP; ++column) {
        const List& c = columns[column];
        require(c.tensors->size() == params.size() || (optional(column) && c.tensors->empty()),
                "pyops::", op, ": ", c.name, " has ", c.tensors->size(), " tensors for ",
                params.size(), " params; expected one for each");
    }
    require(offsets.empty() || offsets.size() == params.size(), "pyops::", op, ": offsets has ",
            offsets.size(), " numbers for ", params.size(),
            " params; expected one for each, or none");
    std::vector<int64_t> table(params.size() * COLUMNS, 0);
    if (params.empty()) return table;
    const TensorFacts first(params[0]);
    int64_t chunks = 0;
    for (size_t i = 0; i < params.size(); ++i) {
        int64_t* row = table.data() + i * COLUMNS;
        const TensorFacts param(params[i]);
        require(i == 0 || param.same_device(first), "pyops::", op, ": params[", i,
                "] is on another device than params[0]; step them apart");
        int moment_dtype = -1;
        for (int column = PARAM; column <= STEP; ++column) {
            const List& c = columns[column];
            if (c.tensors->empty()) continue;
            const TensorFacts t((*c.tensors)[i]);
            if (optional(column) && t.numel == 0) continue;
            if (column == STEP) {
                check_step(t, i, param, op);
            } else {
                const int dtype = check_operand(c, i, t, param, op);
                const bool moment = c.field == MOMENT_DTYPE;
                require(!moment || moment_dtype < 0 || moment_dtype == dtype, "pyops::", op, ": ",
                        c.name, "[", i,
                        "] has another dtype than the moment before it; the moments of a row share "
                        "one");
                if (!moment || moment_dtype < 0)
                    row[PACKED] |= static_cast<int64_t>(dtype) << (4 * c.field);
                if (moment) moment_dtype = dtype;
            }
            row[column] = t.numel ? reinterpret_cast<int64_t>(t.tensor.data_ptr()) : 0;
        }
        row[NUMEL] = param.numel;
        row[OFFSET] = offsets.empty() ? 0 : offsets[i];
        row[FIRST_CHUNK] = chunks;
        chunks += (row[NUMEL] + CHUNK - 1) / CHUNK;
    }
    return table;
}

int64_t check_table(const Tensor& table, const char* op) {
    int32_t dtype = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(table.get(), &dtype));
    require(dtype == aoti_torch_dtype_int64() && table.dim() == 2 && table.size(1) == COLUMNS &&
                table.is_contiguous(),
            "pyops::", op, ": table must be a contiguous int64 [n, ", static_cast<int>(COLUMNS),
            "] made by optimizer_table, got ", Shape{table});
    return table.size(0);
}

void check_columns(const int64_t* table, int64_t rows, unsigned required, const char* op) {
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t* row = table + r * COLUMNS;
        for (int column = PARAM; column <= STEP; ++column)
            require((required >> column & 1u) == 0 || row[column] || row[NUMEL] == 0, "pyops::", op,
                    ": row ", r, " of the table has nothing in column ", column,
                    ", which this rule works on; make the table with it");
    }
}

void check_scalar(const std::optional<Tensor>& scalar, const char* name, bool on_cuda,
                  bool float64_allowed) {
    if (!scalar) return;
    const int dtype = dtype_code(*scalar);
    require((dtype == FP32 || (float64_allowed && dtype == FP64)) && scalar->numel() == 1 &&
                scalar->is_cuda() == on_cuda,
            "pyops: ", name, " must be one float32", float64_allowed ? " or float64" : "",
            " number on the parameters' device, got shape ", Shape{*scalar});
}

namespace {

Tensor optimizer_table(const Tensors params, const Tensors grads, const Tensors exp_avgs,
                       const Tensors exp_avg_sqs, const Tensors max_exp_avg_sqs,
                       const Tensors masters, const Tensors copies, const Tensors steps,
                       const std::vector<int64_t> offsets) {
    const std::vector<int64_t> rows = make_table(
        {&params, &grads, &exp_avgs, &exp_avg_sqs, &max_exp_avg_sqs, &masters, &copies, &steps},
        offsets, OF_ANY_RULE, "optimizer_table");
    const std::vector<int64_t> shape = {static_cast<int64_t>(params.size()), COLUMNS};
    Tensor table = torch::stable::empty(shape, torch::headeronly::ScalarType::Long);
    if (!rows.empty()) std::memcpy(table.data_ptr(), rows.data(), rows.size() * sizeof(int64_t));
    return table;
}

}  // namespace
}  // namespace pyops

STABLE_TORCH_LIBRARY_IMPL(pyops, CPU, m) {
    PYOPS_IMPL(m, "optimizer_table", &pyops::optimizer_table);
    // It answers about memory, and does not walk it
    m.impl("gradients_fit", TORCH_BOX(&pyops::gradients_fit));
}

// Asked by pyops/ops/library.py through ctypes.
extern "C" {
__attribute__((visibility("default"))) const char* pyops_cpu_isa() { return pyops::kernels().name; }
__attribute__((visibility("default"))) int pyops_has_cpu_isa(const char* name) {
    return pyops::has_isa(name);
}
__attribute__((visibility("default"))) int pyops_use_cpu_isa(const char* name) {
    return pyops::use_isa(name) ? 0 : 1;
}
}
