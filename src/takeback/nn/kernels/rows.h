// layer_norm and rms_norm: each row has its own statistics, each column its own parameters. dx and the columns' sums
// come out of one walk over a few rows; what dx needs of a whole row is summed just before.

#pragma once

#include "call.h"

namespace takeback {

// dx = scale * weight * dy + slope * (x - mean) + offset, with one of each a row.
template <class A>
struct RowFactors {
  A mean, rstd, scale, slope, offset;
};

// Rows dy, x, dx + r * columns, r in [0, count): their dx, and the columns' sums of dy and dy * (x - mean) * rstd.
template <class T, bool kSums, bool kDx>
void walk_rows(const T* dy, const T* x, T* dx, const RowFactors<Acc<T>>* rows, int64_t count, const Acc<T>* weight,
               int64_t columns, Acc<T>* block) {
  using A = Acc<T>;
  constexpr int W = kLanes<A>;
  const auto tile = [&]<int N>(int64_t c) {
    Vector<A> sum[N] = {}, dot[N] = {}, w[N];
    for (int j = 0; j < N; ++j) w[j] = load(weight + c + j * W);
    for (int64_t r = 0; r < count; ++r) {
      const RowFactors<A>& row = rows[r];
      for (int j = 0; j < N; ++j) {
        const int64_t at = r * columns + c + j * W;
        const Vector<A> g = load(dy + at), away = load(x + at) - row.mean;
        if constexpr (kSums) {
          sum[j] += g;
          dot[j] += g * (away * row.rstd);
        }
        if constexpr (kDx) store(dx + at, row.scale * (w[j] * g) + (row.slope * away + row.offset));
      }
    }
    for (int j = 0; kSums && j < N; ++j) {
      A* to = block + c + j * W;
      store(to, load(to) + sum[j]);
      store(to + columns, load(to + columns) + dot[j]);
    }
  };
  over_columns<A>(columns, tile, [&](int64_t c) {
    A sum = 0, dot = 0;
    for (int64_t r = 0; r < count; ++r) {
      const RowFactors<A>& row = rows[r];
      const A g = widen(dy[r * columns + c]), away = widen(x[r * columns + c]) - row.mean;
      sum += g;
      dot += g * (away * row.rstd);
      if constexpr (kDx) narrow(row.scale * (weight[c] * g) + (row.slope * away + row.offset), dx[r * columns + c]);
    }
    if constexpr (kSums) {
      block[c] += sum;
      block[columns + c] += dot;
    }
  });
}

template <class T>
RowFactors<Acc<T>> layer_norm_row(const T* dy, const T* x, const Acc<T>* weight, int64_t n, Acc<T> mean, Acc<T> rstd,
                                  bool dx) {
  using A = Acc<T>;
  if (!dx) return {mean, rstd, 0, 0, 0};
  Sums<A> sums;
  sums.add(
      n,
      [=](int64_t i, Vector<A>& one, Vector<A>& two) {
        const Vector<A> g = load(dy + i) * load(weight + i);
        one += g;
        two += g * (load(x + i) - mean);
      },
      [=](int64_t i, A& one, A& two) {
        const A g = widen(dy[i]) * weight[i];
        one += g;
        two += g * (widen(x[i]) - mean);
      });
  const Two two = sums.total();
  const double r = rstd, count = static_cast<double>(n);
  return {mean, rstd, rstd, static_cast<A>(-r * r * r * two.second / count), static_cast<A>(-r * two.first / count)};
}

template <class T>
RowFactors<Acc<T>> rms_norm_row(const T* dy, const T* x, const Acc<T>* weight, int64_t n, double eps) {
  using A = Acc<T>;
  Sums<A> sums;
  sums.add(
      n,
      [=](int64_t i, Vector<A>& one, Vector<A>& two) {
        const Vector<A> v = load(x + i);
        one += v * v;
        two += (load(dy + i) * load(weight + i)) * v;
      },
      [=](int64_t i, A& one, A& two) {
        const A v = widen(x[i]);
        one += v * v;
        two += (widen(dy[i]) * weight[i]) * v;
      });
  const Two two = sums.total();
  const double count = static_cast<double>(n), r = 1 / std::sqrt(two.first / count + eps);
  return {0, static_cast<A>(r), static_cast<A>(r), static_cast<A>(-r * r * r * two.second / count), 0};
}

template <class T, bool kCentred>
void row_norm(const Call& call) {
  using A = Acc<T>;
  const int64_t n = call.channels, at_once = rows_at_once(n);
  const int parts = parts_of(call, call.batch);
  const bool sums = call.wants_sums();
  const Scratch<A> weight = weight_of<A>(call);
  const ColumnSums<A> columns(sums ? parts : 0, n);
  const T *dy = static_cast<const T*>(call.dy), *x = static_cast<const T*>(call.x);
  T* dx = static_cast<T*>(call.dx);
  const A *mean = static_cast<const A*>(call.mean), *rstd = static_cast<const A*>(call.rstd), *w = weight.at(0);

  each_part(parts, [&](int part) {
    if (sums) columns.clear(part);
    A* block = sums ? columns.block(part) : nullptr;
    int64_t since = 0;
    const int64_t end = share(call.batch, part + 1, parts);
    for (int64_t first = share(call.batch, part, parts); first < end; first += at_once) {
      const int64_t count = std::min(at_once, end - first);
      const T *g = dy + first * n, *v = x + first * n;
      T* to = dx ? dx + first * n : nullptr;
      RowFactors<A> rows[kMostRows];
      for (int64_t r = 0; r < count; ++r) {
        if constexpr (kCentred)
          rows[r] = layer_norm_row(g + r * n, v + r * n, w, n, mean[first + r], rstd[first + r], dx != nullptr);
        else
          rows[r] = rms_norm_row(g + r * n, v + r * n, w, n, call.eps);
      }
      if (sums && dx) walk_rows<T, true, true>(g, v, to, rows, count, w, n, block);
      else if (sums) walk_rows<T, true, false>(g, v, to, rows, count, w, n, block);
      else if (dx) walk_rows<T, false, true>(g, v, to, rows, count, w, n, block);
      since += count;
      if (sums && since + at_once > ColumnSums<A>::kBlockRows) {
        columns.flush(part);
        since = 0;
      }
    }
    if (sums) columns.flush(part);
  });
  for (int64_t c = 0; sums && c < n; ++c) {
    const Two two = columns.over_parts(c, parts);
    call.put(c, two.first, two.second);
  }
}

}  // namespace takeback
