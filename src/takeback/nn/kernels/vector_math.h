// exp, expm1 and log1p of vectors. Floats: within 2 ulp, without a table or a branch; doubles: the C library's, lane by
// lane.
//
// expm1 and log1p are for what is at most zero, which is where ELU needs them. NaN gives NaN, but not log1p's.

#pragma once

#include <initializer_list>

#include "spans.h"

namespace takeback {

typedef std::int32_t Ints __attribute__((vector_size(kVectorBytes)));

#if defined(__AVX512F__)
// NaN stays: of two operands, one of them NaN, these instructions give the second.
inline Vector<float> at_least(Vector<float> x, float low) {
  return std::bit_cast<Vector<float>>(_mm512_max_ps(_mm512_set1_ps(low), std::bit_cast<__m512>(x)));
}
inline Vector<float> at_most(Vector<float> x, float high) {
  return std::bit_cast<Vector<float>>(_mm512_min_ps(_mm512_set1_ps(high), std::bit_cast<__m512>(x)));
}
// x * 2^n, n a whole number.
inline Vector<float> scaled(Vector<float> x, Vector<float> n) {
  return std::bit_cast<Vector<float>>(_mm512_scalef_ps(std::bit_cast<__m512>(x), std::bit_cast<__m512>(n)));
}
#else
inline Vector<float> at_least(Vector<float> x, float low) { return x < low ? Vector<float>{} + low : x; }
inline Vector<float> at_most(Vector<float> x, float high) { return x > high ? Vector<float>{} + high : x; }
inline Vector<float> scaled(Vector<float> x, Vector<float> n) {
  const Ints whole = __builtin_convertvector(n, Ints), half = whole >> 1;  // 2^n itself may be no float
  const auto power = [](Ints n) { return std::bit_cast<Vector<float>>((n + 127) << 23); };
  return (x * power(half)) * power(whole - half);
}
#endif
inline Vector<double> at_least(Vector<double> x, double low) { return x < low ? Vector<double>{} + low : x; }

// exp(x) = 2^n * (1 + p), |log(1 + p)| <= log(2) / 2.
struct Reduced {
  Vector<float> n, p;
};

inline Reduced reduce(Vector<float> x) {
  // Adding 1.5 * 2^23 rounds to a whole number.
  const float magic = 12582912.0f;
  const Vector<float> n = (x * 1.44269504f + magic) - magic;
  // log(2) in two parts; the first has few enough bits that its product with n is exact.
  const Vector<float> r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  // exp(r) = 1 + r + r^2 * q(r); the coefficients are the best for that interval, to 0.2 ulp.
  Vector<float> q = Vector<float>{} + 0.0013946554390713573f;
  for (const float next : {0.008366644382476807f, 0.04166628047823906f, 0.16666541993618011f, 0.5f}) q = q * r + next;
  return {n, (q * r) * r + r};
}

inline Vector<float> exp(Vector<float> x) {
  const Reduced by = reduce(at_most(at_least(x, -104.0f), 89.0f));  // these give 0 and infinity
  return scaled(by.p + 1.0f, by.n);
}

inline Vector<float> expm1(Vector<float> x) {
  const Reduced by = reduce(at_least(x, -80.0f));  // gives -1
  const Vector<float> one = Vector<float>{} + 1.0f, power = scaled(one, by.n);
  return power * by.p + (power - one);
}

// For -1 < x <= 0.
inline Vector<float> log1p(Vector<float> x) {
  // 1 + x = m * 2^e with m from sqrt(1/2) to sqrt(2); where e is 0, m - 1 is x itself, not rounded.
  const Ints bits = std::bit_cast<Ints>(x + 1.0f), e = (bits - 0x3f3504f3) >> 23;
  const Vector<float> m = std::bit_cast<Vector<float>>(bits - (e << 23)), f = e == 0 ? x : m - 1.0f;
  // log(1 + f) = f - f^2 / 2 + f^3 * q(f); the coefficients are the best for that interval, to 0.1 ulp.
  Vector<float> q = Vector<float>{} - 0.07859611511230469f;
  for (const float next : {0.12881647050380707f, -0.13128754496574402f, 0.14181192219257355f, -0.16624553501605988f,
                           0.2000228613615036f, -0.25000810623168945f, 0.33333316445350647f, -0.5f})
    q = q * f + next;
  const Vector<float> n = __builtin_convertvector(e, Vector<float>);
  return n * 0.693359375f + (f + ((f * f) * q + n * -2.12194440e-4f));
}

#define TAKEBACK_BY_LANE(name)                                            \
  inline Vector<double> name(Vector<double> x) {                          \
    for (int i = 0; i < kLanes<double>; ++i) x[i] = std::name(x[i]);      \
    return x;                                                             \
  }
TAKEBACK_BY_LANE(exp)
TAKEBACK_BY_LANE(expm1)
TAKEBACK_BY_LANE(log1p)
#undef TAKEBACK_BY_LANE

}  // namespace takeback
