// The CPU allocator of a planned step: serves the step's own thread from the arena, all others as before.
//
// Memory contract
//   * Every block we hand out has context == data pointer (raw_allocate asserts it), and free_block() frees
//     any pointer that we or the original allocator gave out, at any time, on any thread:
//       - arena blocks give nothing back, they only drop their reference: an arena is unmapped once Python
//         has let go of it and its last served block is gone;
//       - worker blocks go onto the freeing thread's free list and are never unmapped;
//       - all others go to the original allocator's raw deleter.
//   * A served block's bytes are whatever the plan says. Whether two live blocks may share them is the plan's
//     business, and was proved before the plan came here.
//   * A thread without a session and outside an OpenMP parallel region gets the original DataPtr, untouched.
//   * Zero-byte requests are never logged, counted or served: the original answers them with null.
//   * Installed once, never removed, never unloaded.
//
// Needs c10 headers only. Checked against torch 2.11.0, 2.13.0 and 2.14.1.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kPage = std::size_t{4} << 10;
constexpr std::size_t kMissesKept = 1024;

c10::Allocator* original = nullptr;
c10::DeleterFnPtr original_free = nullptr;

// ---------------------------------------------------------------------------------------------- OpenMP

int not_in_parallel() {
  return 0;
}

int (*in_parallel)() = &not_in_parallel;

// The OpenMP that torch itself uses: another package may have loaded a second one.
void find_openmp() {
  void* torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  void* found = torch ? dlsym(torch, "omp_in_parallel") : nullptr;
  if (!found) {
    found = dlsym(RTLD_DEFAULT, "omp_in_parallel");
  }
  if (found) {
    in_parallel = reinterpret_cast<int (*)()>(found);
  }
}

// ---------------------------------------------------------------------------------------------- arenas

struct Arena {
  char* base;
  std::size_t size_bytes;  // as mapped
  std::atomic<std::int64_t> references{1};  // Python's, and one per served block still alive

  bool holds(const void* p) const {
    return static_cast<std::size_t>(static_cast<const char*>(p) - base) < size_bytes;
  }
};

std::mutex arenas_mutex;
std::map<std::uintptr_t, Arena*>& arenas() {  // by base address
  static auto* all = new std::map<std::uintptr_t, Arena*>();  // never destroyed: tensors die after statics
  return *all;
}
std::atomic<std::int64_t> arena_count{0};

Arena* find_arena(const void* p) {
  std::lock_guard<std::mutex> lock(arenas_mutex);
  auto after = arenas().upper_bound(reinterpret_cast<std::uintptr_t>(p));
  if (after == arenas().begin()) {
    return nullptr;
  }
  Arena* arena = std::prev(after)->second;
  return arena->holds(p) ? arena : nullptr;
}

void drop_reference(Arena* arena) {
  if (arena->references.fetch_sub(1, std::memory_order_acq_rel) != 1) {
    return;
  }
  {
    std::lock_guard<std::mutex> lock(arenas_mutex);
    arenas().erase(reinterpret_cast<std::uintptr_t>(arena->base));
  }
  arena_count.fetch_sub(1);
  munmap(arena->base, arena->size_bytes);
  delete arena;
}

char* map_aligned(std::size_t size_bytes, int extra_flags) {
  const std::size_t asked = size_bytes + kHugePage;
  void* raw = mmap(nullptr, asked, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | extra_flags, -1, 0);
  if (raw == MAP_FAILED) {
    return nullptr;
  }
  char* start = static_cast<char*>(raw);
  const auto address = reinterpret_cast<std::uintptr_t>(raw);
  const std::size_t before = (kHugePage - address % kHugePage) % kHugePage;
  if (before) {
    munmap(start, before);
  }
  if (asked - before > size_bytes) {
    munmap(start + before + size_bytes, asked - before - size_bytes);
  }
  return start + before;
}

// ---------------------------------------------------------------------------------------------- workers
//
// The other threads of a parallel region allocate in racing order, so their requests cannot be scripted. They
// are small; each thread keeps free lists by size class, so that a steady step carves nothing new.

