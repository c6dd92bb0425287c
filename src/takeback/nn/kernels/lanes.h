// Vectors that are not full: the last few elements of a run are loaded, computed and stored as the lanes of a vector
// like all others. Lanes beyond them are loaded as zero, and never stored.

#pragma once

#include <type_traits>

#include "parts.h"

namespace takeback {

// How many lanes count: all of them, known to the compiler, or an int.
template <class A>
using All = std::integral_constant<int, kLanes<A>>;

template <class T>
inline Vector<Acc<T>> load(const T* from, All<Acc<T>>) {
  return load(from);
}
template <class T>
inline void store(T* to, Vector<Acc<T>> v, All<Acc<T>>) {
  store(to, v);
}

#if defined(__AVX512BW__) && defined(__AVX512VL__)
inline Vector<float> load(const float* from, int count) {
  return std::bit_cast<Vector<float>>(_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), from));
}
inline Vector<double> load(const double* from, int count) {
  return std::bit_cast<Vector<double>>(_mm512_maskz_loadu_pd(static_cast<__mmask8>((1u << count) - 1), from));
}
template <class T>
inline Vector<float> load(const T* from, int count) {
  T halves[kLanes<float>];
  const __m256i some = _mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << count) - 1), from);
  std::memcpy(halves, &some, sizeof halves);
  return load(halves);
}
inline void store(float* to, Vector<float> v, int count) {
  _mm512_mask_storeu_ps(to, static_cast<__mmask16>((1u << count) - 1), std::bit_cast<__m512>(v));
}
inline void store(double* to, Vector<double> v, int count) {
  _mm512_mask_storeu_pd(to, static_cast<__mmask8>((1u << count) - 1), std::bit_cast<__m512d>(v));
}
template <class T>
inline void store(T* to, Vector<float> v, int count) {
  T halves[kLanes<float>];
  store(halves, v);
  __m256i some;
  std::memcpy(&some, halves, sizeof some);
  _mm256_mask_storeu_epi16(to, static_cast<__mmask16>((1u << count) - 1), some);
}
#else
template <class T>
inline Vector<Acc<T>> load(const T* from, int count) {
  T padded[kLanes<Acc<T>>] = {};
  for (int i = 0; i < count; ++i) padded[i] = from[i];
  return load(padded);
}
template <class T>
inline void store(T* to, Vector<Acc<T>> v, int count) {
  T padded[kLanes<Acc<T>>];
  store(padded, v);
  for (int i = 0; i < count; ++i) to[i] = padded[i];
}
#endif

// Zero in the lanes that do not count.
template <class V, int N>
inline V counted(V v, std::integral_constant<int, N>) {
  return v;
}
inline Vector<float> counted(Vector<float> v, int count) {
  typedef std::int32_t Ints __attribute__((vector_size(kVectorBytes)));
  Ints lane;
  for (int i = 0; i < kLanes<float>; ++i) lane[i] = i;
  return lane < count ? v : Vector<float>{};
}
inline Vector<double> counted(Vector<double> v, int count) {
  typedef std::int64_t Ints __attribute__((vector_size(kVectorBytes)));
  Ints lane;
  for (int i = 0; i < kLanes<double>; ++i) lane[i] = i;
  return lane < count ? v : Vector<double>{};
}

// `each(i, count)` takes the vector at i.
template <class A, class Each>
inline void over_vectors(int64_t n, Each each) {
  constexpr int W = kLanes<A>;
  int64_t i = 0;
#pragma GCC unroll 2  // two of them overlap: a chain of operations is longer than the CPU looks ahead
  for (; i + W <= n; i += W) each(i, All<A>{});
  if (i < n) each(i, static_cast<int>(n - i));
}

// Two sums of a run: floats over at most kBlock elements, 64 to a lane, and doubles over those.
constexpr int64_t kBlock = 4096;

// `each(i, count, one, two)` adds the vector at i.
template <class A, class Each>
inline Two sums_of_block(int64_t n, Each each) {
  constexpr int W = kLanes<A>;
  Vector<A> one[4] = {}, two[4] = {};
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W)
    for (int j = 0; j < 4; ++j) each(i + j * W, All<A>{}, one[j], two[j]);
  for (; i + W <= n; i += W) each(i, All<A>{}, one[0], two[0]);
  if (i < n) each(i, static_cast<int>(n - i), one[1], two[1]);
  return {static_cast<double>(total<A>((one[0] + one[1]) + (one[2] + one[3]))),
          static_cast<double>(total<A>((two[0] + two[1]) + (two[2] + two[3])))};
}

template <class A, class Each>
inline Two sums_of_run(int64_t n, Each each) {
  Two all;
  for (int64_t first = 0; first < n; first += kBlock)
    all.add(sums_of_block<A>(std::min(kBlock, n - first), [&](int64_t i, auto count, Vector<A>& one, Vector<A>& two) {
      each(first + i, count, one, two);
    }));
  return all;
}

// Elements [begin, end) of runs of n that lie one after the other: `each(run, at, count)`, at counted from the run's
// start.
template <class Each>
inline void over_runs(int64_t begin, int64_t end, int64_t n, Each each) {
  if (begin == end) return;
  for (int64_t run = begin / n, at = begin % n; begin < end; ++run, at = 0) {
    const int64_t count = std::min(n - at, end - begin);
    each(run, at, count);
    begin += count;
  }
}

}  // namespace takeback
