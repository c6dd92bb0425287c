// Activations as arithmetic sees them: loaded as vectors of float (double stays double), summed, stored narrowed.
//
// Guaranteed: a sum is made of float blocks short enough to keep float's rounding, and the blocks are added in
// double; its order depends on lengths alone. Vectors are as wide as the compiler's target; any tail is scalar.

#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace takeback {

enum Dtype : int { kFloat32 = 0, kFloat64 = 1, kBFloat16 = 2, kFloat16 = 3 };

struct BFloat16 {
  std::uint16_t bits;
};
struct Float16 {
  std::uint16_t bits;
};

// ---------------------------------------------------------------------------------------------- one element

inline float widen(float v) { return v; }
inline double widen(double v) { return v; }
inline float widen(BFloat16 v) { return std::bit_cast<float>(std::uint32_t{v.bits} << 16); }
inline float widen(Float16 v) {
  const std::uint32_t rest = v.bits & 0x7fffu;
  // The exponent moves into place with half's bias; the product corrects it, and makes subnormals right.
  float f = std::bit_cast<float>(rest << 13) * std::bit_cast<float>(std::uint32_t{254 - 15} << 23);
  std::uint32_t u = std::bit_cast<std::uint32_t>(f);
  if (rest >= 0x7c00u) u |= 0x7f800000u;
  return std::bit_cast<float>(u | (std::uint32_t{v.bits} & 0x8000u) << 16);
}

inline void narrow(float v, float& to) { to = v; }
inline void narrow(double v, double& to) { to = v; }
inline void narrow(float v, BFloat16& to) {
  const std::uint32_t u = std::bit_cast<std::uint32_t>(v);
  const std::uint32_t even = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  to.bits = static_cast<std::uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : even);
}
inline void narrow(float v, Float16& to) {
  std::uint32_t u = std::bit_cast<std::uint32_t>(v);
  const std::uint32_t sign = u & 0x80000000u;
  u ^= sign;
  std::uint32_t out;
  if (u >= std::uint32_t{127 + 16} << 23) {
    out = u > 0x7f800000u ? 0x7e00u : 0x7c00u;
  } else if (u < std::uint32_t{113} << 23) {  // subnormal: the addition rounds at the right bit
    const std::uint32_t magic = std::uint32_t{(127 - 15) + (23 - 10) + 1} << 23;
    out = std::bit_cast<std::uint32_t>(std::bit_cast<float>(u) + std::bit_cast<float>(magic)) - magic;
  } else {
    const std::uint32_t odd = (u >> 13) & 1u;
    out = (u + (static_cast<std::uint32_t>(15 - 127) << 23) + 0xfffu + odd) >> 13;
  }
  to.bits = static_cast<std::uint16_t>(out | sign >> 16);
}

template <class T>
using Acc = decltype(widen(T{}));

// ---------------------------------------------------------------------------------------------- vectors

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <class A>
struct VectorOf;
template <>
struct VectorOf<float> {
  typedef float type __attribute__((vector_size(kVectorBytes)));
};
template <>
struct VectorOf<double> {
  typedef double type __attribute__((vector_size(kVectorBytes)));
};
template <class A>
using Vector = typename VectorOf<A>::type;
template <class A>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(A));

// Integers in vectors of as many lanes as one of floats has.
typedef std::uint32_t Words __attribute__((vector_size(kVectorBytes)));
typedef std::uint16_t Halves __attribute__((vector_size(kVectorBytes / 2)));

inline Vector<float> load(const float* from) {
  Vector<float> v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
inline Vector<double> load(const double* from) {
  Vector<double> v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
inline Vector<float> load(const BFloat16* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  return std::bit_cast<Vector<float>>(__builtin_convertvector(halves, Words) << 16);
}
inline Vector<float> load(const Float16* from) {
#if defined(__AVX512F__)
  return std::bit_cast<Vector<float>>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#elif defined(__AVX__) && defined(__F16C__)
  return std::bit_cast<Vector<float>>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
  Vector<float> v = {};
  for (int i = 0; i < kLanes<float>; ++i) v[i] = widen(from[i]);
  return v;
#endif
}

inline void store(float* to, Vector<float> v) { std::memcpy(to, &v, sizeof v); }
inline void store(double* to, Vector<double> v) { std::memcpy(to, &v, sizeof v); }
inline void store(BFloat16* to, Vector<float> v) {
  const Words u = std::bit_cast<Words>(v), even = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const Words quiet = even - even + 0x7fc0u;
  const Halves halves = __builtin_convertvector((u & 0x7fffffffu) > 0x7f800000u ? quiet : even, Halves);
  std::memcpy(to, &halves, sizeof halves);
}
inline void store(Float16* to, Vector<float> v) {
#if defined(__AVX512F__)
  const __m256i half = _mm512_cvtps_ph(std::bit_cast<__m512>(v), _MM_FROUND_TO_NEAREST_INT);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), half);
#elif defined(__AVX__) && defined(__F16C__)
  const __m128i half = _mm256_cvtps_ph(std::bit_cast<__m256>(v), _MM_FROUND_TO_NEAREST_INT);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), half);