constexpr int kSmallestClass = 6;  // 64 B, c10's alignment
constexpr int kLargestClass = 20;  // 1 MiB
constexpr int kClasses = kLargestClass - kSmallestClass + 1;
constexpr int kKeptPerClass = 64;  // beyond it, blocks go to the shared lists: another thread allocates them

struct FreeBlock {
  FreeBlock* next;
};

char* region_base = nullptr;
std::size_t region_size_bytes = 0;
std::atomic<std::size_t> region_used{0};

std::mutex shared_mutex;
FreeBlock* shared_lists[kClasses] = {};
std::atomic<std::int64_t> shared_counts[kClasses] = {};

std::atomic<std::int64_t> worker_requests{0};
std::atomic<std::int64_t> worker_new{0};
std::atomic<std::int64_t> worker_passed{0};

int size_class(std::size_t n) {
  const int width = n > 1 ? 64 - __builtin_clzll(n - 1) : 0;
  return std::max(width, kSmallestClass) - kSmallestClass;
}

void push_shared(int c, FreeBlock* block) {
  std::lock_guard<std::mutex> lock(shared_mutex);
  block->next = shared_lists[c];
  shared_lists[c] = block;
  shared_counts[c].fetch_add(1, std::memory_order_relaxed);
}

FreeBlock* pop_shared(int c) {
  if (shared_counts[c].load(std::memory_order_relaxed) == 0) {
    return nullptr;
  }
  std::lock_guard<std::mutex> lock(shared_mutex);
  FreeBlock* block = shared_lists[c];
  if (block) {
    shared_lists[c] = block->next;
    shared_counts[c].fetch_sub(1, std::memory_order_relaxed);
  }
  return block;
}

// Set when this thread's lists are gone: other thread_local destructors may still free tensors after that.
thread_local bool lists_gone = false;

struct FreeLists {
  FreeBlock* heads[kClasses] = {};
  int counts[kClasses] = {};

  ~FreeLists() {
    lists_gone = true;
    for (int c = 0; c < kClasses; ++c) {
      while (FreeBlock* block = heads[c]) {
        heads[c] = block->next;
        push_shared(c, block);
      }
    }
  }
};

thread_local FreeLists free_lists;

// A block's class is not stored beside it: the region is cut into 1 MiB slabs of one class each.
constexpr std::size_t kSlab = std::size_t{1} << kLargestClass;
constexpr std::size_t kRegionWanted = std::size_t{1} << 30;
std::vector<std::atomic<std::uint8_t>>* slab_classes = nullptr;

struct Carving {  // the slab this class is being cut from
  std::mutex mutex;
  char* next = nullptr;
  char* end = nullptr;
};

Carving carvings[kClasses];

void* carve(int c) {
  const std::size_t size_bytes = std::size_t{1} << (c + kSmallestClass);
  Carving& carving = carvings[c];
  std::lock_guard<std::mutex> lock(carving.mutex);
  if (carving.next == carving.end) {
    const std::size_t at = region_used.fetch_add(kSlab, std::memory_order_relaxed);
    if (at + kSlab > region_size_bytes) {
      region_used.fetch_sub(kSlab, std::memory_order_relaxed);
      return nullptr;
    }
    (*slab_classes)[at / kSlab].store(static_cast<std::uint8_t>(c), std::memory_order_relaxed);
    carving.next = region_base + at;
    carving.end = carving.next + kSlab;
  }
  void* block = carving.next;
  carving.next += size_bytes;
  return block;
}

bool in_region(const void* p) {
  return static_cast<std::size_t>(static_cast<const char*>(p) - region_base) < region_size_bytes;
}

void worker_free(void* p) {
  const std::size_t offset = static_cast<std::size_t>(static_cast<char*>(p) - region_base);
  const int c = (*slab_classes)[offset / kSlab].load(std::memory_order_relaxed);
  auto* block = static_cast<FreeBlock*>(p);
  if (lists_gone || free_lists.counts[c] >= kKeptPerClass) {
    push_shared(c, block);
    return;
  }
  block->next = free_lists.heads[c];
  free_lists.heads[c] = block;
  ++free_lists.counts[c];
}

