// One norm's backward as Python hands it over.

#pragma once

#include "parts.h"

namespace takeback {

// Where a parameter's gradient goes; null where it is not wanted.
struct Slice {
  void* data;
  int32_t dtype;
  int32_t accumulate;

  explicit operator bool() const { return data != nullptr; }

  void put(int64_t i, double value) const {
    switch (dtype) {
      case kFloat64: return put_as<double>(i, value);
      case kBFloat16: return put_as<BFloat16>(i, static_cast<float>(value));
      case kFloat16: return put_as<Float16>(i, static_cast<float>(value));
      default: return put_as<float>(i, static_cast<float>(value));
    }
  }

 private:
  template <class T>
  void put_as(int64_t i, Acc<T> value) const {
    T* to = static_cast<T*>(data) + i;
    narrow(accumulate ? widen(*to) + value : value, *to);
  }
};

// The fields are those of _NativeCall in norms_cpu.py.
struct Call {
  const void* dy;
  const void* x;
  const void* weight;  // null: ones
  const void* mean;    // as wide as arithmetic: float or double
  const void* rstd;
  void* dx;
  Slice weight_grad;
  Slice bias_grad;
  int64_t batch;  // rows, for layer_norm and rms_norm
  int64_t channels;
  int64_t spots;  // elements a channel has in one sample
  int64_t groups;
  double eps;
  int32_t dtype;
  int32_t weight_dtype;
  int32_t training;
  int32_t threads;

  bool wants_sums() const { return weight_grad || bias_grad; }
  void put(int64_t c, double bias, double weight_sum) const {
    if (bias_grad) bias_grad.put(c, bias);
    if (weight_grad) weight_grad.put(c, weight_sum);
  }
};

inline int parts_of(const Call& call, int64_t items) {
  return parts_of(call.threads, call.batch * call.channels * call.spots, items);
}

// The weight as wide as arithmetic; ones where there is none.
template <class A>
Scratch<A> weight_of(const Call& call) {
  return widened<A>(call.weight, call.weight_dtype, call.channels, A{1});
}

}  // namespace takeback
