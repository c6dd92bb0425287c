// One norm's backward as Python hands it over, and what every norm needs to carry it out: threads, scratch, sums.

#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>

#include "spans.h"

namespace takeback {

using std::int64_t;

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

// The fields are those of _Call in cpu.py.
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

constexpr int64_t kGrain = 32768;  // elements worth a thread, as in torch

inline int parts_of(const Call& call, int64_t items) {
  const int64_t elements = call.batch * call.channels * call.spots;
  const int64_t most = std::min<int64_t>({call.threads, items, (elements + kGrain - 1) / kGrain});
  return static_cast<int>(std::max<int64_t>(most, 1));
}

inline int64_t share(int64_t items, int part, int parts) { return items * part / parts; }

// All parts in parallel; right whatever number of threads OpenMP grants.
template <class Work>
void each_part(int parts, Work work) {
  if (parts == 1) return work(0);
#pragma omp parallel num_threads(parts)
  for (int part = omp_get_thread_num(); part < parts; part += omp_get_num_threads()) work(part);
}

template <class V>
class Scratch {
 public:
  explicit Scratch(int64_t count) : data_(static_cast<V*>(std::aligned_alloc(64, bytes(count)))) {
    if (!data_) throw std::bad_alloc();
  }
  V* at(int64_t i) const { return data_.get() + i; }

 private:
  static std::size_t bytes(int64_t count) { return (static_cast<std::size_t>(count) * sizeof(V) / 64 + 1) * 64; }
  struct Free {
    void operator()(V* p) const { std::free(p); }
  };
  std::unique_ptr<V, Free> data_;
};

// The weight as wide as arithmetic; ones where there is none.
template <class A>
Scratch<A> weight_of(const Call& call) {
  Scratch<A> weight(call.channels);
  const auto fill = [&](auto* from) {
    for (int64_t i = 0; i < call.channels; ++i) *weight.at(i) = static_cast<A>(from ? widen(from[i]) : 1);
  };
  switch (call.weight_dtype) {
    case kFloat64: fill(static_cast<const double*>(call.weight)); break;
    case kBFloat16: fill(static_cast<const BFloat16*>(call.weight)); break;
    case kFloat16: fill(static_cast<const Float16*>(call.weight)); break;
    default: fill(static_cast<const float*>(call.weight));
  }
  return weight;
}

// Two sums a column and part: floats over at most kBlockRows rows, doubles over all rows of the part.
template <class A>
class ColumnSums {
 public:
  static constexpr int64_t kBlockRows = 64;

  ColumnSums(int parts, int64_t columns)
      : columns_(columns), blocks_(parts * 2 * columns), sums_(parts * 2 * columns) {}

  // The floats that come next are added here: `columns` of the first sum, then of the second.
  A* block(int part) const { return blocks_.at(part * 2 * columns_); }
  void clear(int part) const {
    std::fill_n(block(part), 2 * columns_, A{0});
    std::fill_n(sum(part), 2 * columns_, 0.0);
  }
  void flush(int part) const {
    A* from = block(part);
    double* to = sum(part);
#pragma omp simd
    for (int64_t i = 0; i < 2 * columns_; ++i) {
      to[i] += static_cast<double>(from[i]);
      from[i] = 0;
    }
  }
  Two over_parts(int64_t column, int parts) const {
    Two two;
    for (int part = 0; part < parts; ++part) two.add({sum(part)[column], sum(part)[columns_ + column]});
    return two;
  }

 private:
  double* sum(int part) const { return sums_.at(part * 2 * columns_); }

  int64_t columns_;
  Scratch<A> blocks_;
  Scratch<double> sums_;
};

// Rows whose columns are summed in registers: few enough to stay in the nearest cache.
constexpr int64_t kMostRows = 32;
inline int64_t rows_at_once(int64_t columns) { return columns <= 256 ? kMostRows : 8; }

}  // namespace takeback
