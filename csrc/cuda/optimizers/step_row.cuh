// One row of the optimizer's table on the device: its pointers, its scalars, and the update of N
// consecutive elements.
//
// DTYPES are compile-time codes for the combinations that people train with, DYNAMIC for all
// others. Loads of all operands come first, so that they are in flight together; then arithmetic
// and stores.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../../math/philox.h"
#include "../../math/optimizers/rule.h"
#include "../pack.cuh"
#include "../partition.cuh"
#include "table.cuh"

namespace pyops::cuda {

constexpr int NONE = -2;  // no master

template <int PARAM_, int GRAD_, int MOMENT_, int MASTER_>
struct Dtypes {
    static constexpr int P = PARAM_, G = GRAD_, M = MOMENT_, W = MASTER_;
    static constexpr bool KNOWN = P != DYNAMIC;
    static constexpr bool ALL_16_BIT =
        KNOWN && bytes_of(P) == 2 && bytes_of(G) == 2 && bytes_of(M) == 2 && W == NONE;
    // 16 bytes of the widest operand. Beside 32-bit operands, 16-bit ones move 8 bytes: a warp's
    // access then is one stretch of memory for each of them, which two 16-byte accesses 32 bytes
    // apart would not be.
    static constexpr int PACK = ALL_16_BIT ? 8 : 4;
};

using Generic = Dtypes<DYNAMIC, DYNAMIC, DYNAMIC, DYNAMIC>;

constexpr int key_of(int p, int g, int m, int w) {
    return p | g << 4 | m << 8 | (w == NONE ? 0 : w + 1) << 12;
}
template <typename D>
constexpr int key = key_of(D::P, D::G, D::M, D::W);
constexpr int GENERIC_KEY = 1 << 16, SCALAR_KEY = 1 << 17;

// R: a rule of csrc/math/optimizers/rule.h.
template <template <typename> class R>
struct StepArguments {
    int64_t* table;
    int rows;
    const void* lr;  // null: options.lr
    bool lr_is_double;
    const float* grad_factor;
    const float* found_inf;
    typename R<float>::Options options;
    bool zero_grads;
    uint64_t seed;
};

// Everything of a row but its rule.
struct RowInMemory {
    char *param, *grad, *exp_avg, *exp_avg_sq, *max, *master, *copy;
    int64_t numel, offset, packed;
    int kind, head, pack;
    float step;

    __device__ __forceinline__ int dtype(Field field) const { return code_of(packed, field); }

    __device__ __forceinline__ void point_to(const int64_t* table, int row, unsigned required) {
        param = pointer<char>(table, row, PARAM);
        grad = pointer<char>(table, row, GRAD);
        exp_avg = pointer<char>(table, row, EXP_AVG);
        exp_avg_sq = pointer<char>(table, row, EXP_AVG_SQ);
        max = pointer<char>(table, row, MAX);
        master = pointer<char>(table, row, MASTER);
        copy = pointer<char>(table, row, COPY);
        const bool complete = (!holds(required, GRAD) || grad) &&
                              (!holds(required, EXP_AVG) || exp_avg) &&
                              (!holds(required, EXP_AVG_SQ) || exp_avg_sq);
        numel = complete ? column(table, row, NUMEL) : 0;  // a table of another rule: touch nothing
        offset = column(table, row, OFFSET);
        packed = packed_of(table, row);
        choose_kind();
    }

