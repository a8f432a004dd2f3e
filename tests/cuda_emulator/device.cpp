// Behind device.h, mma.h and hopper.h: fibers, memory and what threads share. Compiled once, and linked to each
// kernel, so that libraries share no state.
#undef _FORTIFY_SOURCE  // its longjmp keeps to one stack
#include <setjmp.h>
#include <ucontext.h>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <string>
#include <vector>
#include "device.h"
#include "mma.h"

// ---- threads

struct Barrier { int count = 0, generation = 0; };
struct Block {
  std::vector<char> dynamic;
  std::map<int, std::vector<char>> arrays;
  Barrier barrier;
  std::vector<Barrier> warps;
  std::vector<Slot> lanes;
};
struct Running : Fiber {
  ucontext_t start;
  jmp_buf place;
  std::vector<char> stack;
  bool begun, done;
};
static jmp_buf main_place;
Fiber* current;
static Running* running() { return static_cast<Running*>(current); }
static std::vector<Block>* cluster_blocks;
static Barrier cluster_barrier;
Dim block_dim, grid_dim;
int threads_per_block, cluster_size;
long long switches_without_progress;
static long long arrivals;  // at barriers, of all threads
static std::string failure;
// Remembers the first failure and leaves the fiber for good; the run ends.
static void fail(const std::string& what) {
  if (failure.empty())
    failure = what + " (block " + std::to_string(current->block.x) + "," +
              std::to_string(current->block.y) + " thread " + std::to_string(current->linear) + ")";
  for (;;) yield_fiber();
}
void fail(const char* what) { fail(std::string(what)); }
// To and fro by longjmp: swapcontext asks the kernel for signals twice.
__attribute__((noinline)) void yield_fiber() {
  if (!_setjmp(running()->place)) _longjmp(main_place, 1);
}
__attribute__((noinline)) static void resume(Running* fiber) {
  if (_setjmp(main_place)) return;
  if (fiber->begun) _longjmp(fiber->place, 1);
  fiber->begun = true;
  setcontext(&fiber->start);
}
static void arrive_and_wait(Barrier& barrier, int expected) {
  int generation = barrier.generation;
  arrivals++;
  if (++barrier.count == expected) {
    barrier.count = 0;
    barrier.generation++;
    switches_without_progress = 0;
  } else {
    while (barrier.generation == generation) yield_fiber();
  }
}
static int warp_width() {
  return std::min(32, threads_per_block - current->linear / 32 * 32);
}
void __syncwarp(unsigned) {
  arrive_and_wait(current->home->warps[current->linear / 32], warp_width());
}
void __syncthreads() { arrive_and_wait(current->home->barrier, threads_per_block); }
Slot* exchange_slots() { return current->home->lanes.data(); }

// ---- memory

struct Range { const char* low; const char* high; const char* name; };
static std::vector<Range> ranges;
struct Watched { const char *low, *high; unsigned char* counts; };
static std::vector<Watched> watched;
static int fill = 0xff;  // what shared memory holds before it is written
static bool random_orders;
static std::mt19937 orders;
extern "C" __attribute__((visibility("default"))) void watch(const char* low, long long bytes, unsigned char* counts) {
  watched.push_back({low, low + bytes, counts});
}
extern "C" __attribute__((visibility("default"))) void begin_with(int byte, int seed) {
  watched.clear(), fill = byte;
  random_orders = seed >= 0;
  orders.seed(seed);
}
void check(const void* p, size_t size, size_t alignment, bool counted) {
  if ((uintptr_t)p % alignment) fail("misaligned access of " + std::to_string(size) + " bytes");
  const char* c = (const char*)p;
  if (counted)
    for (const Watched& w : watched)
      if (c >= w.low && c + size <= w.high)
        for (size_t i = 0; i < size; i++) w.counts[c - w.low + i] += w.counts[c - w.low + i] < 255;
  for (const Range& r : ranges)
    if (c >= r.low && c + size <= r.high) {
      if (counted && current->waits_yet) fail("memory is touched in front of the wait");
      return;
    }
  Block* home = current->home;
  auto inside = [&](std::vector<char>& m) { return c >= m.data() && c + size <= m.data() + m.size(); };
  if (inside(home->dynamic)) return;
  for (auto& entry : home->arrays)
    if (inside(entry.second)) return;
  fail("access of " + std::to_string(size) + " bytes out of bounds");
}
void* shared_memory(int id, long long bytes, int alignment) {
  std::vector<char>& memory = current->home->arrays[id];
  if (memory.empty()) memory.assign(bytes + alignment, (char)fill);
  return (void*)(((uintptr_t)memory.data() + alignment - 1) / alignment * alignment);
}
void* dynamic_memory() { return (void*)(((uintptr_t)current->home->dynamic.data() + 1023) / 1024 * 1024); }

