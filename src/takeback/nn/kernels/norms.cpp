// Backward of the norms on the CPU, with the parameters' gradients written straight into slices of a flat buffer.
//
// Memory contract
//   * dy, x, weight and statistics are only read. dx is overwritten; a slice is overwritten, or added onto where its
//     `accumulate` is set: then the new gradient is complete, in float or double, before the one addition.
//   * dx and slices may be null: not wanted. A slice has any alignment of its dtype, and nothing beside it is touched.
//   * Scratch is taken before anything is written: for layer_norm, rms_norm and batch_norm of rows two doubles and
//     two floats a parameter and thread; for group_norm, and batch_norm with fewer channels than threads, two doubles
//     a sample and channel. Where it cannot be had the result is 1, and nothing was written.
//   * Equal inputs and thread counts give equal bits: every thread's share, and the order of sums, is fixed.

#include "call.h"
#include "channels.h"
#include "rows.h"

namespace takeback {
namespace {

template <class T>
void run(int norm, const Call& call) {
  switch (norm) {
    case 0: return row_norm<T, true>(call);
    case 1: return row_norm<T, false>(call);
    case 2:
      if (call.spots != 1) return call.training ? batch_norm_runs<T, true>(call) : batch_norm_runs<T, false>(call);
      [[fallthrough]];
    case 3: return call.training ? batch_norm_rows<T, true>(call) : batch_norm_rows<T, false>(call);
    default: return group_norm<T>(call);
  }
}

}  // namespace
}  // namespace takeback

// `norm` is a Norm of norm_call.py.
extern "C" __attribute__((visibility("default"))) int tb_norm_backward(int norm, const takeback::Call* call) {
  using namespace takeback;
  try {
    switch (call->dtype) {
      case kFloat64: run<double>(norm, *call); break;
      case kBFloat16: run<BFloat16>(norm, *call); break;
      case kFloat16: run<Float16>(norm, *call); break;
      default: run<float>(norm, *call);
    }
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}
