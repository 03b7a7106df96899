// One row of the optimizer's table on the device: its pointers, its scalars, and the update of N consecutive elements.
//
// DTYPES are compile-time codes for the combinations that people train with, DYNAMIC for all others. Loads of all operands
// come first, so that they are in flight together; then arithmetic and stores.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../math/adam.h"
#include "../math/philox.h"
#include "pack.cuh"
#include "partition.cuh"
#include "table.cuh"

namespace pyops::cuda {

constexpr int NONE = -2;  // no master

template <int PARAM_, int GRAD_, int MOMENT_, int MASTER_>
struct Dtypes {
  static constexpr int P = PARAM_, G = GRAD_, M = MOMENT_, W = MASTER_;
  static constexpr bool KNOWN = P != DYNAMIC;
  static constexpr bool ALL_16_BIT = KNOWN && bytes_of(P) == 2 && bytes_of(G) == 2 && bytes_of(M) == 2 && W == NONE;
  // 16 bytes of the widest operand. Beside 32-bit operands, 16-bit ones move 8 bytes: a warp's access then is one
  // stretch of memory for each of them, which two 16-byte accesses 32 bytes apart would not be.
  static constexpr int PACK = ALL_16_BIT ? 8 : 4;
};

using Generic = Dtypes<DYNAMIC, DYNAMIC, DYNAMIC, DYNAMIC>;

constexpr int key_of(int p, int g, int m, int w) { return p | g << 4 | m << 8 | (w == NONE ? 0 : w + 1) << 12; }
template <typename D>
constexpr int key = key_of(D::P, D::G, D::M, D::W);
constexpr int GENERIC_KEY = 1 << 16, SCALAR_KEY = 1 << 17;

struct AdamArguments {
  int64_t* table;
  int rows;
  const void* lr;  // null: options.lr
  bool lr_is_double;
  const float* grad_factor;
  const float* found_inf;
  AdamOptions options;
  bool zero_grads;
  uint64_t seed;
};

struct AdamRow {
  char *param, *grad, *exp_avg, *exp_avg_sq, *max, *master, *copy;
  int64_t numel, offset, packed;
  int kind, head, pack;
  float step;
  Adam<float> adam;

  __device__ __forceinline__ int dtype(Field field) const { return code_of(packed, field); }

  __device__ __forceinline__ void enter(const AdamArguments& a, int row) {
    param = pointer<char>(a.table, row, PARAM);
    grad = pointer<char>(a.table, row, GRAD);
    exp_avg = pointer<char>(a.table, row, EXP_AVG);
    exp_avg_sq = pointer<char>(a.table, row, EXP_AVG_SQ);
    max = pointer<char>(a.table, row, MAX);
    master = pointer<char>(a.table, row, MASTER);
    copy = pointer<char>(a.table, row, COPY);
    numel = exp_avg && exp_avg_sq ? column(a.table, row, NUMEL) : 0;  // a table of another rule: touch nothing
    offset = column(a.table, row, OFFSET);
    packed = static_cast<uint32_t>(column(a.table, row, PACKED));  // the upper half may hold the ticket
    choose_kind();
    prepare(a, *pointer<const float>(a.table, row, STEP) + 1.0f);
  }

  // Which code updates this row, and where its first pack begins.
  __device__ __forceinline__ void choose_kind() {
    kind = max ? GENERIC_KEY : static_cast<int>(packed & 0xFFF) | (master ? dtype(MASTER_DTYPE) + 1 : 0) << 12;
    const bool all_16_bit = dtype(PARAM_DTYPE) && dtype(GRAD_DTYPE) && dtype(MOMENT_DTYPE) && !master && !max;
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

  // Bias corrections in fp64; most rows share their step count with the one before.
  __device__ __forceinline__ void prepare(const AdamArguments& a, float now) {
    if (now == step) return;
    step = now;
    AdamOptions options = a.options;
    if (a.lr) options.lr = a.lr_is_double ? *static_cast<const double*>(a.lr) : *static_cast<const float*>(a.lr);
    const double factor = a.grad_factor ? *a.grad_factor : 1.0;
    adam = Adam<float>(options, factor, pow(options.beta1, static_cast<double>(now)), pow(options.beta2, static_cast<double>(now)));
  }
};

// The 16-bit random numbers of elements j .. j+7, which lie in one or two blocks of eight; of the first `count` of them only.
// A call, so that no more than one Philox is worked on at a time: else the registers overflow.
__device__ __noinline__ uint4 half_words(uint64_t seed, uint32_t step, uint32_t stream, uint64_t j, int count) {
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
  __device__ __forceinline__ typename ElementOf<DTYPE>::type operator()(Code<DTYPE>, float value, int j) const {
    const uint32_t word = j < 2 ? random.x : (j < 4 ? random.y : (j < 6 ? random.z : random.w));  // j is a constant
    return narrow<DTYPE>(value, (word >> (16 * (j % 2))) & 0xFFFFu);
  }
};

// Operands of N consecutive elements as they come from memory.
template <typename D, int N>
struct Operands {
  static constexpr int W = D::W == NONE ? D::P : D::W;
  Pack<W, N> weight;
  Pack<D::G, N> grad;
  Pack<D::M, N> exp_avg, exp_avg_sq;