    // Which code updates this row, and where its first pack begins.
    __device__ __forceinline__ void choose_kind() {
        kind = max ? GENERIC_KEY
                   : static_cast<int>(packed & 0xFFF) | (master ? dtype(MASTER_DTYPE) + 1 : 0)
                                                            << 12;
        const bool all_16_bit =
            dtype(PARAM_DTYPE) && dtype(GRAD_DTYPE) && dtype(MOMENT_DTYPE) && !master && !max;
        pack = all_16_bit ? 8 : 4;
        const int moment = bytes_of(dtype(MOMENT_DTYPE));
        int misaligned = misalignment(param, bytes_of(dtype(PARAM_DTYPE)), pack);
        misaligned = shared_misalignment(misaligned, grad, bytes_of(dtype(GRAD_DTYPE)), pack);
        misaligned = shared_misalignment(misaligned, exp_avg, moment, pack);
        misaligned = shared_misalignment(misaligned, exp_avg_sq, moment, pack);
        misaligned = shared_misalignment(misaligned, max, moment, pack);
        misaligned = shared_misalignment(misaligned, master, bytes_of(dtype(MASTER_DTYPE)), pack);
        misaligned = shared_misalignment(misaligned, copy, bytes_of(dtype(COPY_DTYPE)), pack);
        if (misaligned < 0) {
            kind = SCALAR_KEY;
            pack = 1;
        }
        head = misaligned < 0 ? 0 : head_of(misaligned, pack);
    }
};

template <template <typename> class R>
struct StepRow : RowInMemory {
    R<float> rule;

    __device__ __forceinline__ void enter(const StepArguments<R>& a, int row) {
        point_to(a.table, row, REQUIRED<R<float>>);
        const float* count = pointer<const float>(a.table, row, STEP);
        prepare(a, count ? *count + 1.0f : 0.0f);
    }

    // What depends on the step, in fp64; most rows share their step count with the one before.
    __device__ __forceinline__ void prepare(const StepArguments<R>& a, float now) {
        if (now == step) return;
        step = now;
        auto options = a.options;
        if (a.lr)
            options.lr = a.lr_is_double ? *static_cast<const double*>(a.lr)
                                        : *static_cast<const float*>(a.lr);
        rule = R<float>(options, a.grad_factor ? *a.grad_factor : 1.0, static_cast<double>(now));
    }
};

// The 16-bit random numbers of elements j .. j+7, which lie in one or two blocks of eight; of the
// first `count` of them only. A call, so that no more than one Philox is worked on at a time: else
// the registers overflow.
__device__ __noinline__ inline uint4 half_words(uint64_t seed, uint32_t step, uint32_t stream,
                                                uint64_t j, int count) {
    const PhiloxBlock first = philox4x32(seed, j / 8, step, stream);
    uint32_t both[8] = {first.word[0], first.word[1], first.word[2], first.word[3], 0, 0, 0, 0};
    const int skip = static_cast<int>(j % 8);
    if (skip + count > 8) {
        const PhiloxBlock second = philox4x32(seed, j / 8 + 1, step, stream);
#pragma unroll
        for (int i = 0; i < 4; ++i) both[4 + i] = second.word[i];
    }
    // Shift by `skip` half-words, in powers of two: no array is indexed at run time.
#pragma unroll
    for (int i = 0; i < 6; ++i) both[i] = skip & 4 ? both[i + 2] : both[i];
#pragma unroll
    for (int i = 0; i < 5; ++i) both[i] = skip & 2 ? both[i + 1] : both[i];
#pragma unroll
    for (int i = 0; i < 4; ++i) both[i] = __funnelshift_r(both[i], both[i + 1], skip & 1 ? 16 : 0);
    return make_uint4(both[0], both[1], both[2], both[3]);
}

struct AtRandom {
    uint4 random;
    template <int DTYPE>
    __device__ __forceinline__ typename ElementOf<DTYPE>::type operator()(Code<DTYPE>, float value,
                                                                          int j) const {
        // J is a constant
        const uint32_t word = j < 2 ? random.x : (j < 4 ? random.y : (j < 6 ? random.z : random.w));
        return narrow<DTYPE>(value, (word >> (16 * (j % 2))) & 0xFFFFu);
    }
};

// Operands of N elements, EACH apart, as they come from memory; those that the rule does not work
// on stay as they are.
template <template <typename> class R, typename D, int N, int EACH = 1>
struct Operands {
    static constexpr int W = D::W == NONE ? D::P : D::W;
    Pack<W, N> weight;
    Pack<D::G, N> grad;
    Pack<D::M, N> exp_avg, exp_avg_sq;

