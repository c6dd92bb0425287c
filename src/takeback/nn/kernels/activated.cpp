// Batch norm and the activation after it on the CPU: statistics, forward, and backward from the output or the input.
//
// Memory contract
//   * Tensors lie as [batch, channels, spots], or as [batch * spots, channels] where `last`; tables are as wide as
//     arithmetic. `out` may be exactly `x` or `saved`: each vector is stored after the loads of the same elements, by
//     the same thread, and before those of the next. All else is only read.
//   * Scratch is a few numbers a channel and thread, taken before anything is written. Where it cannot be had the
//     result is 1, and nothing was written.
//   * Equal inputs and thread counts give equal bits: every thread's share, and the order of sums, is fixed.

#include "activated.h"
#include "statistics.h"

namespace takeback {
namespace {

// The loop over elements that are not summed: `each(at, count, constants)` for the vector at element `at`.
template <class A, class Each>
void over_elements(const Layer& layer, const Tables<A>& tables, Each each) {
  const int64_t elements = layer.elements(), n = tables.columns();
  const int parts = parts_of(layer.threads, elements, elements);
  each_part(parts, [&](int part) {
    const int64_t begin = share(elements, part, parts), end = share(elements, part + 1, parts);
    if (layer.last)
      return over_runs(begin, end, n, [&](int64_t row, int64_t at, int64_t size) {
        over_vectors<A>(size, [&](int64_t i, auto count) {
          each(row * n + at + i, count, tables.vectors(at + i, count));
        });
      });
    over_spots(layer, begin, end, [&](int64_t channel, int64_t first, int64_t size) {
      const Constants<A> by = tables.channel(channel);
      over_vectors<A>(size, [&](int64_t i, auto count) { each(first + i, count, by); });
    });
  });
}

template <class T, class Act>
void normalise(const Layer& layer, Act act, const T* x, T* out, const Tables<Acc<T>>& tables) {
  over_elements(layer, tables, [=](int64_t at, auto count, const auto& by) {
    store(out + at, act.forward((load(x + at, count) - by.mean) * by.scale + by.beta), count);
  });
}

// dz, and what xhat is a multiple of.
template <class A>
struct Back {
  Vector<A> dz, away;
};

template <bool kFromOutput, class A, class Act, class V>
inline Back<A> back(const Act& act, Vector<A> dy, Vector<A> saved, const Constants<V>& by) {
  if constexpr (kFromOutput) {
    const Inverted<A> inverted = act.inverted(dy, saved);
    return {inverted.dz, inverted.z - by.beta};
  } else {
    const Vector<A> away = saved - by.mean;
    return {act.backward(dy, away * by.scale + by.beta), away};
  }
}

template <class T, class Act, bool kFromOutput>
void put(const Layer& layer, Act act, const T* dy, const T* saved, T* out, const Tables<Acc<T>>& tables,
         bool constant) {
  using A = Acc<T>;
  if (constant) {
    return over_elements(layer, tables, [=](int64_t at, auto count, const auto& by) {
      const Back<A> two = back<kFromOutput, A>(act, load(dy + at, count), load(saved + at, count), by);
      store(out + at, by.scale * two.dz, count);
    });
  }
  over_elements(layer, tables, [=](int64_t at, auto count, const auto& by) {
    const Back<A> two = back<kFromOutput, A>(act, load(dy + at, count), load(saved + at, count), by);
    store(out + at, by.scale * two.dz + (by.slope * two.away + by.offset), count);
  });
}

template <class T, class Act, bool kFromOutput>
void gather(const Layer& layer, Act act, const T* dy, const T* saved, Acc<T>* out, const Tables<Acc<T>>& tables) {
  using A = Acc<T>;
  const int64_t channels = layer.channels, elements = layer.elements(), n = tables.columns();
  if (!elements) return void(std::fill_n(out, 2 * channels, A{0}));
  const int64_t rows = (elements + n - 1) / n;  // where channels lie last
  const int parts = parts_of(layer.threads, elements, layer.last ? rows : elements);
  const ColumnSums<A> sums(parts, n);
  const auto add = [=](int64_t at, auto count, const auto& by, Vector<A>& one, Vector<A>& two) {
    const Back<A> each = back<kFromOutput, A>(act, load(dy + at, count), load(saved + at, count), by);
    one += each.dz;
    two += each.dz * each.away;
  };
  each_part(parts, [&](int part) {
    sums.clear(part);
    if (!layer.last) {
      const int64_t begin = share(elements, part, parts), end = share(elements, part + 1, parts);
      return over_spots(layer, begin, end, [&](int64_t channel, int64_t first, int64_t size) {
        const Constants<A> by = tables.channel(channel);
        sums.add(part, channel, sums_of_run<A>(size, [&](int64_t i, auto count, Vector<A>& one, Vector<A>& two) {
          add(first + i, count, by, one, two);
        }));
      });
    }
    A* block = sums.block(part);
    const int64_t begin = share(rows, part, parts), end = share(rows, part + 1, parts);
    for (int64_t row = begin; row < end; ++row) {
      over_vectors<A>(std::min(n, elements - row * n), [&](int64_t c, auto count) {
        Vector<A> one = load(block + c, count), two = load(block + n + c, count);
        add(row * n + c, count, tables.vectors(c, count), one, two);
        store(block + c, one, count);
        store(block + n + c, two, count);
      });
      if ((row - begin) % ColumnSums<A>::kBlockRows == ColumnSums<A>::kBlockRows - 1) sums.flush(part);
    }
    sums.flush(part);
  });
  for (int64_t c = 0; c < channels; ++c) {
    Two two;
    for (int64_t column = c; column < n; column += channels) two.add(sums.over_parts(column, parts));
    out[c] = static_cast<A>(two.first);
    out[channels + c] = static_cast<A>(two.second * tables.factor(c));
  }
}

// `with(act)` for the layer's activation.
template <class A, class With>
void with_activation(const Layer& layer, With with) {
  switch (layer.activation) {
    case kIdentity: return with(Linear<A>(1));
    case kLeakyRelu: return with(Linear<A>(layer.param));
    case kElu: return with(Elu<A>(layer.param));
    case kRelu: return with(Relu<A>(0));
    default: return with(Silu<A>());
  }
}

// The same, and `with.operator()<from_output>(act)`; from the output only for what can be inverted.
template <class A, class With>
void with_backward(const Layer& layer, With with) {
  with_activation<A>(layer, [&]<class Act>(Act act) {
    if constexpr (requires(Vector<A> v) { act.inverted(v, v); })
      if (layer.from_output) return with.template operator()<true>(act);
    with.template operator()<false>(act);
  });
}

}  // namespace
}  // namespace takeback