void map_region() {
  for (std::size_t size_bytes = kRegionWanted; size_bytes >= 16 * kSlab; size_bytes /= 2) {
    if (char* base = map_aligned(size_bytes, MAP_NORESERVE)) {
      slab_classes = new std::vector<std::atomic<std::uint8_t>>(size_bytes / kSlab);
      region_base = base;
      region_size_bytes = size_bytes;
      return;
    }
  }
}

// ---------------------------------------------------------------------------------------------- sessions

struct Event {
  std::int64_t kind;  // 0 alloc, 1 free
  std::int64_t op;
  std::int64_t size_bytes;
  std::int64_t id;       // counts up within one session
  std::int64_t address;
  std::int64_t entry;    // of the script, -1 where there is none
};

struct Miss {
  std::int64_t op;
  std::int64_t size_bytes;
};

struct Counters {
  std::int64_t served, passed, misses, missed_bytes, worker_requests, worker_new, worker_passed;
};

// One recording or one script. It belongs to at most one thread at a time, from enter to leave.
struct Session {
  // Set once.
  const std::int64_t* cell = nullptr;  // the current op, written by Python on this very thread
  Arena* arena = nullptr;              // null: record
  std::vector<std::int64_t> first, sizes, offsets;

  // Set by enter.
  std::atomic<bool> entered{false};
  bool logs = false;
  std::int64_t serial = 0;
  std::int64_t last_op = -1;
  std::int64_t next_entry = 0;
  std::int64_t next_id = 0;
  Counters counters{};
  std::vector<Event> events;
  std::vector<Miss> misses;
  // Live served blocks by address, oldest first, filled while logging: a plan may give bytes on before their
  // old owner is freed.
  std::unordered_map<void*, std::vector<Event>> served;

  std::int64_t op() const {
    return *static_cast<const volatile std::int64_t*>(cell);
  }
};

thread_local Session* current = nullptr;
std::atomic<std::int64_t> active_sessions{0};
std::atomic<std::int64_t> last_serial{0};

// Logged blocks of the original allocator that are still alive; they may outlive their session by far.
struct Logged {
  std::int64_t serial;
  Event alloc;
};

std::mutex logged_mutex;
std::unordered_map<void*, Logged>& logged() {
  static auto* blocks = new std::unordered_map<void*, Logged>();  // never destroyed, as above
  return *blocks;
}
std::atomic<std::int64_t> logged_count{0};

void log_free(Session* session, const Event& alloc) {
  Event event = alloc;
  event.kind = 1;
  event.op = session->op();
  session->events.push_back(event);
}

void forget_logged(void* p) {
  Logged block;
  {
    std::lock_guard<std::mutex> lock(logged_mutex);
    auto found = logged().find(p);
    if (found == logged().end()) {
      return;
    }
    block = found->second;
    logged().erase(found);
    logged_count.fetch_sub(1, std::memory_order_relaxed);
  }
  if (current && current->logs && current->serial == block.serial) {
    log_free(current, block.alloc);
  }
}

void free_block(void* p) {
  if (!p) {
    return;
  }
  Session* session = current;
  if (session && session->arena && session->arena->holds(p)) {
    if (session->logs) {
      auto found = session->served.find(p);
      if (found != session->served.end()) {
        log_free(session, found->second.front());
        found->second.erase(found->second.begin());
        if (found->second.empty()) {
          session->served.erase(found);
        }
      }
    }
    drop_reference(session->arena);
    return;
  }
  if (in_region(p)) {
    worker_free(p);
    return;
  }
  if (arena_count.load(std::memory_order_relaxed)) {
    if (Arena* arena = find_arena(p)) {
      drop_reference(arena);
      return;
    }
  }
  if (logged_count.load(std::memory_order_relaxed)) {
    forget_logged(p);
  }
  original_free(p);
}

c10::DataPtr ours(void* p) {
  return {p, p, &free_block, c10::Device(c10::DeviceType::CPU)};
}

c10::DataPtr worker_allocate(std::size_t n) {
  worker_requests.fetch_add(1, std::memory_order_relaxed);
  const int c = size_class(n);
  if (c < kClasses) {
    if (!lists_gone && free_lists.heads[c]) {
      FreeBlock* block = free_lists.heads[c];
      free_lists.heads[c] = block->next;
      --free_lists.counts[c];
      return ours(block);
    }
    if (void* block = pop_shared(c)) {
      return ours(block);
    }
    if (void* block = carve(c)) {
      worker_new.fetch_add(1, std::memory_order_relaxed);
      return ours(block);
    }
  }
  worker_passed.fetch_add(1, std::memory_order_relaxed);
  return original->allocate(n);
}

