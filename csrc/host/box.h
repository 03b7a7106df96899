// Where every op's tensors arrive, on the CPU and on CUDA: each must lie within its memory before a
// kernel walks it.
//
//   PYOPS_IMPL(m, "adam_", &adam_)   m.impl("adam_", ...), with the check between the dispatcher
//                                    and the function
//
// Views whose sign or conjugate is still to be taken come here resolved, or not at all:
// pyops/ops/memory.py.
#pragma once
#include <stdexcept>
#include <type_traits>
#include <utility>

#include "optimizers/table.h"

namespace pyops {

// Where a tensor stands among an op's arguments; `place` is -1 outside of a list.
struct ArgumentOf {
    const char* op;
    int number;
    int64_t place;
};

// Within a handler of `error`: throws it again, but where a call into torch failed, which is for
// want of memory in nearly every case, torch's words in the place of the call's.
[[noreturn]] void throw_from(const char* op, const std::runtime_error& error);

// Throws unless the storage reaches as far as sizes, strides and offset do.
void check_memory(const Tensor& tensor, const ArgumentOf& argument);

template <typename T>
void check_argument(const T&, const char*, int) {}
inline void check_argument(const Tensor& tensor, const char* op, int number) {
    check_memory(tensor, {op, number, -1});
}
inline void check_argument(const std::optional<Tensor>& tensor, const char* op, int number) {
    if (tensor) check_memory(*tensor, {op, number, -1});
}
inline void check_argument(const Tensors& list, const char* op, int number) {
    for (size_t i = 0; i < list.size(); ++i)
        check_memory(list[i], {op, number, static_cast<int64_t>(i)});
}

template <typename Op, typename F, F function>
struct Checked;

template <typename Op, typename R, typename... P, R (*function)(P...)>
struct Checked<Op, R (*)(P...), function> {
    // The arguments are the caller's own and used once, so they are moved on: lists of tensors are
    // not copied.
    static R call(std::remove_cv_t<std::remove_reference_t<P>>&... arguments) {
        int number = 0;
        (check_argument(arguments, Op::name_of(), ++number), ...);
        try {
            return function(std::move(arguments)...);
        } catch (const std::runtime_error& error) {
            throw_from(Op::name_of(), error);
        }
    }
};

}  // namespace pyops

#define PYOPS_IMPL(m, name, function)                                                         \
    do {                                                                                      \
        struct Op {                                                                           \
            static const char* name_of() { return name; }                                     \
        };                                                                                    \
        (m).impl(name, TORCH_BOX((&pyops::Checked<Op, decltype(function), function>::call))); \
    } while (false)