  __device__ __forceinline__ Operands(const AdamRow& row, int64_t i) {
    const bool master = D::W == NONE ? false : (D::W == DYNAMIC ? row.master != nullptr : true);
    grad = load_as<D::G, N>(row.grad, i, row.dtype(GRAD_DTYPE));
    weight = load_as<W, N>(master ? row.master : row.param, i, row.dtype(master ? MASTER_DTYPE : PARAM_DTYPE));
    exp_avg = load_as<D::M, N>(row.exp_avg, i, row.dtype(MOMENT_DTYPE));
    exp_avg_sq = load_as<D::M, N>(row.exp_avg_sq, i, row.dtype(MOMENT_DTYPE));
  }
};

// Stores fp32 values as stream number `stream` of the row: to nearest, or at random where SR and the dtype call for it.
template <int DTYPE, bool SR, int N>
__device__ __forceinline__ void store_state(void* base, int64_t i, int dtype, float (&values)[N], const AdamRow& row,
                                            uint64_t seed, uint32_t stream) {
  if constexpr (SR && (DTYPE == DYNAMIC || bytes_of(DTYPE) == 2)) {
    if (DTYPE != DYNAMIC || dtype != FP32) {
      const uint64_t j = static_cast<uint64_t>(row.offset + i);
      const AtRandom round{half_words(seed, static_cast<uint32_t>(row.step), stream, j, N)};
      return store_as<DTYPE, N>(base, i, dtype, values, round);
    }
  }
  store_as<DTYPE, N>(base, i, dtype, values, ToNearest{});
}

template <typename D, bool SR, int N>
__device__ __forceinline__ void update(const AdamRow& row, const AdamArguments& a, int64_t i, const Operands<D, N>& in) {
  float p[N], m[N], v[N], top[N];
  widen(in.weight, p);
  widen(in.exp_avg, m);
  widen(in.exp_avg_sq, v);
  if (D::KNOWN || row.max == nullptr) {
    float none = 0.0f;
    if (row.adam.l2 != 0.0f) {
#pragma unroll
      for (int k = 0; k < N; ++k) row.adam.template operator()<true, false>(p[k], widen(in.grad.element[k]), m[k], v[k], none);
    } else {
#pragma unroll
      for (int k = 0; k < N; ++k) row.adam.template operator()<false, false>(p[k], widen(in.grad.element[k]), m[k], v[k], none);
    }
  } else {
    widen(load_as<D::M, N>(row.max, i, row.dtype(MOMENT_DTYPE)), top);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float g = widen(in.grad.element[k]);
      if (row.adam.l2 != 0.0f) {
        row.adam.template operator()<true, true>(p[k], g, m[k], v[k], top[k]);
      } else {
        row.adam.template operator()<false, true>(p[k], g, m[k], v[k], top[k]);
      }
    }
    store_state<D::M, SR, N>(row.max, i, row.dtype(MOMENT_DTYPE), top, row, a.seed, 2);
  }
  store_state<D::M, SR, N>(row.exp_avg, i, row.dtype(MOMENT_DTYPE), m, row, a.seed, 1);
  store_state<D::M, SR, N>(row.exp_avg_sq, i, row.dtype(MOMENT_DTYPE), v, row, a.seed, 2);
  const bool master = D::W == NONE ? false : (D::W == DYNAMIC ? row.master != nullptr : true);
  if (master) {
    store_as<D::W == NONE ? FP32 : D::W, N>(row.master, i, row.dtype(MASTER_DTYPE), p, ToNearest{});
    store_as<D::P, N>(row.param, i, row.dtype(PARAM_DTYPE), p, ToNearest{});
  } else {
    store_state<D::P, SR, N>(row.param, i, row.dtype(PARAM_DTYPE), p, row, a.seed, 0);
  }
  if (row.copy) store_as<DYNAMIC, N>(row.copy, i, row.dtype(COPY_DTYPE), p, ToNearest{});
  if (a.zero_grads) {
    float zeros[N] = {};
    store_as<D::G, N>(row.grad, i, row.dtype(GRAD_DTYPE), zeros, ToNearest{});
  }
}

// N elements of a row of any dtypes: combinations without code of their own, edges of chunks (N = 1), and rows whose
// operands can't be brought into line (N = 1). Not inlined: its registers are not those of the known combinations.
template <bool SR, int N>
__device__ __noinline__ void update_any(const AdamRow& row, const AdamArguments& a, int64_t i) {
  update<Generic, SR, N>(row, a, i, Operands<Generic, N>(row, i));
}

// The packs of one chunk by all threads of the CTA: four loads of 8 or 16 bytes in flight per thread, or twice as many.
template <typename D, bool SR, int N>
__device__ __forceinline__ void update_packs(const AdamRow& row, const AdamArguments& a, Range packs) {
  const auto pack = [&](int64_t i) { update<D, SR, N>(row, a, i, Operands<D, N>(row, i)); };
  const auto two = [&](int64_t i) {
    constexpr int64_t NEXT = THREADS * N;
    const Operands<D, N> here(row, i), there(row, i + NEXT);
    update<D, SR, N>(row, a, i, here);
    update<D, SR, N>(row, a, i + NEXT, there);
  };
  if constexpr (D::PACK == 4 && !SR) {  // else two don't fit in the registers
    walk_packs<N, 2>(packs, threadIdx.x, THREADS, two, pack);
  } else {
    walk_packs<N, 1>(packs, threadIdx.x, THREADS, pack, pack);
  }
}

}  // namespace pyops::cuda