// From the original allocator, and logged, so that its free can be.
c10::DataPtr logged_allocate(Session* session, std::size_t n, std::int64_t entry) {
  c10::DataPtr data = original->allocate(n);
  void* p = data.get();
  const Event event{0, session->op(), static_cast<std::int64_t>(n), session->next_id++,
                    static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(p)), entry};
  session->events.push_back(event);
  {
    std::lock_guard<std::mutex> lock(logged_mutex);
    if (logged().insert_or_assign(p, Logged{session->serial, event}).second) {
      logged_count.fetch_add(1, std::memory_order_relaxed);
    }
  }
  data.release_context();
  return ours(p);
}

c10::DataPtr replay_allocate(Session* session, std::size_t n) {
  const std::int64_t op = session->op();
  if (op != session->last_op) {
    session->last_op = op;
    session->next_entry = 0;
  }
  std::int64_t entry = -1;
  if (op >= 0 && op + 1 < static_cast<std::int64_t>(session->first.size())) {
    const std::int64_t at = session->first[op] + session->next_entry;
    if (at < session->first[op + 1] && session->sizes[at] == static_cast<std::int64_t>(n)) {
      entry = at;
    }
  }
  if (entry < 0) {
    c10::DataPtr data = session->logs ? logged_allocate(session, n, -1) : original->allocate(n);
    ++session->counters.misses;
    session->counters.missed_bytes += static_cast<std::int64_t>(n);
    if (session->misses.size() < kMissesKept) {
      session->misses.push_back({op, static_cast<std::int64_t>(n)});
    }
    return data;
  }
  const std::int64_t offset = session->offsets[entry];
  if (offset < 0) {
    c10::DataPtr data = session->logs ? logged_allocate(session, n, entry) : original->allocate(n);
    ++session->next_entry;
    ++session->counters.passed;
    return data;
  }
  ++session->next_entry;
  ++session->counters.served;
  char* p = session->arena->base + offset;
  session->arena->references.fetch_add(1, std::memory_order_relaxed);
  if (session->logs) {
    const Event event{0, op, static_cast<std::int64_t>(n), session->next_id++,
                      static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(p)), entry};
    session->events.push_back(event);
    session->served[p].push_back(event);
  }
  return ours(p);
}

struct StepAllocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t n) override {
    Session* session = current;
    if (!session) [[likely]] {
      if (active_sessions.load(std::memory_order_relaxed) == 0 || n == 0 || !in_parallel()) {
        return original->allocate(n);
      }
      return worker_allocate(n);
    }
    if (n == 0) {
      return original->allocate(n);
    }
    // Inside a parallel region too: work is divided statically, so this thread's own requests repeat.
    // Measured on torch 2.13, 2 to 4 threads on 2 busy cores: attention, convolution, norms, recurrences.
    if (session->arena) {
      return replay_allocate(session, n);
    }
    c10::DataPtr data = logged_allocate(session, n, -1);
    ++session->counters.passed;
    return data;
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &free_block;
  }

  void copy_data(void* dest, const void* src, std::size_t count) const override {
    original->copy_data(dest, src, count);
  }
};

Counters worker_totals() {
  Counters totals{};
  totals.worker_requests = worker_requests.load(std::memory_order_relaxed);
  totals.worker_new = worker_new.load(std::memory_order_relaxed);
  totals.worker_passed = worker_passed.load(std::memory_order_relaxed);
  return totals;
}