// ---- copies and exchanges

// Asynchronous copies of a thread's ring arrive when it waits for them, the oldest group first.
struct RingCopies { std::vector<std::vector<std::pair<void*, const void*>>> groups{1}; };
static std::map<Fiber*, RingCopies> ring_copies;
void tvmf_ring_copy(void* d, const void* s) {
  check(d, 16, 16), check(s, 16, 16);
  ring_copies[current].groups.back().push_back({d, s});
}
void tvmf_ring_commit() { ring_copies[current].groups.emplace_back(); }
void ring_wait(size_t newer) {
  auto& groups = ring_copies[current].groups;
  for (; groups.size() > newer + 1; groups.erase(groups.begin()))
    for (auto& copy : groups[0]) memcpy(copy.first, copy.second, 16);
}
struct AsyncCopy { char* target; const char* source; int size, count; };
static std::map<Fiber*, std::vector<std::vector<AsyncCopy>>> async_groups;
static std::map<Fiber*, std::vector<AsyncCopy>> async_open;
void async_copy(void* d, const void* s, long long at, int size, int count) {
  const char* source = (const char*)s + at;
  check(d, size, size);
  if (count) check(source, count, size);
  async_open[current].push_back({(char*)d, source, size, count});
}
void tvmf_async_commit() {
  async_groups[current].push_back(async_open[current]);
  async_open[current].clear();
}
void async_land(size_t left) {
  auto& groups = async_groups[current];
  while (groups.size() > left) {
    for (AsyncCopy& c : groups.front()) {
      memcpy(c.target, c.source, c.count);
      memset(c.target + c.count, 0, c.size - c.count);
    }
    groups.erase(groups.begin());
  }
}
static std::map<std::pair<Block*, int>, Fragments> fragments;
Fragments& warp_fragments() { return fragments[{current->home, current->linear / 32}]; }
static std::map<std::pair<Block*, int>, std::vector<Shown>> shown_tables;
static std::map<Fiber*, int> shown_turns;
Shown* show(const Shown& own) {
  int turn = shown_turns[current]++ % 2;
  auto& table = shown_tables[{current->home, current->linear / 32 * 2 + turn}];
  if (table.size() < 32) table.resize(32);
  table[current->linear % 32] = own;
  __syncwarp();
  return table.data();
}
void tvmf_cluster_sync() { arrive_and_wait(cluster_barrier, threads_per_block * cluster_size); }
void tvmf_cluster_store(void* p, float v, int rank) {
  Block &home = *current->home, &other = (*cluster_blocks)[rank];
  for (auto& entry : home.arrays) {
    char* start = entry.second.data();
    if ((char*)p < start || (char*)p + 4 > start + entry.second.size()) continue;
    std::vector<char>& memory = other.arrays[entry.first];
    if (memory.empty()) memory.assign(entry.second.size(), (char)fill);
    // equal offsets behind the aligned start
    auto aligned = [](char* c) { return ((uintptr_t)c + 63) / 64 * 64; };
    memcpy((char*)aligned(memory.data()) + ((uintptr_t)p - aligned(start)), &v, 4);
    return;
  }
  fail("cluster store outside of a shared array");
}
void tvmf_bulk_copy(void* d, const void* s, unsigned bytes, void* b) {
  if (bytes % 16) fail("bulk copy of " + std::to_string(bytes) + " bytes");
  check(s, bytes, 16);
  check(d, bytes, 16);
  memcpy(d, s, bytes);
  Transfer* t = (Transfer*)b;
  if ((t->pending -= bytes) == 0) t->phase++, switches_without_progress = 0;
}

