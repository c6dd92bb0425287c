// batch_norm and group_norm: each channel has its own parameters, and lies in runs (N x C x S) or, for batch_norm, in
// columns (N x C, channels last). Sums of dy and dy * (x - mean) come first; dx is made of them, while x is still near.

#pragma once

#include "call.h"

namespace takeback {

// dx = scale * dy + slope * (x - mean) + offset.
template <class A>
struct Factors {
  A mean, scale, slope, offset;
};

template <class T>
void add_run(Sums<Acc<T>>& sums, const T* dy, const T* x, Acc<T> mean, int64_t n) {
  using A = Acc<T>;
  sums.add(
      n,
      [=](int64_t i, Vector<A>& one, Vector<A>& two) {
        const Vector<A> g = load(dy + i);
        one += g;
        two += g * (load(x + i) - mean);
      },
      [=](int64_t i, A& one, A& two) {
        const A g = widen(dy[i]);
        one += g;
        two += g * (widen(x[i]) - mean);
      });
}

// Without `kTraining`, x is not read: dx = scale * dy.
template <class T, bool kTraining>
void put_run(const T* dy, const T* x, T* dx, int64_t n, Factors<Acc<T>> by) {
  using A = Acc<T>;
  const auto value = [by](auto g, auto v) {
    if constexpr (kTraining) return by.scale * g + (by.slope * (v - by.mean) + by.offset);
    else return by.scale * g;
  };
  int64_t i = 0;
  for (; i + kLanes<A> <= n; i += kLanes<A>) {
    Vector<A> v = {};
    if constexpr (kTraining) v = load(x + i);
    store(dx + i, value(load(dy + i), v));
  }
  for (; i < n; ++i) narrow(value(widen(dy[i]), kTraining ? widen(x[i]) : A{0}), dx[i]);
}

// A channel's sums become its parameters' gradients, and what its dx is made of.
template <class A>
Factors<A> finish_channel(const Call& call, int64_t c, A weight, Two sums) {
  const double rstd = static_cast<const A*>(call.rstd)[c], scale = weight * rstd;
  const double count = static_cast<double>(call.batch * call.spots);
  call.put(c, sums.first, sums.second * rstd);
  Factors<A> by{static_cast<const A*>(call.mean)[c], static_cast<A>(scale), 0, 0};
  if (call.training) {
    by.slope = static_cast<A>(-scale * rstd * rstd * sums.second / count);
    by.offset = static_cast<A>(-scale * sums.first / count);
  }
  return by;
}

template <class T, bool kTraining>
void batch_norm_runs(const Call& call) {
  using A = Acc<T>;
  const int64_t samples = call.batch, channels = call.channels, n = call.spots, runs = samples * channels;
  const bool sums = kTraining || call.wants_sums();
  const T *dy = static_cast<const T*>(call.dy), *x = static_cast<const T*>(call.x);
  T* dx = static_cast<T*>(call.dx);
  const A* mean = static_cast<const A*>(call.mean);
  const Scratch<A> weight = weight_of<A>(call);
  const auto start = [=](int64_t sample, int64_t c) { return (sample * channels + c) * n; };
  const auto put = [&](int64_t at, const Factors<A>& by) { put_run<T, kTraining>(dy + at, x + at, dx + at, n, by); };

  const int parts = parts_of(call, channels);
  if (parts == parts_of(call, runs)) {  // channels enough for all threads: a channel stays in one thread's cache
    return each_part(parts, [&](int part) {
      for (int64_t c = share(channels, part, parts); c < share(channels, part + 1, parts); ++c) {
        Sums<A> all;
        for (int64_t s = 0; sums && s < samples; ++s) add_run(all, dy + start(s, c), x + start(s, c), mean[c], n);
        const Factors<A> by = finish_channel(call, c, *weight.at(c), all.total());
        for (int64_t s = samples; dx && s-- > 0;) put(start(s, c), by);  // backwards: the last read is nearest
      }
    });
  }
  const int many = parts_of(call, runs);
  const Scratch<Two> partial(runs);
  const Scratch<Factors<A>> factors(channels);
  each_part(many, [&](int part) {
    for (int64_t i = share(runs, part, many); i < share(runs, part + 1, many); ++i) {
      Sums<A> run;
      if (sums) add_run(run, dy + i * n, x + i * n, mean[i % channels], n);
      *partial.at(i) = run.total();
    }
  });
  for (int64_t c = 0; c < channels; ++c) {
    Two all;
    for (int64_t s = 0; s < samples; ++s) all.add(*partial.at(s * channels + c));
    *factors.at(c) = finish_channel(call, c, *weight.at(c), all);
  }
  if (!dx) return;
  each_part(many, [&](int part) {
    for (int64_t i = share(runs, part + 1, many); i-- > share(runs, part, many);) put(i * n, *factors.at(i % channels));
  });
}

// Columns' sums of dy and dy * (x - mean) over `count` rows, added to block[0, n) and block[n, 2n).
template <class T>
void add_rows(const T* dy, const T* x, const Acc<T>* mean, int64_t count, int64_t n, Acc<T>* block) {
  using A = Acc<T>;
  constexpr int W = kLanes<A>;
  const auto tile = [&]<int N>(int64_t c) {
    Vector<A> sum[N] = {}, dot[N] = {}, m[N];
    for (int j = 0; j < N; ++j) m[j] = load(mean + c + j * W);
    for (int64_t r = 0; r < count; ++r)
      for (int j = 0; j < N; ++j) {
        const int64_t at = r * n + c + j * W;
        const Vector<A> g = load(dy + at);
        sum[j] += g;
        dot[j] += g * (load(x + at) - m[j]);
      }
    for (int j = 0; j < N; ++j) {
      A* to = block + c + j * W;
      store(to, load(to) + sum[j]);
      store(to + n, load(to + n) + dot[j]);
    }
  };
  over_columns<A>(n, tile, [&](int64_t c) {
    A sum = 0, dot = 0;
    for (int64_t r = 0; r < count; ++r) {
      const A g = widen(dy[r * n + c]);
      sum += g;
      dot += g * (widen(x[r * n + c]) - mean[c]);
    }
    block[c] += sum;
    block[n + c] += dot;
  });
}

// dx of `count` rows; factors are columns of n: scale, slope, offset.
template <class T, bool kTraining>
void put_rows(const T* dy, const T* x, T* dx, const Acc<T>* mean, const Acc<T>* factors, int64_t count, int64_t n) {
  using A = Acc<T>;
  constexpr int W = kLanes<A>;
  const auto tile = [&]<int N>(int64_t c) {
    Vector<A> m[N], scale[N], slope[N], offset[N];
    for (int j = 0; j < N; ++j) {
      m[j] = load(mean + c + j * W);
      scale[j] = load(factors + c + j * W);
      slope[j] = load(factors + n + c + j * W);
      offset[j] = load(factors + 2 * n + c + j * W);
    }
    for (int64_t r = 0; r < count; ++r)
      for (int j = 0; j < N; ++j) {
        const int64_t at = r * n + c + j * W;
        Vector<A> value = scale[j] * load(dy + at);
        if constexpr (kTraining) value += slope[j] * (load(x + at) - m[j]) + offset[j];
        store(dx + at, value);
      }
  };
  over_columns<A>(n, tile, [&](int64_t c) {
    for (int64_t r = 0; r < count; ++r) {
      A value = factors[c] * widen(dy[r * n + c]);
      if constexpr (kTraining) value += factors[n + c] * (widen(x[r * n + c]) - mean[c]) + factors[2 * n + c];
      narrow(value, dx[r * n + c]);
    }
  });
}

template <class T, bool kTraining>
void batch_norm_rows(const Call& call) {
  using A = Acc<T>;
  const int64_t rows = call.batch * call.spots, n = call.channels, at_once = rows_at_once(n);
  const bool sums = kTraining || call.wants_sums();
  const int parts = parts_of(call, rows);
  const T *dy = static_cast<const T*>(call.dy), *x = static_cast<const T*>(call.x);
  T* dx = static_cast<T*>(call.dx);
  const A* mean = static_cast<const A*>(call.mean);
  const Scratch<A> weight = weight_of<A>(call), factors(3 * n);
  const ColumnSums<A> columns(parts, n);

  each_part(parts, [&](int part) {
    columns.clear(part);
    int64_t since = 0;
    const int64_t end = share(rows, part + 1, parts);
    for (int64_t first = share(rows, part, parts); sums && first < end; first += at_once) {
      const int64_t count = std::min(at_once, end - first);
      add_rows(dy + first * n, x + first * n, mean, count, n, columns.block(part));
      since += count;
      if (since + at_once > ColumnSums<A>::kBlockRows) {
        columns.flush(part);
        since = 0;
      }
    }
    columns.flush(part);
  });
  for (int64_t c = 0; c < n; ++c) {
    const Factors<A> by = finish_channel(call, c, *weight.at(c), columns.over_parts(c, parts));
    *factors.at(c) = by.scale;
    *factors.at(n + c) = by.slope;
    *factors.at(2 * n + c) = by.offset;
  }
  if (!dx) return;
  each_part(parts, [&](int part) {
    const int64_t end = share(rows, part + 1, parts);
    for (int64_t first = share(rows, part, parts); first < end; first += at_once) {
      const int64_t count = std::min(at_once, end - first);
      put_rows<T, kTraining>(dy + first * n, x + first * n, dx + first * n, mean, factors.at(0), count, n);
    }
  });
}

// N x C x S, with one mean and rstd for each sample and group of channels.
template <class T>
void group_norm(const Call& call) {
  using A = Acc<T>;
  const int64_t n = call.spots, each = call.channels / call.groups, blocks = call.batch * call.groups;
  const int parts = parts_of(call, blocks);
  const T *dy = static_cast<const T*>(call.dy), *x = static_cast<const T*>(call.x);
  T* dx = static_cast<T*>(call.dx);
  const A *mean = static_cast<const A*>(call.mean), *rstd = static_cast<const A*>(call.rstd);
  const Scratch<A> weight = weight_of<A>(call);
  const Scratch<Two> partial(blocks * each);

  each_part(parts, [&](int part) {
    for (int64_t b = share(blocks, part, parts); b < share(blocks, part + 1, parts); ++b) {
      const A* w = weight.at(b % call.groups * each);
      const double r = rstd[b], count = static_cast<double>(each * n);
      Two all;
      for (int64_t i = b * each; i < (b + 1) * each; ++i) {
        Sums<A> run;
        add_run(run, dy + i * n, x + i * n, mean[b], n);
        const Two two = run.total();
        *partial.at(i) = {two.first, two.second * r};
        all.add({w[i - b * each] * two.first, w[i - b * each] * two.second});
      }
      Factors<A> by{mean[b], 0, static_cast<A>(-r * r * r * all.second / count), static_cast<A>(-r * all.first / count)};
      for (int64_t i = b * each; dx && i < (b + 1) * each; ++i) {
        by.scale = static_cast<A>(w[i - b * each] * r);
        put_run<T, true>(dy + i * n, x + i * n, dx + i * n, n, by);
      }
    }
  });
  for (int64_t c = 0; c < call.channels; ++c) {
    Two all;
    for (int64_t sample = 0; sample < call.batch; ++sample) all.add(*partial.at(sample * call.channels + c));
    call.put(c, all.first, all.second);
  }
}

}  // namespace takeback