void add_workers(Counters& counters, const Counters& totals, int sign) {
  counters.worker_requests += sign * totals.worker_requests;
  counters.worker_new += sign * totals.worker_new;
  counters.worker_passed += sign * totals.worker_passed;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// 0: installed. 1: the CPU allocator in use has no raw deleter. 2: it could not be replaced.
EXPORT int tb_install() {
  static StepAllocator* const allocator = new StepAllocator();
  static const int result = [] {
    original = c10::GetCPUAllocator();
    original_free = original->raw_deleter();
    if (!original_free) {
      return 1;
    }
    find_openmp();
    map_region();
    // The lowest priority that is accepted, so that whoever comes after us can still replace us.
    for (int priority = 0; priority < 256; ++priority) {
      c10::SetCPUAllocator(allocator, static_cast<std::uint8_t>(priority));
      if (c10::GetCPUAllocator() == allocator) {
        return 0;
      }
    }
    return 2;
  }();
  return result;
}

// Null: no memory.
EXPORT Arena* tb_arena_new(std::int64_t size_bytes) {
  const std::size_t pages = (static_cast<std::size_t>(size_bytes) + kPage - 1) / kPage;
  const std::size_t mapped = std::max(pages, std::size_t{1}) * kPage;
  char* base = map_aligned(mapped, 0);
  if (!base) {
    return nullptr;
  }
#ifdef MADV_HUGEPAGE
  if (mapped >= kHugePage) {
    madvise(base, mapped, MADV_HUGEPAGE);  // a wish: where it is refused, pages are small
  }
#endif
  auto* arena = new Arena{base, mapped};
  {
    std::lock_guard<std::mutex> lock(arenas_mutex);
    arenas().emplace(reinterpret_cast<std::uintptr_t>(base), arena);
  }
  arena_count.fetch_add(1);
  return arena;
}

EXPORT void* tb_arena_base(Arena* arena) {
  return arena->base;
}

EXPORT void tb_arena_release(Arena* arena) {
  drop_reference(arena);
}

EXPORT std::int64_t tb_arena_count() {
  return arena_count.load();
}

EXPORT std::int64_t tb_logged_count() {
  return logged_count.load();
}

// With an arena: a script to replay. Without: a recording. The caller has checked all numbers.
EXPORT Session* tb_session_new(const std::int64_t* cell, Arena* arena, const std::int64_t* first,
                               std::int64_t ops, const std::int64_t* sizes, const std::int64_t* offsets,
                               std::int64_t entries) {
  auto* session = new Session();
  session->cell = cell;
  session->arena = arena;
  if (arena) {
    arena->references.fetch_add(1, std::memory_order_relaxed);
    session->first.assign(first, first + ops + 1);
    session->sizes.assign(sizes, sizes + entries);
    session->offsets.assign(offsets, offsets + entries);
  }
  return session;
}

// 0: entered. 1: this thread is inside a session. 2: this session is entered on another thread.
EXPORT int tb_enter(Session* session, int logs) {
  if (current) {
    return 1;
  }
  if (session->entered.exchange(true, std::memory_order_acquire)) {
    return 2;
  }
  session->logs = logs || !session->arena;
  session->serial = last_serial.fetch_add(1, std::memory_order_relaxed) + 1;
  session->last_op = -1;
  session->next_entry = 0;
  session->next_id = 0;
  session->counters = {};
  add_workers(session->counters, worker_totals(), -1);
  session->events.clear();
  session->misses.clear();
  session->served.clear();
  active_sessions.fetch_add(1, std::memory_order_relaxed);
  current = session;
  return 0;
}

// 0: left. 1: this thread is not inside this session; nothing changed.
EXPORT int tb_leave(Session* session) {
  if (current != session) {
    return 1;
  }
  current = nullptr;
  active_sessions.fetch_sub(1, std::memory_order_relaxed);
  add_workers(session->counters, worker_totals(), 1);
  session->entered.store(false, std::memory_order_release);
  return 0;
}

EXPORT void tb_session_delete(Session* session) {
  tb_leave(session);  // does nothing unless this thread is inside
  if (session->entered.load()) {
    return;  // another thread still points at it: leaking is the lesser evil
  }
  if (session->arena) {
    drop_reference(session->arena);
  }
  delete session;
}

EXPORT Session* tb_current() {
  return current;
}

EXPORT Counters* tb_counters(Session* session) {
  return &session->counters;
}

EXPORT std::int64_t tb_events(Session* session, const Event** events) {
  *events = session->events.data();
  return static_cast<std::int64_t>(session->events.size());
}

EXPORT std::int64_t tb_misses(Session* session, const Miss** misses) {
  *misses = session->misses.data();
  return static_cast<std::int64_t>(session->misses.size());
}
