// What all native kernels share beside arithmetic: parts of the work and the threads that do them, scratch, and
// parameters widened.

#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>

#include "spans.h"

namespace takeback {

using std::int64_t;

constexpr int64_t kGrain = 32768;  // elements worth a thread, as in torch

inline int parts_of(int threads, int64_t elements, int64_t items) {
  const int64_t most = std::min<int64_t>({threads, items, (elements + kGrain - 1) / kGrain});
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

// A parameter as wide as arithmetic; `otherwise` everywhere where there is none.
template <class A>
Scratch<A> widened(const void* data, int dtype, int64_t count, A otherwise) {
  Scratch<A> wide(count);
  const auto fill = [&](auto* from) {
    for (int64_t i = 0; i < count; ++i) *wide.at(i) = from ? static_cast<A>(widen(from[i])) : otherwise;
  };
  switch (dtype) {
    case kFloat64: fill(static_cast<const double*>(data)); break;
    case kBFloat16: fill(static_cast<const BFloat16*>(data)); break;
    case kFloat16: fill(static_cast<const Float16*>(data)); break;
    default: fill(static_cast<const float*>(data));
  }
  return wide;
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
  void add(int part, int64_t column, Two two) const {
    sum(part)[column] += two.first;
    sum(part)[columns_ + column] += two.second;
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

// `with(T{})` for the element type of `dtype`; 1 where scratch could not be had.
template <class With>
int with_dtype(int dtype, With with) {
  try {
    switch (dtype) {
      case kFloat64: with(double{}); break;
      case kBFloat16: with(BFloat16{}); break;
      case kFloat16: with(Float16{}); break;
      default: with(float{});
    }
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}

}  // namespace takeback