#else
  for (int i = 0; i < kLanes<float>; ++i) narrow(v[i], to[i]);
#endif
}

template <class A>
inline A total(Vector<A> v) {
  typedef A Half __attribute__((vector_size(kVectorBytes > 32 ? 32 : kVectorBytes)));
  typedef A Quarter __attribute__((vector_size(16)));
  Half half;
  std::memcpy(&half, &v, sizeof half);
  if constexpr (sizeof v > sizeof half) {
    Half high;
    std::memcpy(&high, reinterpret_cast<const char*>(&v) + sizeof half, sizeof high);
    half += high;
  }
  Quarter quarter;
  std::memcpy(&quarter, &half, sizeof quarter);
  if constexpr (sizeof half > sizeof quarter) {
    Quarter high;
    std::memcpy(&high, reinterpret_cast<const char*>(&half) + sizeof quarter, sizeof high);
    quarter += high;
  }
  if constexpr (sizeof(A) == 8) {
    return quarter[0] + quarter[1];
  } else {
    return (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
  }
}

struct Two {
  double first = 0, second = 0;

  void add(Two other) {
    first += other.first;
    second += other.second;
  }
};

// Two sums over any number of runs. `vectors(i, one, two)` adds the vectors at i, `scalars(i, one, two)` one element.
template <class A>
class Sums {
 public:
  template <class Vectors, class Scalars>
  void add(std::int64_t n, Vectors vectors, Scalars scalars) {
    for (std::int64_t i = 0; i < n; i += kRun) run(i, i + kRun < n ? i + kRun : n, vectors, scalars);
  }
  Two total() {
    flush();
    return sums_;
  }

 private:
  // Elements in a float block: with four vectors of 16 lanes, a lane adds 64 of them one after the other.
  static constexpr std::int64_t kRun = 4096;

  template <class Vectors, class Scalars>
  void run(std::int64_t i, std::int64_t end, Vectors vectors, Scalars scalars) {
    constexpr int W = kLanes<A>;
    if (since_ + (end - i) > kRun) flush();
    since_ += end - i;
    Vector<A> one[4], two[4];  // registers: what is loaded might alias the members
    for (int j = 0; j < 4; ++j) one[j] = one_[j], two[j] = two_[j];
    for (; i + 4 * W <= end; i += 4 * W)
      for (int j = 0; j < 4; ++j) vectors(i + j * W, one[j], two[j]);
    for (; i + W <= end; i += W) vectors(i, one[0], two[0]);
    for (int j = 0; j < 4; ++j) one_[j] = one[j], two_[j] = two[j];
    for (; i < end; ++i) scalars(i, one_left_, two_left_);
  }
  void flush() {
    sums_.first += static_cast<double>(takeback::total<A>((one_[0] + one_[1]) + (one_[2] + one_[3])) + one_left_);
    sums_.second += static_cast<double>(takeback::total<A>((two_[0] + two_[1]) + (two_[2] + two_[3])) + two_left_);
    for (int j = 0; j < 4; ++j) one_[j] = two_[j] = Vector<A>{};
    one_left_ = two_left_ = 0;
    since_ = 0;
  }

  Vector<A> one_[4] = {}, two_[4] = {};
  A one_left_ = 0, two_left_ = 0;
  std::int64_t since_ = 0;
  Two sums_;
};

// Tiles of columns in vectors, then single columns: `tile.operator()<N>(c)` takes N vectors at column c.
template <class A, class Tile, class Single>
inline void over_columns(std::int64_t columns, Tile tile, Single single) {
  constexpr int W = kLanes<A>;
  std::int64_t c = 0;
  for (; c + 4 * W <= columns; c += 4 * W) tile.template operator()<4>(c);
  for (; c + W <= columns; c += W) tile.template operator()<1>(c);
  for (; c < columns; ++c) single(c);
}

}  // namespace takeback
