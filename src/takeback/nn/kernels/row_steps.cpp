// RMSNorm, the backward of LayerNorm and RMSNorm from their output or input, and SwiGLU, on the CPU.
//
// Memory contract
//   * An `out` may be exactly a tensor that is read: a thread reads a row whole, then walks it once more, and stores each
//     vector after the loads of the same elements. All else is only read.
//   * Scratch is a few numbers a column and thread, taken before anything is written. Where it cannot be had the result
//     is 1, and nothing was written.
//   * Equal inputs and thread counts give equal bits: every thread's share, and the order of sums, is fixed.

#include "activations.h"
#include "lanes.h"

namespace takeback {

// The fields are those of _NativeRows in row_steps_cpu.py.
struct Rows {
  const void* weight;  // null: ones
  const void* bias;    // null: zeros
  int64_t rows;
  int64_t columns;
  int32_t dtype;
  int32_t weight_dtype;
  int32_t bias_dtype;
  int32_t centred;
  int32_t from_output;
  int32_t threads;
};

// A matrix whose columns are dense, and whose rows lie `stride` elements apart. The fields are those of _Matrix.
struct Matrix {
  void* data;
  int64_t stride;

  template <class T>
  T* row(int64_t r) const {
    return static_cast<T*>(data) + r * stride;
  }
};

namespace {

template <class T>
void rms_norm(const Rows& norm, const T* x, T* out, double eps, Acc<T>* rstds) {
  using A = Acc<T>;
  const int64_t n = norm.columns;
  const int parts = parts_of(norm.threads, norm.rows * n, norm.rows);
  const Scratch<A> weight = widened<A>(norm.weight, norm.weight_dtype, n, A{1});
  const A* w = weight.at(0);
  each_part(parts, [&](int part) {
    for (int64_t r = share(norm.rows, part, parts); r < share(norm.rows, part + 1, parts); ++r) {
      const T* from = x + r * n;
      T* to = out + r * n;
      const Two sums = sums_of_run<A>(n, [=](int64_t i, auto count, Vector<A>& one, Vector<A>&) {
        const Vector<A> v = load(from + i, count);
        one += v * v;
      });
      const A rstd = static_cast<A>(1 / std::sqrt(sums.first / static_cast<double>(n) + eps));
      rstds[r] = rstd;
      over_vectors<A>(n, [=](int64_t i, auto count) {
        store(to + i, load(from + i, count) * rstd * load(w + i, count), count);
      });
    }
  });
}

// xhat = (saved - mean) * rstd of the row, or (saved - bias) * inverse of the column.
template <class A>
struct Row {
  A mean, rstd, along, offset;  // dx = rstd * g - along * xhat - offset
};

template <class A>
struct Columns {
  const A *weight, *inverse, *bias;
};

template <bool kFromOutput, class T, class Count>
inline Vector<Acc<T>> xhat_of(const T* saved, int64_t c, Count count, const Row<Acc<T>>& row,
                              const Columns<Acc<T>>& by) {
  const Vector<Acc<T>> v = load(saved + c, count);
  if constexpr (kFromOutput) return (v - load(by.bias + c, count)) * load(by.inverse + c, count);
  else return (v - row.mean) * row.rstd;
}

template <class T, bool kFromOutput>
void backward(const Rows& norm, const T* dy, const T* saved, T* out, const Acc<T>* mean, const Acc<T>* rstd,
              Acc<T>* to) {
  using A = Acc<T>;
  const int64_t n = norm.columns;
  const int parts = parts_of(norm.threads, norm.rows * n, norm.rows);
  const Scratch<A> weight = widened<A>(norm.weight, norm.weight_dtype, n, A{1});
  const Scratch<A> bias = widened<A>(norm.bias, norm.bias_dtype, n, A{0}), inverse(n);
  for (int64_t c = 0; c < n; ++c) {
    const A by = 1 / *weight.at(c);
    *inverse.at(c) = std::isinf(by) ? 0 : by;  // a weight of 0, or so small that nothing is known of xhat
  }
  const Columns<A> by{weight.at(0), inverse.at(0), bias.at(0)};
  const ColumnSums<A> sums(parts, n);

  each_part(parts, [&](int part) {
    sums.clear(part);
    A* block = sums.block(part);
    const int64_t begin = share(norm.rows, part, parts), end = share(norm.rows, part + 1, parts);
    for (int64_t r = begin; r < end; ++r) {
      const T *g = dy + r * n, *s = saved + r * n;
      T* dx = out ? out + r * n : nullptr;
      Row<A> row{mean && norm.centred ? mean[r] : A{0}, rstd[r], 0, 0};
      if (dx) {
        const Two two = sums_of_run<A>(n, [&](int64_t c, auto count, Vector<A>& one, Vector<A>& dot) {
          const Vector<A> scaled = load(g + c, count) * load(by.weight + c, count);
          one += scaled;
          dot += scaled * xhat_of<kFromOutput>(s, c, count, row, by);
        });
        const double scale = static_cast<double>(row.rstd) / static_cast<double>(n);
        row.along = static_cast<A>(scale * two.second);
        row.offset = norm.centred ? static_cast<A>(scale * two.first) : A{0};
      }
      over_vectors<A>(n, [&](int64_t c, auto count) {
        const Vector<A> d = load(g + c, count), xhat = xhat_of<kFromOutput>(s, c, count, row, by);
        store(block + c, load(block + c, count) + d, count);
        store(block + n + c, load(block + n + c, count) + d * xhat, count);
        if (dx) store(dx + c, row.rstd * (d * load(by.weight + c, count)) - (row.along * xhat + row.offset), count);
      });
      if ((r - begin) % ColumnSums<A>::kBlockRows == ColumnSums<A>::kBlockRows - 1) sums.flush(part);
    }
    sums.flush(part);
  });
  for (int64_t c = 0; c < n; ++c) {
    const Two two = sums.over_parts(c, parts);
    to[c] = static_cast<A>(two.first);
    to[n + c] = static_cast<A>(two.second);
  }
}

// `each(row, at, count)` for the vector at column `at` of `row`.
template <class A, class Each>
void over_matrix(int64_t rows, int64_t columns, int threads, Each each) {
  const int64_t elements = rows * columns;
  if (!elements) return;
  const int parts = parts_of(threads, elements, elements);
  each_part(parts, [&](int part) {
    const int64_t begin = share(elements, part, parts), end = share(elements, part + 1, parts);
    over_runs(begin, end, columns, [&](int64_t row, int64_t at, int64_t size) {
      over_vectors<A>(size, [&](int64_t i, auto count) { each(row, at + i, count); });
    });
  });
}

template <class T>
void swiglu(int64_t rows, int64_t columns, int threads, Matrix gate, Matrix up, Matrix out) {
  using A = Acc<T>;
  over_matrix<A>(rows, columns, threads, [=](int64_t r, int64_t c, auto count) {
    const Vector<A> g = load(gate.row<T>(r) + c, count), u = load(up.row<T>(r) + c, count);
    store(out.row<T>(r) + c, Silu<A>().forward(g) * u, count);
  });
}

template <class T>
void swiglu_backward(int64_t rows, int64_t columns, int threads, Matrix dy, Matrix gate, Matrix up, Matrix dgate,
                     Matrix dup) {
  using A = Acc<T>;
  over_matrix<A>(rows, columns, threads, [=](int64_t r, int64_t c, auto count) {
    const Vector<A> d = load(dy.row<T>(r) + c, count), z = load(gate.row<T>(r) + c, count);
    const Vector<A> u = load(up.row<T>(r) + c, count), sigmoid = 1 / (exp(-z) + 1);
    store(dgate.row<T>(r) + c, d * u * (sigmoid * (z * (1 - sigmoid) + 1)), count);
    store(dup.row<T>(r) + c, d * (z * sigmoid), count);
  });
}

}  // namespace
}  // namespace takeback

