// Mean and variance of channels, read once from memory.
//
// A block's sums are of what is left of x after a shift, which is the mean of the blocks before it (a channel's first
// block is read twice, the second time from the cache). So no cancellation is worse than a few roundings of the
// variance, wherever the mean lies: a block far from the shift makes the variance itself as large as that distance.

#pragma once

#include "activated.h"

namespace takeback {

// Of elements seen so far: their number, their mean, the sum of squares of what is left after the mean.
struct Moments {
  double count = 0, mean = 0, squares = 0;

  void add(const Moments& other) {
    if (other.count == 0) return;
    const double all = count + other.count, away = other.mean - mean;
    mean += away * (other.count / all);
    squares += other.squares + away * away * (count * other.count / all);
    count = all;
  }
};

// What blocks of `size` elements weigh beside `before` others: divided once for all channels.
struct Weights {
  double before = -1, size = 0, inverse = 0, part = 0;

  Weights() = default;
  Weights(double before, double size)
      : before(before), size(size), inverse(1 / size), part(size / (before + size)) {}
  // Add a block to mean and squares: its sums of x - shift, and of the square of that.
  void add(double& mean, double& squares, double shift, double sum, double sum_of_squares) const {
    const double away = sum * inverse, left = sum_of_squares - sum * away, off = shift + away - mean;
    squares += (left < 0 ? 0 : left) + off * off * (before * part);
    mean += off * part;
  }
};

template <class T>
inline Two shifted_sums(const T* x, int64_t n, Acc<T> shift) {
  using A = Acc<T>;
  return sums_of_block<A>(n, [=](int64_t i, auto count, Vector<A>& one, Vector<A>& two) {
    const Vector<A> left = counted(load(x + i, count) - shift, count);
    one += left;
    two += left * left;
  });
}

template <class A>
void put_moments(const Moments& all, int64_t c, int64_t channels, A* out) {
  out[c] = static_cast<A>(all.mean);
  out[channels + c] = static_cast<A>(all.squares / all.count);
}

template <class T>
void statistics_of_runs(const Layer& layer, const T* x, Acc<T>* out) {
  using A = Acc<T>;
  const int64_t channels = layer.channels, elements = layer.elements();
  const int parts = parts_of(layer.threads, elements, elements);
  const Scratch<Moments> moments(parts * channels);
  each_part(parts, [&](int part) {
    Moments* mine = moments.at(part * channels);
    std::fill_n(mine, channels, Moments{});
    Weights weights;
    const auto add = [&](int64_t c, int64_t at, int64_t count) {
      Moments& channel = mine[c];
      for (int64_t first = at; first < at + count; first += kBlock) {
        const int64_t size = std::min(kBlock, at + count - first);
        const double wide = static_cast<double>(size);
        if (channel.count == 0) channel.mean = shifted_sums<T>(x + first, size, 0).first / wide;
        if (weights.before != channel.count || weights.size != wide) weights = Weights(channel.count, wide);
        const A shift = static_cast<A>(channel.mean);
        const Two sums = shifted_sums<T>(x + first, size, shift);
        weights.add(channel.mean, channel.squares, shift, sums.first, sums.second);
        channel.count += wide;
      }
    };
    over_spots(layer, share(elements, part, parts), share(elements, part + 1, parts), add);
  });
  for (int64_t c = 0; c < channels; ++c) {
    Moments all;
    for (int part = 0; part < parts; ++part) all.add(*moments.at(part * channels + c));
    put_moments(all, c, channels, out);
  }
}

// Columns' sums of x - shift and of its square over whole rows, put into block[0, n) and block[n, 2n).
template <class T>
inline void sum_rows(const T* x, const Acc<T>* shift, int64_t rows, int64_t n, Acc<T>* block) {
  using A = Acc<T>;
  std::fill_n(block, 2 * n, A{0});
  for (int64_t r = 0; r < rows; ++r)  // along memory: to read down the columns takes several times as long
    over_vectors<A>(n, [=](int64_t c, auto count) {
      const Vector<A> left = load(x + r * n + c, count) - load(shift + c, count);
      store(block + c, load(block + c, count) + left, count);
      store(block + n + c, load(block + n + c, count) + left * left, count);
    });
}

template <class T>
void statistics_of_rows(const Layer& layer, const T* x, Acc<T>* out) {
  using A = Acc<T>;
  constexpr int64_t kFirst = 8, kMost = 64;  // rows of a block: a lane adds as many floats
  const int64_t channels = layer.channels, n = channels * folds<A>(layer), rows = layer.elements() / n;
  const int parts = parts_of(layer.threads, layer.elements(), rows);
  const Scratch<double> means(parts * n), squares(parts * n);
  const Scratch<A> shifts(parts * n), blocks(parts * 2 * n);
  each_part(parts, [&](int part) {
    double *mean = means.at(part * n), *square = squares.at(part * n);
    A *shift = shifts.at(part * n), *block = blocks.at(part * 2 * n);
    const int64_t begin = share(rows, part, parts), end = share(rows, part + 1, parts);
    std::fill_n(mean, n, 0.0);
    std::fill_n(square, n, 0.0);
    std::fill_n(shift, n, A{0});
    for (int64_t first = begin, count; first < end; first += count) {
      // At most as many rows as there were before: their mean is worth as much as the block's own.
      count = std::min({kMost, std::max(kFirst, first - begin), end - first});
      if (first == begin) {
        sum_rows(x + first * n, shift, count, n, block);
        for (int64_t c = 0; c < n; ++c) mean[c] = static_cast<double>(block[c]) / static_cast<double>(count);
        for (int64_t c = 0; c < n; ++c) shift[c] = static_cast<A>(mean[c]);
      }
      sum_rows(x + first * n, shift, count, n, block);
      const Weights weights(static_cast<double>(first - begin), static_cast<double>(count));
#pragma omp simd
      for (int64_t c = 0; c < n; ++c) {
        weights.add(mean[c], square[c], shift[c], block[c], block[n + c]);
        shift[c] = static_cast<A>(mean[c]);
      }
    }
  });
  for (int64_t c = 0; c < channels; ++c) {
    Moments all;
    for (int part = 0; part < parts; ++part) {
      const double size = static_cast<double>(share(rows, part + 1, parts) - share(rows, part, parts));
      for (int64_t i = part * n + c; i < (part + 1) * n; i += channels) all.add({size, *means.at(i), *squares.at(i)});
    }
    for (int64_t i = rows * n + c; i < layer.elements(); i += channels)  // the row that is not whole
      all.add({1, static_cast<double>(widen(x[i])), 0});
    put_moments(all, c, channels, out);
  }
}

}  // namespace takeback
