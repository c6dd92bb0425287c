// An activated batch norm as Python hands it over, and its channels' constants.

#pragma once

#include "activations.h"
#include "lanes.h"

namespace takeback {

// The fields are those of _NativeLayer in activated_cpu.py.
struct Layer {
  const void* weight;  // null: ones
  const void* bias;    // null: zeros
  int64_t batch;
  int64_t channels;
  int64_t spots;
  double param;
  double absolute_eps;
  int32_t dtype;
  int32_t weight_dtype;
  int32_t bias_dtype;
  int32_t activation;
  int32_t last;
  int32_t absolute;  // gamma = |weight| + absolute_eps
  int32_t from_output;
  int32_t threads;

  int64_t rows() const { return batch * spots; }
  int64_t elements() const { return batch * channels * spots; }
};

// How many rows of channels-last memory are taken as one long row: so many that few channels fill whole vectors.
// The last of the long rows may be shorter.
template <class A>
inline int64_t folds(const Layer& layer) {
  constexpr int64_t kShort = 4 * kLanes<A>, kLong = 2048;
  if (!layer.channels) return 1;
  int64_t folds = 1;
  while (layer.channels * folds % kLanes<A> || layer.channels * folds < kShort) folds *= 2;
  return layer.channels * folds > kLong || folds > layer.rows() ? 1 : folds;
}

// z = scale * away + beta, where away = x - mean; from the output, away = z - beta.
// dx = scale * dz + slope * away + offset.
// An A each for one channel, a vector each for as many channels as it has lanes.
template <class V>
struct Constants {
  V mean, scale, beta, slope, offset;
};

// The constants of all channels, one after the other, and where channels lie last as often as rows are folded.
template <class A>
class Tables {
 public:
  // `means` may be null: the statistics are constants, and slope and offset are 0. mean and invstd may be null in turn
  // where only sums are gathered from the output.
  Tables(const Layer& layer, const A* mean, const A* invstd, const A* means)
      : n_(layer.channels * (layer.last ? folds<A>(layer) : 1)), data_(5 * n_), factors_(layer.channels) {
    const int64_t channels = layer.channels;
    const Scratch<A> weight = widened<A>(layer.weight, layer.weight_dtype, channels, A{1});
    const Scratch<A> bias = widened<A>(layer.bias, layer.bias_dtype, channels, A{0});
    for (int64_t c = 0; c < channels; ++c) {
      const double w = *weight.at(c), gamma = layer.absolute ? std::abs(w) + layer.absolute_eps : w;
      const double r = invstd ? invstd[c] : 0, scale = gamma * r;
      const double factor = layer.from_output ? (gamma == 0 ? 0 : 1 / gamma) : r;
      *at(0, c) = mean ? mean[c] : A{0};
      *at(1, c) = static_cast<A>(scale);
      *at(2, c) = *bias.at(c);
      *at(3, c) = means ? static_cast<A>(-scale * means[channels + c] * factor) : A{0};
      *at(4, c) = means ? static_cast<A>(-scale * means[c]) : A{0};
      *factors_.at(c) = factor;
    }
    for (int which = 0; which < 5; ++which)
      for (int64_t c = channels; c < n_; ++c) *at(which, c) = *at(which, c - channels);
  }
  int64_t columns() const { return n_; }
  Constants<A> channel(int64_t c) const { return {*at(0, c), *at(1, c), *at(2, c), *at(3, c), *at(4, c)}; }
  template <class Count>
  Constants<Vector<A>> vectors(int64_t c, Count count) const {
    return {load(at(0, c), count), load(at(1, c), count), load(at(2, c), count), load(at(3, c), count),
            load(at(4, c), count)};
  }
  double factor(int64_t c) const { return *factors_.at(c); }  // xhat = away * factor

 private:
  A* at(int which, int64_t c) const { return data_.at(which * n_ + c); }

  int64_t n_;
  Scratch<A> data_;
  Scratch<double> factors_;
};

// Elements [begin, end) of [batch, channels, spots]: `each(channel, at, count)`, at counted from the tensor's start.
template <class Each>
inline void over_spots(const Layer& layer, int64_t begin, int64_t end, Each each) {
  if (begin == end) return;
  int64_t channel = begin / layer.spots % layer.channels;
  over_runs(begin, end, layer.spots, [&](int64_t run, int64_t at, int64_t count) {
    each(channel, run * layer.spots + at, count);
    if (++channel == layer.channels) channel = 0;
  });
}

}  // namespace takeback