#define TAKEBACK_EXPORT extern "C" __attribute__((visibility("default")))

using namespace takeback;

TAKEBACK_EXPORT int tb_rms_norm(const Rows* norm, const void* x, void* out, double eps, void* rstd) {
  return with_dtype(norm->dtype, [=]<class T>(T) {
    rms_norm(*norm, static_cast<const T*>(x), static_cast<T*>(out), eps, static_cast<Acc<T>*>(rstd));
  });
}

// out may be null: not wanted. mean is null where it is not read. sums: [2, columns].
TAKEBACK_EXPORT int tb_row_backward(const Rows* norm, const void* dy, const void* saved, void* out, const void* mean,
                                    const void* rstd, void* sums) {
  return with_dtype(norm->dtype, [=]<class T>(T) {
    using A = Acc<T>;
    const auto call = norm->from_output ? backward<T, true> : backward<T, false>;
    call(*norm, static_cast<const T*>(dy), static_cast<const T*>(saved), static_cast<T*>(out),
         static_cast<const A*>(mean), static_cast<const A*>(rstd), static_cast<A*>(sums));
  });
}

TAKEBACK_EXPORT int tb_swiglu(int dtype, int threads, int64_t rows, int64_t columns, Matrix gate, Matrix up,
                              Matrix out) {
  return with_dtype(dtype, [=]<class T>(T) { swiglu<T>(rows, columns, threads, gate, up, out); });
}

TAKEBACK_EXPORT int tb_swiglu_backward(int dtype, int threads, int64_t rows, int64_t columns, Matrix dy, Matrix gate,
                                       Matrix up, Matrix dgate, Matrix dup) {
  return with_dtype(dtype, [=]<class T>(T) { swiglu_backward<T>(rows, columns, threads, dy, gate, up, dgate, dup); });
}
