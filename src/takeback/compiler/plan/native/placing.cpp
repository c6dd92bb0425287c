// Places items one by one, as plan/greedy.py does in Python: the same numbers in, the same offsets out.
//
// Memory contract: everything is the caller's; nothing is allocated, and nothing is kept. `rows` has room for one row
// for each item. The rows that are placed lie in it sorted by offset.
//
// No header of the standard library but those of C: it compiles in a fraction of a second.

#include <stdint.h>
#include <string.h>

namespace {

struct Row {
  int64_t offset, top, start, end;
};

// An offset where `size` bytes touch no rival: in a gap below the ceiling, else on top of all rivals.
int64_t find(const Row* rows, int64_t count, int64_t start, int64_t end, int64_t size, int64_t ceiling, bool best_fit,
             bool hangs) {
  int64_t found = -1, found_bytes = 0, floor = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Row& row = rows[i];
    if (row.start < end && row.end > start) {
      const int64_t gap = row.offset - floor;
      if (gap >= size && (found < 0 || (best_fit ? gap < found_bytes : hangs))) {
        found = floor;
        found_bytes = gap;
        if (!best_fit && !hangs) {
          return found;
        }
      }
      floor = row.top > floor ? row.top : floor;
    }
  }
  const int64_t gap = ceiling - floor;
  if (gap >= size && (found < 0 || (best_fit ? gap < found_bytes : hangs))) {
    found = floor;
    found_bytes = gap;
  }
  if (found < 0) {
    return floor;
  }
  return hangs ? found + found_bytes - size : found;
}

void put(Row* rows, int64_t count, const Row& row) {
  int64_t low = 0, high = count;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (rows[middle].offset < row.offset) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  memmove(rows + low + 1, rows + low, static_cast<size_t>(count - low) * sizeof(Row));
  rows[low] = row;
}

}  // namespace

// Gives the height of the arena. `offsets` holds those of the `pinned` first items of `order`; the others are found.
// The indices of those above the ceiling go into `sticking_out`. `counts` gets how many were placed, and how many
// stick out. With `give_up_at` of 0 or more it stops as soon as the arena is no smaller than that.
extern "C" __attribute__((visibility("default"))) int64_t tb_place(
    const int64_t* sizes, const int64_t* starts, const int64_t* ends, const int64_t* order, int64_t pinned,
    int64_t number, const uint8_t* hangs, int64_t best_fit, int64_t ceiling, int64_t give_up_at, int64_t* offsets,
    int64_t* sticking_out, int64_t* counts, void* room) {
  Row* rows = static_cast<Row*>(room);
  int64_t arena = 0, out = 0;
  for (int64_t i = 0; i < number; ++i) {
    const int64_t item = order[i];
    const int64_t size = sizes[item], start = starts[item], end = ends[item];
    int64_t offset = offsets[item];
    if (i >= pinned) {
      if (give_up_at >= 0 && arena >= give_up_at) {
        counts[0] = i;
        counts[1] = out;
        return arena;
      }
      offset = find(rows, i, start, end, size, ceiling, best_fit != 0, hangs[item] != 0);
      offsets[item] = offset;
      if (offset + size > ceiling) {
        sticking_out[out++] = item;
      }
    }
    put(rows, i, Row{offset, offset + size, start, end});
    arena = offset + size > arena ? offset + size : arena;
  }
  counts[0] = number;
  counts[1] = out;
  return arena;
}