#include "hopper.cpp"

// ---- launches

extern "C" void launch_kernel(void** arguments);  // the kernel, with its arguments
static void** kernel_arguments;
static void enter() {
  if (!current->linear && !current->rank) clear_units();
  launch_kernel(kernel_arguments);
  if (current->waits_yet) fail("a thread ends without a wait");
  running()->done = true;
  yield_fiber();
}
static void run_cluster(std::vector<Running>& fibers, Dim first, int dynamic_bytes) {
  std::vector<Block> blocks(cluster_size);
  cluster_blocks = &blocks;
  cluster_barrier = Barrier();
  for (Block& block : blocks) {
    block.dynamic.assign(dynamic_bytes + (dynamic_bytes ? 1024 : 0), (char)fill);
    block.warps.resize(threads_per_block / 32 + 1);
    block.lanes.resize(threads_per_block + 64);
  }
  for (int i = 0; i < (int)fibers.size(); i++) {
    Running& f = fibers[i];
    int t = i % threads_per_block;
    f.begun = f.done = false;
    f.waits_yet = false;
    f.linear = t;
    f.rank = i / threads_per_block;
    f.thread = {t % block_dim.x, t / block_dim.x % block_dim.y, t / block_dim.x / block_dim.y};
    f.block = {first.x + f.rank, first.y, first.z};
    f.home = &blocks[f.rank];
    getcontext(&f.start);
    f.start.uc_stack.ss_sp = f.stack.data();
    f.start.uc_stack.ss_size = f.stack.size();
    f.start.uc_link = nullptr;
    makecontext(&f.start, enter, 0);
  }
  // Threads take turns at every barrier; in random orders warps do, each as far as it gets without the others.
  std::vector<std::vector<Running*>> warps;
  for (Running& f : fibers) {
    if (warps.empty() || (random_orders && f.linear % 32 == 0)) warps.emplace_back();
    warps.back().push_back(&f);
  }
  switches_without_progress = 0;
  for (bool left = true; left;) {
    left = false;
    if (random_orders) std::shuffle(warps.begin(), warps.end(), orders);
    for (auto& warp : warps) {
      long long before;
      do {
        before = arrivals;
        for (Running* f : warp) {
          if (f->done) continue;
          left = true;
          current = f;
          resume(f);
          if (!failure.empty()) return;
          if (f->done) switches_without_progress = 0;
        }
      } while (random_orders && arrivals != before);
    }
    if (++switches_without_progress > 10000) {
      failure = "the threads wait for each other for ever";
      return;
    }
  }
}
extern "C" __attribute__((visibility("default"))) const char* run(void** arguments, void** lows, long long* sizes, int count, const unsigned* shape) {
  ranges.clear();
  for (int i = 0; i < count; i++)
    ranges.push_back({(char*)lows[i], (char*)lows[i] + sizes[i], ""});
  kernel_arguments = arguments;
  grid_dim = {shape[0], shape[1], shape[2]};
  block_dim = {shape[3], shape[4], shape[5]};
  cluster_size = shape[6];
  threads_per_block = block_dim.x * block_dim.y * block_dim.z;
  std::vector<Running> fibers(threads_per_block * cluster_size);
  for (Running& f : fibers) f.stack.resize(65536);
  failure.clear();
  for (unsigned z = 0; z < grid_dim.z; z++)
    for (unsigned y = 0; y < grid_dim.y; y++)
      for (unsigned x = 0; x < grid_dim.x; x += cluster_size) {
        run_cluster(fibers, {x, y, z}, shape[7]);
        if (!failure.empty()) return failure.c_str();
      }
  return nullptr;
}
