// N elements in one memory access: raw bits in registers, fp32 in arithmetic.
//
// A dtype is a compile-time code where it is known, DYNAMIC where each row of a table brings its own: then it is a
// branch that all threads of a CTA take alike, and the elements are held as fp32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace pyops::cuda {

enum Dtype : int { DYNAMIC = -1, FP32 = 0, BF16 = 1, FP16 = 2, FP64 = 3 };

__host__ __device__ constexpr int bytes_of(int dtype) { return dtype == FP64 ? 8 : (dtype == FP32 || dtype == DYNAMIC ? 4 : 2); }

template <int BYTES>
struct Word;
template <>
struct Word<2> {
  using type = unsigned short;
};
template <>
struct Word<4> {
  using type = unsigned;
};
template <>
struct Word<8> {
  using type = uint2;
};
template <>
struct Word<16> {
  using type = uint4;
};

template <int DTYPE>
struct Element {
  using type = float;
};
template <>
struct Element<BF16> {
  using type = __nv_bfloat16_raw;
};
template <>
struct Element<FP16> {
  using type = __half_raw;
};
template <>
struct Element<FP64> {
  using type = double;
};

template <int DTYPE, int N>
struct alignas(N * bytes_of(DTYPE) > 16 ? 16 : N * bytes_of(DTYPE)) Pack {
  typename Element<DTYPE>::type element[N];
};

// The data is touched once per step: evict it first, and leave the caches to what is read again.
template <typename T>
__device__ __forceinline__ T read_words(const void* from) {
  constexpr int WIDTH = sizeof(T) > 16 ? 16 : sizeof(T);
  using W = typename Word<WIDTH>::type;
  union {
    T value;
    W word[sizeof(T) / WIDTH];
  } bits;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T) / WIDTH); ++i) bits.word[i] = __ldcs(static_cast<const W*>(from) + i);
  return bits.value;
}

template <typename T>
__device__ __forceinline__ void write_words(void* to, const T& value) {
  constexpr int WIDTH = sizeof(T) > 16 ? 16 : sizeof(T);
  using W = typename Word<WIDTH>::type;
  union {
    T value;
    W word[sizeof(T) / WIDTH];
  } bits;
  bits.value = value;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T) / WIDTH); ++i) __stcs(static_cast<W*>(to) + i, bits.word[i]);
}

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(__nv_bfloat16_raw x) { return __uint_as_float(static_cast<unsigned>(x.x) << 16); }
__device__ __forceinline__ float widen(__half_raw x) { return __half2float(__half(x)); }
__device__ __forceinline__ double widen(double x) { return x; }

template <int DTYPE>
__device__ __forceinline__ typename Element<DTYPE>::type narrow(float x) {
  if constexpr (DTYPE == BF16) {
    return static_cast<__nv_bfloat16_raw>(__float2bfloat16_rn(x));
  } else if constexpr (DTYPE == FP16) {
    return static_cast<__half_raw>(__float2half_rn(x));
  } else {
    return x;
  }
}

template <int DTYPE>
__device__ __forceinline__ void* address(void* base, int64_t index) {
  return static_cast<char*>(base) + index * bytes_of(DTYPE);
}

template <int DTYPE, int N>
__device__ __forceinline__ Pack<DTYPE, N> load(const void* base, int64_t index) {
  static_assert(DTYPE != DYNAMIC, "give the row's own dtype");
  return read_words<Pack<DTYPE, N>>(static_cast<const char*>(base) + index * bytes_of(DTYPE));
}

template <int DTYPE, int N>
__device__ __forceinline__ void store(void* base, int64_t index, const Pack<DTYPE, N>& pack) {
  write_words(address<DTYPE>(base, index), pack);
}

template <int DTYPE, int N>
__device__ __forceinline__ void store(void* base, int64_t index, const float (&values)[N]) {
  Pack<DTYPE, N> pack;
#pragma unroll
  for (int j = 0; j < N; ++j) pack.element[j] = narrow<DTYPE>(values[j]);
  write_words(address<DTYPE>(base, index), pack);
}

// The same where `dtype` is the row's: fp32 in registers.
template <int DTYPE, int N>
__device__ __forceinline__ Pack<DTYPE, N> load(const void* base, int64_t index, int dtype) {
  if constexpr (DTYPE != DYNAMIC) {
    return load<DTYPE, N>(base, index);
  } else {
    Pack<DYNAMIC, N> out;
    if (dtype == FP32) {
      const auto raw = load<FP32, N>(base, index);
#pragma unroll
      for (int j = 0; j < N; ++j) out.element[j] = raw.element[j];
    } else if (dtype == BF16) {
      const auto raw = load<BF16, N>(base, index);
#pragma unroll
      for (int j = 0; j < N; ++j) out.element[j] = widen(raw.element[j]);
    } else {
      const auto raw = load<FP16, N>(base, index);
#pragma unroll
      for (int j = 0; j < N; ++j) out.element[j] = widen(raw.element[j]);
    }
    return out;
  }
}

template <int DTYPE, int N>
__device__ __forceinline__ void store(void* base, int64_t index, int dtype, const float (&values)[N]) {
  if constexpr (DTYPE != DYNAMIC) {
    store<DTYPE, N>(base, index, values);
  } else if (dtype == FP32) {
    store<FP32, N>(base, index, values);
  } else if (dtype == BF16) {
    store<BF16, N>(base, index, values);
  } else {
    store<FP16, N>(base, index, values);
  }
}

}  // namespace pyops::cuda