#define TAKEBACK_EXPORT extern "C" __attribute__((visibility("default")))

using namespace takeback;

// out: [2, channels], mean and biased variance.
TAKEBACK_EXPORT int tb_statistics(const Layer* layer, const void* x, void* out) {
  return with_dtype(layer->dtype, [=]<class T>(T) {
    if (layer->last) statistics_of_rows(*layer, static_cast<const T*>(x), static_cast<Acc<T>*>(out));
    else statistics_of_runs(*layer, static_cast<const T*>(x), static_cast<Acc<T>*>(out));
  });
}

TAKEBACK_EXPORT int tb_normalise(const Layer* layer, const void* x, void* out, const void* mean, const void* invstd) {
  return with_dtype(layer->dtype, [=]<class T>(T) {
    using A = Acc<T>;
    const Tables<A> tables(*layer, static_cast<const A*>(mean), static_cast<const A*>(invstd), nullptr);
    with_activation<A>(*layer, [&](auto act) {
      normalise(*layer, act, static_cast<const T*>(x), static_cast<T*>(out), tables);
    });
  });
}

// out: [2, channels], sums of dz and of dz * xhat.
TAKEBACK_EXPORT int tb_gather_sums(const Layer* layer, const void* dy, const void* saved, const void* mean,
                                   const void* invstd, void* out) {
  return with_dtype(layer->dtype, [=]<class T>(T) {
    using A = Acc<T>;
    const Tables<A> tables(*layer, static_cast<const A*>(mean), static_cast<const A*>(invstd), nullptr);
    with_backward<A>(*layer, [&]<bool kFromOutput, class Act>(Act act) {
      gather<T, Act, kFromOutput>(*layer, act, static_cast<const T*>(dy), static_cast<const T*>(saved),
                                  static_cast<A*>(out), tables);
    });
  });
}

// means: null where the statistics were constants.
TAKEBACK_EXPORT int tb_put(const Layer* layer, const void* dy, const void* saved, void* out, const void* mean,
                           const void* invstd, const void* means) {
  return with_dtype(layer->dtype, [=]<class T>(T) {
    using A = Acc<T>;
    const Tables<A> tables(*layer, static_cast<const A*>(mean), static_cast<const A*>(invstd),
                           static_cast<const A*>(means));
    with_backward<A>(*layer, [&]<bool kFromOutput, class Act>(Act act) {
      put<T, Act, kFromOutput>(*layer, act, static_cast<const T*>(dy), static_cast<const T*>(saved),
                               static_cast<T*>(out), tables, !means);
    });
  });
}