    __device__ __forceinline__ Operands(const RowInMemory& row, int64_t i) {
        constexpr unsigned COLUMNS_OF_RULE = R<float>::COLUMNS;
        const bool master = D::W == NONE ? false : (D::W == DYNAMIC ? row.master != nullptr : true);
        weight = load_as<W, N, EACH>(master ? row.master : row.param, i,
                                     row.dtype(master ? MASTER_DTYPE : PARAM_DTYPE));
        if constexpr (holds(COLUMNS_OF_RULE, EXP_AVG))
            exp_avg = load_as<D::M, N, EACH>(row.exp_avg, i, row.dtype(MOMENT_DTYPE));
        if constexpr (holds(COLUMNS_OF_RULE, EXP_AVG_SQ))
            exp_avg_sq = load_as<D::M, N, EACH>(row.exp_avg_sq, i, row.dtype(MOMENT_DTYPE));
        // Last, for it may be the narrowest: a dtype that is chosen at run time is converted in its
        // branch, which waits for it.
        if constexpr (holds(COLUMNS_OF_RULE, GRAD))
            grad = load_as<D::G, N, EACH>(row.grad, i, row.dtype(GRAD_DTYPE));
    }
};

// Stores fp32 values as stream number `stream` of the row: to nearest, or at random where SR and
// the dtype call for it.
template <int DTYPE, bool SR, int N, int EACH = 1>
__device__ __forceinline__ void store_state(void* base, int64_t i, int dtype, float (&values)[N],
                                            const RowInMemory& row, uint64_t seed,
                                            uint32_t stream) {
    if constexpr (SR && (DTYPE == DYNAMIC || bytes_of(DTYPE) == 2)) {
        static_assert(EACH == 1, "the random numbers are those of neighbours");
        if (DTYPE != DYNAMIC || dtype != FP32) {
            const uint64_t j = static_cast<uint64_t>(row.offset + i);
            const AtRandom round{half_words(seed, static_cast<uint32_t>(row.step), stream, j, N)};
            return store_as<DTYPE, N>(base, i, dtype, values, round);
        }
    }
    store_as<DTYPE, N, EACH>(base, i, dtype, values, ToNearest{});
}

// The rule on N elements in registers.
template <template <typename> class R, typename D, int N, int EACH>
__device__ __forceinline__ void apply(const StepRow<R>& row, const Operands<R, D, N, EACH>& in,
                                      float (&p)[N], float (&m)[N], float (&v)[N],
                                      float (&top)[N]) {
    using Rule = R<float>;
    // Rows with a maximum have no code of their own (choose_kind).
    constexpr int VARIANTS = D::KNOWN && Rule::WITH_MAX ? Rule::WITH_MAX : Rule::VARIANTS;
    const int with_max = Rule::WITH_MAX && !D::KNOWN && row.max ? Rule::WITH_MAX : 0;
    with_variant<VARIANTS>(row.rule.variant() | with_max, [&](auto variant) {
#pragma unroll
        for (int k = 0; k < N; ++k) {
            float g = 0.0f;
            if constexpr (holds(Rule::COLUMNS, GRAD)) g = widen(in.grad.element[k]);
            row.rule.template operator()<decltype(variant)::value>(p[k], g, m[k], v[k], top[k]);
        }
    });
}

template <template <typename> class R, typename D, bool SR, int N, int EACH>
__device__ __forceinline__ void update(const StepRow<R>& row, const StepArguments<R>& a, int64_t i,
                                       const Operands<R, D, N, EACH>& in) {
    using Rule = R<float>;
    float p[N], m[N], v[N], top[N];
    widen(in.weight, p);
    if constexpr (holds(Rule::COLUMNS, EXP_AVG)) widen(in.exp_avg, m);
    if constexpr (holds(Rule::COLUMNS, EXP_AVG_SQ)) widen(in.exp_avg_sq, v);
    const bool maximum = Rule::WITH_MAX != 0 && !D::KNOWN && row.max != nullptr;
    if (maximum) widen(load_as<D::M, N, EACH>(row.max, i, row.dtype(MOMENT_DTYPE)), top);
    apply<R, D, N>(row, in, p, m, v, top);
    if (maximum)
        store_state<D::M, SR, N, EACH>(row.max, i, row.dtype(MOMENT_DTYPE), top, row, a.seed, 2);
    if constexpr (holds(Rule::WRITTEN, EXP_AVG))
        store_state<D::M, SR, N, EACH>(row.exp_avg, i, row.dtype(MOMENT_DTYPE), m, row, a.seed, 1);
    if constexpr (holds(Rule::WRITTEN, EXP_AVG_SQ))
        store_state<D::M, SR, N, EACH>(row.exp_avg_sq, i, row.dtype(MOMENT_DTYPE), v, row, a.seed,
                                       2);
    const bool master = D::W == NONE ? false : (D::W == DYNAMIC ? row.master != nullptr : true);
    if (master) {
        store_as<D::W == NONE ? FP32 : D::W, N, EACH>(row.master, i, row.dtype(MASTER_DTYPE), p,
                                                      ToNearest{});
        store_as<D::P, N, EACH>(row.param, i, row.dtype(PARAM_DTYPE), p, ToNearest{});
    } else {
        store_state<D::P, SR, N, EACH>(row.param, i, row.dtype(PARAM_DTYPE), p, row, a.seed, 0);
    }
    if (row.copy) store_as<DYNAMIC, N, EACH>(row.copy, i, row.dtype(COPY_DTYPE), p, ToNearest{});
    if (holds(Rule::COLUMNS, GRAD) && a.zero_grads) {
        float zeros[N] = {};
        store_as<D::G, N, EACH>(row.grad, i, row.dtype(GRAD_DTYPE), zeros, ToNearest{});
    }
}

// N elements of a row of any dtypes: combinations without code of their own, edges of chunks (N =
// 1), and rows whose operands can't be brought into line (EACH = THREADS). Not inlined: its
// registers are not those of the known combinations.
template <template <typename> class R, bool SR, int N, int EACH = 1>
__device__ __noinline__ void update_any(const StepRow<R>& row, const StepArguments<R>& a,
                                        int64_t i) {
    update<R, Generic, SR, N>(row, a, i, Operands<R, Generic, N, EACH>(row, i));
}

// The elements of a row whose operands can't be brought into line: four of a thread are in flight.
// With random rounding one, for the random numbers are drawn for neighbours.
template <template <typename> class R, bool SR>
__device__ __forceinline__ void update_out_of_line(const StepRow<R>& row, const StepArguments<R>& a,
                                                   Range elements) {
    const auto one = [&](int64_t i) { update_any<R, SR, 1>(row, a, i); };
    if constexpr (SR) {
        walk_packs<1, 1>(elements, threadIdx.x, THREADS, one, one);
    } else {
        const auto four = [&](int64_t i) { update_any<R, SR, 4, THREADS>(row, a, i); };
        walk_packs<1, 4>(elements, threadIdx.x, THREADS, four, one);
    }
}

// The packs of one chunk by all threads of the CTA: four loads of 8 or 16 bytes in flight per
// thread, or twice as many.
template <template <typename> class R, typename D, bool SR, int N>
__device__ __forceinline__ void update_packs(const StepRow<R>& row, const StepArguments<R>& a,
                                             Range packs) {
    const auto pack = [&](int64_t i) { update<R, D, SR, N>(row, a, i, Operands<R, D, N>(row, i)); };
    const auto two = [&](int64_t i) {
        constexpr int64_t NEXT = THREADS * N;
        const Operands<R, D, N> here(row, i), there(row, i + NEXT);
        update<R, D, SR, N>(row, a, i, here);
        update<R, D, SR, N>(row, a, i + NEXT, there);
    };
    if constexpr (D::PACK == 4 && !SR) {  // else two don't fit in the registers
        walk_packs<N, 2>(packs, threadIdx.x, THREADS, two, pack);
    } else {
        walk_packs<N, 1>(packs, threadIdx.x, THREADS, pack, pack);
    }
}

}  // namespace pyops::cuda
