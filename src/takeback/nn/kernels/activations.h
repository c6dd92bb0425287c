// Activations of vectors: forward y = act(z), and backward dz = dy * act'(z), from z, or from y alone, which gives z
// too.
//
// At zero each has the derivative that torch gives it. What cannot be inverted has no `inverted`.

#pragma once

#include <limits>

#include "vector_math.h"

namespace takeback {

// Activation of activated.py.
enum Activation : int { kIdentity = 0, kLeakyRelu = 1, kElu = 2, kRelu = 3, kSilu = 4 };

template <class A>
struct Inverted {
  Vector<A> z, dz;
};

// The identity, with slope 1, and leaky_relu.
template <class A>
struct Linear {
  A slope, inverse;

  explicit Linear(double param) : slope(static_cast<A>(param)), inverse(static_cast<A>(1 / param)) {}
  Vector<A> forward(Vector<A> z) const { return z > 0 ? z : z * slope; }
  Vector<A> backward(Vector<A> dy, Vector<A> z) const { return z > 0 ? dy : dy * slope; }
  Inverted<A> inverted(Vector<A> dy, Vector<A> y) const { return {y > 0 ? y : y * inverse, y > 0 ? dy : dy * slope}; }
};

template <class A>
struct Elu {
  A param, inverse;

  explicit Elu(double param) : param(static_cast<A>(param)), inverse(static_cast<A>(1 / param)) {}
  Vector<A> forward(Vector<A> z) const { return z <= 0 ? param * expm1(z) : z; }
  Vector<A> backward(Vector<A> dy, Vector<A> z) const { return z <= 0 ? dy * (param * exp(z)) : dy; }
  Inverted<A> inverted(Vector<A> dy, Vector<A> y) const {
    // Where y was rounded to -param, z is as low as one rounding above that.
    const Vector<A> z = log1p(at_least(y * inverse, std::numeric_limits<A>::epsilon() - 1));
    return {y <= 0 ? z : y, y <= 0 ? dy * (y + param) : dy};
  }
};

template <class A>
struct Relu {
  explicit Relu(double) {}
  Vector<A> forward(Vector<A> z) const { return z < 0 ? Vector<A>{} : z; }
  Vector<A> backward(Vector<A> dy, Vector<A> z) const { return z <= 0 ? Vector<A>{} : dy; }
};

template <class A>
struct Silu {
  explicit Silu(double = 0) {}
  Vector<A> forward(Vector<A> z) const { return z / (exp(-z) + 1); }
  Vector<A> backward(Vector<A> dy, Vector<A> z) const {
    const Vector<A> sigmoid = 1 / (exp(-z) + 1);
    return dy * (sigmoid * (z * (1 - sigmoid) + 1));
  }
};

}  // namespace takeback
